"""102 languages to English: a shallow, a deep and a wide model.

Beside them, five languages have models of their own (bilingual). Languages are
grouped by how many training pairs they have, as the paper's figure 3 orders
them; a group's test pairs are scored together.

Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), section 5
"""

from absl import flags

import params
from tools.evaluate import GROUP_COLUMNS, SCORE_COLUMNS
from tools.report import Column, Table, columns
from tools.results import runs
from tools.text import translation_scores as scores

FLAGS = runs.new_flags()
runs.define_translation(FLAGS)

_SHAPES = ("shallow", "deep", "wide")
_LANGUAGES = ("es", "de", "vi", "hi", "so")
_MODEL_COLUMNS = columns(
    "model | num_params: parameters: , | num_steps: steps: , | "
    "minutes: minutes: .0f | nll: test NLL: .3f | "
    "perplexity: perplexity a token: .2f"
)


def run(values: flags.FlagValues) -> list[Table]:
    """Trains all models, and scores their translations."""
    many = [params.get(f"mt.multilingual_{shape}") for shape in _SHAPES]
    single = [params.get(f"mt.bilingual_{name}") for name in _LANGUAGES]
    runs.prepare_devices(
        max(experiment.num_partitions for experiment in [*many, *single])
    )
    sizes = many[0].data.source().sizes
    models, by_group, by_language = [], [], []
    for experiment in [*many, *single]:
        found = runs.finish(experiment, values)
        name = experiment.name.removeprefix("mt.").replace("_", " ")
        models.append(found.row(name))
        is_english = experiment.data.to_english
        made = runs.translated(found, values)
        if experiment in many:
            rows = scores.group_rows(made, sizes, is_english)
            by_group += [{"model": name, **row} for row in rows]
        rows = scores.language_rows(made, sizes, is_english, _LANGUAGES)
        by_language += [{"model": name, **row} for row in rows]
    # Each language with its own model first.
    by_language.sort(
        key=lambda row: (
            _LANGUAGES.index(row["language"]),
            "bilingual" not in row["model"],
        )
    )
    tables = [
        Table("models", "Translation into English", _MODEL_COLUMNS, models),
        Table("groups", _about(values), [_MODEL_COLUMNS[0], *GROUP_COLUMNS]),
        Table("languages", "Five languages", _language_columns()),
    ]
    tables[1].rows += by_group
    tables[2].rows += by_language
    tables[0].notes.append(
        "Each on its own languages, and in its own tokens: compare the "
        "multilingual ones with each other."
    )
    tables[2].notes.append("A few hundred test pairs or less say little.")
    return tables


def _about(values: flags.FlagValues) -> str:
    pairs = "all test pairs"
    if values.max_pairs:
        pairs = f"up to {values.max_pairs} test pairs of a language"
    return f"By size of the language, {pairs}, beam search {values.beam_size}"


def _language_columns() -> list[Column]:
    return [
        Column("language", "language"),
        _MODEL_COLUMNS[0],
        *SCORE_COLUMNS,
    ]
