r"""Translates with a model that `tools.train` has trained.

    python -m tools.train --params=mt.multilingual_shallow --train_dir=runs/mt
    python -m tools.translate --train_dir=runs/mt --language=de --text='Heute'
    python -m tools.translate --train_dir=runs/mt --language=de < GERMAN

Without --text it translates the lines of the standard input, each on its own.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence

from absl import flags

from params.pairs import PairSource
from tfgpipe.commands import command_line
from tools.flags import define
from tools.text.translator import Translator, define_search
from tools.train import trained_run

FLAGS = command_line.new_flags()
trained_run.define_trained(FLAGS)
define(
    FLAGS,
    language=(
        str,
        "Code of the language besides English, such as de. Not needed if the "
        "model knows only one.",
    ),
)
flags.DEFINE_multi_string(
    "text",
    [],
    "What to translate, instead of the standard input. Repeatable.",
    flag_values=FLAGS,
)
define(
    FLAGS,
    batch_size=(
        32,
        "Lines to translate at the same time, unless they are typed.",
    ),
)


define_search(FLAGS)


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run`."""
    return command_line.run("tools.translate", FLAGS, __doc__, _print, argv)


def _print(values: flags.FlagValues) -> None:
    run = trained_run.load(
        values.train_dir,
        values.num_partitions,
        PairSource,
        "a translation model",
    )
    language = _language(values.language, run.source.languages)
    translator = Translator(run, values.beam_size, values.length_penalty)
    is_typed = not values.text and sys.stdin.isatty()
    lines = values.text or (line.rstrip("\n") for line in sys.stdin)
    number = 0
    for batch in _batches(lines, 1 if is_typed else values.batch_size):
        for text in _translated(translator, batch, language, number):
            print(text, flush=is_typed)
        number += len(batch)


def _language(given: str | None, known: Sequence[str]) -> str:
    """The language to translate from, or into."""
    if given in known:
        return given
    if given is None and len(known) == 1:
        return known[0]
    received = "no flag" if given is None else f"--language={given}"
    raise ValueError(
        "--language must be a language that the model was trained with: one "
        f"of {', '.join(sorted(known))}. Received: {received}."
    )


def _batches(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for line in lines:
        batch.append(line)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _translated(
    translator: Translator, lines: list[str], language: str, first: int
) -> list[str]:
    """Translations of lines, of which those without text stay empty."""
    found = [number for number, line in enumerate(lines) if line.strip()]
    translations = [""] * len(lines)
    if not found:
        return translations
    ids = translator.encode([lines[number] for number in found], language)
    for number, is_cut in zip(found, translator.is_cut(ids), strict=True):
        if is_cut:
            print(
                f"tools.translate: line {first + number + 1} is longer than "
                f"the model's {ids.shape[1]} tokens: its end is left out.",
                file=sys.stderr,
            )
    made = translator.translate(ids)
    for number, text in zip(found, made, strict=True):
        translations[number] = text
    return translations


if __name__ == "__main__":
    sys.exit(main(sys.argv))
