"""Beam search with a trained model, and its flags."""

from collections.abc import Sequence

import numpy as np
from absl import flags

from models.beam_search import BeamSearch
from tools.flags import define
from tools.train.trained_run import TrainedRun


def define_search(values: flags.FlagValues) -> None:
    """Defines the flags of a beam search."""
    define(
        values,
        beam_size=(
            4,
            "Beginnings of translations to keep; 1 takes the most likely token "
            "each time.",
        ),
        length_penalty=(
            0.6,
            "Exponent of the length penalty; larger ones favour longer "
            "translations.",
        ),
    )


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
        """What the model reads, without columns of padding alone."""
        ids = self._source.encode(texts, language)
        width = np.flatnonzero(ids.any(axis=0))[-1] + 1
        return ids[:, :width]

    def is_cut(self, ids: np.ndarray) -> np.ndarray:
        """Which rows of `encode` are too long, and have lost their end."""
        return ~(ids == self._source.eos_id).any(axis=1)

    def translate(self, ids: np.ndarray) -> list[str]:
        """Translations of what `encode` returned."""
        return self._source.decode(self._search(ids).ids)
