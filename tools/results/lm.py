"""A Transformer language model beside a 5-gram Kneser-Ney model.

Both learn from the same chapters of Jane Austen and are tested on the same
ones. Their perplexity a word is that of the same text, each of its words
included: see tools.kneser_ney for how words that are new are treated.
"""

from absl import flags

import params
from tools import kneser_ney
from tools.flags import define
from tools.report import Table, columns
from tools.results import runs
from tools.results.outcome import Outcome, Picture, Series

FLAGS = runs.new_flags()
define(
    FLAGS,
    order=(5, "Tokens of the n-gram model's longest n-gram."),
)

_EXPERIMENT = "lm.austen"
_COLUMNS = columns(
    "model | size | num_steps: steps: , | minutes: minutes: .0f | "
    "word_perplexity: perplexity a word: .1f | perplexity: a token: .2f"
)


def run(values: flags.FlagValues) -> Outcome:
    """Trains the Transformer, counts n-grams, and compares the two."""
    experiment = params.get(_EXPERIMENT)
    runs.prepare_devices(experiment.num_partitions)
    documents = experiment.data.source().documents
    model = kneser_ney.word_model(documents.train, values.order)
    baseline = kneser_ney.evaluate(model, documents.test)
    found = runs.finish(experiment, values)
    rows = [
        {
            "model": f"Transformer ({experiment.name})",
            "size": f"{found.num_params:,} parameters",
            "num_steps": found.num_steps,
            "minutes": found.minutes,
            **found.results,
        },
        {
            "model": f"{values.order}-gram Kneser-Ney",
            "size": f"{baseline.num_ngrams:,} n-grams",
            "word_perplexity": baseline.word_perplexity,
            "num_unknown": baseline.num_unknown,
            "unknown_share": baseline.unknown_share,
        },
    ]
    table = Table(
        "lm",
        f"{baseline.num_words:,} test words, and ends of paragraphs",
        _COLUMNS,
        rows,
        ["A token is a piece of a word; the models' tokens differ."],
    )
    picture = Picture(
        "Language models of Jane Austen's novels",
        "step",
        "test perplexity a word",
        [Series("Transformer", *zip(*found.curves["word_perplexity"]))],
        levels={rows[1]["model"]: baseline.word_perplexity},
        is_log=True,
    )
    return Outcome([table], picture)
