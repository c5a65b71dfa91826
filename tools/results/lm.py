"""A Transformer language model beside a 5-gram Kneser-Ney model.

Both learn from the same chapters of Jane Austen and are tested on the same
ones. Their perplexity a word is that of the same text, each of its words
included. The 5-gram model does not change: what it reached is written down.
"""

from absl import flags

import params
from tools.report import Table, columns
from tools.results import runs

FLAGS = runs.new_flags()

_EXPERIMENT = "lm.austen"
_COLUMNS = columns(
    "model | size | num_steps: steps: , | minutes: minutes: .0f | "
    "word_perplexity: perplexity a word: .1f | perplexity: a token: .2f"
)
_5_GRAMS = {  # by tools.kneser_ney, at commit dea99fe
    "model": "5-gram Kneser-Ney",
    "size": "2,214,808 n-grams",
    "word_perplexity": 261.6,
}


def run(values: flags.FlagValues) -> list[Table]:
    """Trains the Transformer."""
    experiment = params.get(_EXPERIMENT)
    runs.prepare_devices(experiment.num_partitions)
    row = runs.finish(experiment, values).row(f"Transformer ({_EXPERIMENT})")
    row["size"] = f"{row['num_params']:,} parameters"
    return [
        Table(
            "lm",
            "Test perplexity of Jane Austen's novels",
            _COLUMNS,
            [row, _5_GRAMS],
            ["A token is a piece of a word; the models' tokens differ."],
        )
    ]
