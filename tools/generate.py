r"""Writes text with a language model that `tools.train` has trained.

    python -m tools.train --params=lm.austen --train_dir=runs/austen
    python -m tools.generate --train_dir=runs/austen \
        --prompt='It is a truth' --num_tokens=50

The same flags give the same text.
"""

import sys

import numpy as np
from absl import flags

from models import sampling
from params.text import TextSource
from params.tokenizer import EOS_ID
from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import doing
from tools.flags import define
from tools.train import trained_run

FLAGS = command_line.new_flags()
trained_run.define_trained(FLAGS)
define(
    FLAGS,
    prompt=("", "How the text begins. Empty: a new paragraph."),
    num_tokens=(50, "Tokens to add to it."),
    temperature=(
        0.8,
        "What logits are divided by; 0 always takes the most likely token.",
    ),
    top_k=(40, "Draw from so many of the most likely tokens. 0: from all.", 0),
    seed=(0, "What the drawn tokens follow from.", 0),
)


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run`."""
    return command_line.run("tools.generate", FLAGS, __doc__, _print, argv)


def _print(values: flags.FlagValues) -> None:
    run = trained_run.load(
        values.train_dir, values.num_partitions, TextSource, "a language model"
    )
    with doing(f"drawing {values.num_tokens} tokens"):
        ids = sampling.generate(
            run.model.layers,
            run.source.encode_prompt(values.prompt),
            values.num_tokens,
            temperature=values.temperature,
            top_k=values.top_k or None,
            seed=values.seed,
        )
    print(text_of(run.source, ids[0]))


def text_of(source: TextSource, ids: np.ndarray) -> str:
    """The text of a stream of tokens."""
    (ends,) = np.nonzero(ids == EOS_ID)
    paragraphs = np.split(ids, ends)[1:]
    texts = source.tokenizer.decode([part[1:].tolist() for part in paragraphs])
    return "\n\n".join(texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
