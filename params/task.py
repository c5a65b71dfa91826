"""What is learnt: the loss, the metrics, and how a result is told."""

import dataclasses
import math
from typing import Any, Protocol

import keras

from models import losses
from params.source import Source


class Task(Protocol):
    """A frozen dataclass with the settings of a loss."""

    def compile_arguments(self) -> dict[str, Any]:
        """Loss and metrics, as `keras.Model.compile` takes them."""

    def results(
        self, logs: dict[str, float], source: Source
    ) -> dict[str, float]:
        """What the test examples gave.

        Args:
            logs: What `keras.Model.evaluate` returned.
            source: The data that it was given.
        """

    def summary(self, results: dict[str, float]) -> str:
        """One line about `results`."""


@dataclasses.dataclass(frozen=True)
class Classification:
    """Integer classes of examples, for a model that ends with a softmax."""

    def compile_arguments(self) -> dict[str, Any]:
        """Cross-entropy and accuracy."""
        return {
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
        }

    def results(
        self, logs: dict[str, float], source: Source
    ) -> dict[str, float]:
        """Accuracy, the share of examples that are classified correctly."""
        return {"accuracy": logs["accuracy"]}

    def summary(self, results: dict[str, float]) -> str:
        """The accuracy in percent."""
        return f"Test accuracy: {results['accuracy']:.2%}"


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """The next token at every position, for a model that ends with logits.

    Attributes:
        label_smoothing: Share of the probability that the loss spreads over
            the whole vocabulary, from 0 to below 1. The results are without.
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check_smoothing(self.label_smoothing)

    def compile_arguments(self) -> dict[str, Any]:
        """Cross-entropy of tokens, weighted; without smoothing as `nll`."""
        return _token_arguments(self.label_smoothing)

    def results(self, logs: dict[str, float], source: Any) -> dict[str, float]:
        """Perplexity a word and a token, and `nll`.

        `nll` is the negative log-likelihood of a token in nats. A source that
        knows `num_test_words` and `num_test_tokens` has a perplexity a word,
        which does not depend on how words are cut into tokens:
        exp(nll * tokens / words).
        """
        results = _token_results(logs)
        words = getattr(source, "num_test_words", None)
        if words is None:
            return results
        per_word = logs["nll"] * source.num_test_tokens / words
        return {"word_perplexity": _exp(per_word), **results}

    def summary(self, results: dict[str, float]) -> str:
        """The perplexities."""
        tokens = f"{results['perplexity']:.2f} a token"
        if "word_perplexity" not in results:
            return f"Test perplexity: {tokens}"
        words = f"{results['word_perplexity']:.1f} a word"
        return f"Test perplexity: {words} ({tokens})"


@dataclasses.dataclass(frozen=True)
class Translation:
    """The next target token, for a model that ends with logits.

    Attributes:
        label_smoothing: As in `LanguageModel`.
    """

    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        _check_smoothing(self.label_smoothing)

    def compile_arguments(self) -> dict[str, Any]:
        """Cross-entropy of tokens, weighted; without smoothing as `nll`."""
        return _token_arguments(self.label_smoothing)

    def results(
        self, logs: dict[str, float], source: Source
    ) -> dict[str, float]:
        """`nll`, of a target token in nats, and the perplexity a token."""
        return _token_results(logs)

    def summary(self, results: dict[str, float]) -> str:
        """The negative log-likelihood and the perplexity."""
        return (
            f"Test NLL: {results['nll']:.3f} a token "
            f"(perplexity {results['perplexity']:.2f})"
        )


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            "`label_smoothing` must be from 0 to below 1. "
            f"Received: label_smoothing={label_smoothing}."
        )


def _token_arguments(label_smoothing: float) -> dict[str, Any]:
    nll = keras.metrics.SparseCategoricalCrossentropy(
        from_logits=True, name="nll"
    )
    if label_smoothing:
        loss = losses.SmoothedCrossentropy(label_smoothing)
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
    return {"loss": loss, "weighted_metrics": [nll]}


def _token_results(logs: dict[str, float]) -> dict[str, float]:
    return {"perplexity": _exp(logs["nll"]), "nll": logs["nll"]}


def _exp(nats: float) -> float:
    """The exponential; infinite where a model is hopeless."""
    return math.exp(nats) if nats < 700 else math.inf
