"""What a model has been trained on, how fast, and with which loss.

All of it is read from the sums in the model's own metrics: the loss tracker
counts examples, and adds up their losses.
"""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

_LOSS = "loss"  # what Keras calls its loss tracker
# Where rows differ in length, this metric's weights count their tokens; see
# params.pairs.
_TOKENS = "nll"


class Reading(NamedTuple):
    """What happened between two readings.

    Attributes:
        means: Of each metric, over the examples in between.
        rates: "examples_per_second", and "tokens_per_second" of models of
            text; empty if no time was taken.
    """

    means: dict[str, float]
    rates: dict[str, float]


class Meter:
    """Reads the metrics of a model now and then while it is trained.

    Args:
        model: A compiled model.
        length: Tokens of an example: 0 for none, `None` where it differs.
    """

    def __init__(self, model: keras.Model, length: int | None) -> None:
        self._model = model
        self._length = length
        self._seen: dict[str, tuple[float, float]] = {}
        self._sums: dict[str, list[float]] = {}
        self._timed: dict[str, float] = {}
        self._clock: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether time is taken."""
        return self._clock is not None

    def metrics_were_reset(self) -> None:
        """Says that the metrics begin again at zero."""
        self._seen = {}

    def restart(self) -> None:
        """Takes the time from now on; what passed since `update` is lost."""
        self._clock = time.monotonic()

    def update(self) -> None:
        """Adds what happened since the last update, or restart."""
        now = time.monotonic()
        new = {m.name: (float(m.total), float(m.count)) for m in self._means()}
        for name, (total, count) in new.items():
            before = self._seen.get(name, (0.0, 0.0))
            sums = self._sums.setdefault(name, [0.0, 0.0])
            sums[0] += total - before[0]
            sums[1] += count - before[1]
            if self._clock is not None:
                key = f"{name} count"
                self._timed[key] = self._timed.get(key, 0) + count - before[1]
        if self._clock is not None:
            seconds = self._timed.get("seconds", 0.0)
            self._timed["seconds"] = seconds + now - self._clock
        self._seen = new
        self._clock = now

    def read(self) -> Reading:
        """What was added since the last reading; begins anew."""
        means = {
            name: total / count
            for name, (total, count) in self._sums.items()
            if count
        }
        rates = self._rates()
        self._sums, self._timed = {}, {}
        return Reading(means, rates)

    def _rates(self) -> dict[str, float]:
        seconds = self._timed.get("seconds", 0.0)
        examples = self._timed.get(f"{_LOSS} count", 0.0)
        if not seconds or not examples:
            return {}
        rates = {"examples_per_second": examples / seconds}
        if self._length is None:
            tokens = self._timed.get(f"{_TOKENS} count", 0.0)
        else:
            tokens = examples * self._length
        if tokens:
            rates["tokens_per_second"] = tokens / seconds
        return rates

    def _means(self) -> Iterator[Any]:
        """The metrics that are means, one by one."""
        for metric in self._model.metrics:
            for part in getattr(metric, "metrics", [metric]):
                if isinstance(part, keras.metrics.Mean):
                    yield part
