r"""Translates with a model that `tools.train` has trained.

    python -m tools.train --params=mt.multilingual_shallow --train_dir=runs/mt
    python -m tools.translate --train_dir=runs/mt --language=de --text='Heute'
    python -m tools.translate --train_dir=runs/mt --language=de < GERMAN

Without --text it translates the lines of the standard input, each on its own.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tqdm
from absl import flags

from models.beam_search import BeamSearch
from params.pairs import PairSource
from tools import command_line
from tools.train import trained_run
from tools.train.trained_run import TrainedRun

FLAGS = command_line.new_flags()
command_line.define_train_dir(FLAGS)
flags.DEFINE_string(
    "language",
    None,
    "Code of the language besides English, such as de. Not needed if the "
    "model knows only one.",
    flag_values=FLAGS,
)
flags.DEFINE_multi_string(
    "text",
    [],
    "What to translate, instead of the standard input. Repeatable.",
    flag_values=FLAGS,
)
flags.DEFINE_integer(
    "batch_size",
    32,
    "Lines to translate at the same time, unless they are typed.",
    1,
    flag_values=FLAGS,
)


def define_search(values: flags.FlagValues) -> None:
    """Defines the flags of a beam search."""
    flags.DEFINE_integer(
        "beam_size",
        4,
        "Beginnings of translations to keep; 1 takes the most likely token "
        "each time.",
        1,
        flag_values=values,
    )
    flags.DEFINE_float(
        "length_penalty",
        0.6,
        "Exponent of the length penalty; larger ones favour longer "
        "translations.",
        0.0,
        flag_values=values,
    )


define_search(FLAGS)


class Translator:
    """Translates texts with a trained model.

    Args:
        run: A run on pairs of sentences.
        beam_size: As in `models.beam_search.BeamSearch`.
        length_penalty: As in `models.beam_search.BeamSearch`.
    """

    def __init__(
        self, run: TrainedRun, beam_size: int = 4, length_penalty: float = 0.6
    ) -> None:
        self._source = run.source
        self._search = BeamSearch(
            run.model.layers,
            bos_id=run.source.bos_id,
            eos_id=run.source.eos_id,
            max_length=run.source.max_length,
            beam_size=beam_size,
            length_penalty=length_penalty,
        )

    def encode(self, texts: Sequence[str], language: str) -> np.ndarray:
        """What the model reads, without columns of padding alone.

        Args:
            texts: What to translate, at least one.
            language: The language besides English.

        Returns:
            Token ids (texts, length), int32.
        """
        ids = self._source.encode(texts, language)
        width = np.flatnonzero(ids.any(axis=0))[-1] + 1
        return ids[:, :width]

    def is_cut(self, ids: np.ndarray) -> np.ndarray:
        """Which rows of `encode` are too long, and have lost their end."""
        return ~(ids == self._source.eos_id).any(axis=1)

    def translate(self, ids: np.ndarray) -> list[str]:
        """Translations of what `encode` returned."""
        return self._source.decode(self._search(ids).ids)


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run`."""
    return command_line.run("tools.translate", FLAGS, __doc__, _print, argv)


def _print(values: flags.FlagValues) -> None:
    run = trained_run.load(values.train_dir, PairSource, "a translation model")
    language = _language(values.language, run.source.languages)
    translator = Translator(run, values.beam_size, values.length_penalty)
    is_typed = not values.text and sys.stdin.isatty()
    lines = values.text or (line.rstrip("\n") for line in sys.stdin)
    # A bar would stand among the translations on a terminal.
    hidden = True if is_typed or sys.stdout.isatty() else None
    bar = tqdm.tqdm(
        desc="translating", unit=" lines", disable=hidden, file=sys.stderr
    )
    number = 0
    for batch in _batches(lines, 1 if is_typed else values.batch_size):
        for text in _translated(translator, batch, language, number):
            print(text, flush=is_typed)
        number += len(batch)
        bar.update(len(batch))
    bar.close()


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
    """Translations of lines, of which those without text stay empty.

    Args:
        translator: What translates.
        lines: The lines.
        language: The language besides English.
        first: How many lines came before, for warnings.
    """
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
