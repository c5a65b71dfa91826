r"""Tests a model that `tools.train` has trained, on its test examples.

    python -m tools.evaluate --train_dir=runs/austen
    python -m tools.evaluate --train_dir=runs/mt --beam_size=1 --format=json

Images: accuracy. Language models: perplexity a word, which can be compared
between models, and a token. Translation: perplexity a token, and BLEU and chrF
of beam search, by groups of languages from data-scarce to data-rich.
"""

import sys

from absl import flags

from params.pairs import PairSource
from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import doing
from tools.flags import define
from tools.report import Report, Table, columns, define_format
from tools.text import translation_scores as scores
from tools.text.translator import Translator, define_search
from tools.train import trained_run
from tools.train.trained_run import TrainedRun
from tools.train.trainer import evaluated

FLAGS = command_line.new_flags()
trained_run.define_trained(FLAGS)
define_format(FLAGS)
define_search(FLAGS)
define(
    FLAGS,
    max_pairs=(
        int,
        "Most test pairs of a language to translate. Default: all.",
    ),
)

_COLUMNS = columns(
    "accuracy: accuracy: .2% | word_perplexity: perplexity a word: .1f | "
    "perplexity: a token: .2f | nll: NLL: .3f"
)
SCORE_COLUMNS = columns(
    "train_pairs: training pairs: , | test_pairs: test pairs: , | "
    "bleu: BLEU: .1f | chrf: chrF: .1f"
)
GROUP_COLUMNS = [
    *columns("group: training pairs of a language | num_languages: languages"),
    *SCORE_COLUMNS,
]


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run`."""
    return command_line.run("tools.evaluate", FLAGS, __doc__, _print, argv)


def _print(values: flags.FlagValues) -> None:
    run = trained_run.load(values.train_dir, values.num_partitions)
    is_translation = isinstance(run.source, PairSource)
    if is_translation:
        scores.sacrebleu()  # before there is work to lose
    report = Report("evaluate", values.format)
    with doing("testing"):
        results = evaluated(run.model, run.experiment, run.source)
    shown = [column for column in _COLUMNS if column.key in results]
    row = {"experiment": run.experiment.name, "step": run.step, **results}
    shown = [*columns("experiment | step"), *shown]
    report.add(Table("test", f"The test of {run.path}", shown, [row]))
    if is_translation:
        _add_scores(report, run, values)
    report.print()


def _add_scores(
    report: Report, run: TrainedRun, values: flags.FlagValues
) -> None:
    """Adds what the translations of the test pairs are worth."""
    to_english = run.experiment.data.to_english
    translated = scores.translate_test(
        run.source,
        Translator(run, values.beam_size, values.length_penalty),
        to_english,
        values.max_pairs,
    )
    sizes = run.source.sizes
    report.add(
        Table(
            "groups",
            f"Translations with beam search ({values.beam_size})",
            GROUP_COLUMNS,
            scores.group_rows(translated, sizes, to_english),
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
