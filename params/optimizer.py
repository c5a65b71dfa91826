"""The optimizer of an experiment and its learning-rate schedule."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras

from params import names

_KINDS = {
    "adafactor": keras.optimizers.Adafactor,
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "rmsprop": keras.optimizers.RMSprop,
    "sgd": keras.optimizers.SGD,
}
_DECAYS = ("cosine", "inverse_sqrt")
# Keras's fields that belong to some kinds only.
_OPTIONS = {
    "momentum": ("rmsprop", "sgd"),
    "rho": ("rmsprop",),
    "beta_2": ("adam", "adamw"),
    "epsilon": ("adam", "adamw", "rmsprop"),
}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer whose learning rate warms up and decays.

    The rate rises linearly from a tenth of `learning_rate` to all of it
    during the warm-up, then falls: along half a cosine to `final_share` of it,
    or as 1 / sqrt(step).

    Attributes:
        kind: "adafactor", "adam", "adamw", "rmsprop" or "sgd" (with Nesterov
            momentum).
        learning_rate: The highest learning rate. Positive. For "adafactor" it
            is relative to the size of a weight, and never above 1 / sqrt(step).
        warmup_share: Share of all steps that the warm-up takes, from 0 to
            below 1.
        final_share: Learning rate after the last step, as a share of
            `learning_rate`, from 0 to 1. For "cosine" alone.
        momentum: Momentum of "rmsprop" and "sgd"; the others have none.
        weight_decay: Decoupled weight decay, 0 for none.
        decay: "cosine" or "inverse_sqrt".
        clip_norm: Longest gradient of all weights together, 0 for any.
        rho: Share of the old mean square that "rmsprop" keeps.
        beta_2: Share of the old mean square that "adam" and "adamw" keep.
        epsilon: What "adam", "adamw" and "rmsprop" add to what they divide by.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section
    5.3, for "inverse_sqrt"
    """

    kind: str = "adam"
    learning_rate: float = 1e-3
    warmup_share: float = 0.1
    final_share: float = 0.0
    momentum: float = 0.9
    weight_decay: float = 0.0
    decay: str = "cosine"
    clip_norm: float = 0.0
    rho: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in _KINDS:
            problems.append(names.unknown("kind", self.kind, _KINDS))
        if self.decay not in _DECAYS:
            problems.append(names.unknown("decay", self.decay, _DECAYS))
        for field in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, field) < math.inf:
                problems.append(
                    f"`{field}` must be positive and finite. "
                    f"Received: {field}={getattr(self, field)}."
                )
        if not 0 <= self.warmup_share < 1:
            problems.append(
                "`warmup_share` must be from 0 to below 1. "
                f"Received: warmup_share={self.warmup_share}."
            )
        for field in ("final_share", "momentum", "rho", "beta_2"):
            if not 0 <= getattr(self, field) <= 1:
                problems.append(
                    f"`{field}` must be from 0 to 1. "
                    f"Received: {field}={getattr(self, field)}."
                )
        for field in ("weight_decay", "clip_norm"):
            if not 0 <= getattr(self, field) < math.inf:
                problems.append(
                    f"`{field}` must be finite and not negative. "
                    f"Received: {field}={getattr(self, field)}."
                )
        if problems:
            raise ValueError("\n".join(problems))

    def make(self, num_steps: int) -> keras.optimizers.Optimizer:
        """Makes the Keras optimizer of a training run.

        Args:
            num_steps: Optimizer updates in the whole run. Positive.
        """
        options: dict[str, Any] = {
            field: getattr(self, field)
            for field, kinds in _OPTIONS.items()
            if self.kind in kinds
        }
        if self.kind == "sgd":
            options["nesterov"] = True
        if self.weight_decay or self.kind == "adamw":  # which takes no None
            options["weight_decay"] = self.weight_decay
        return _KINDS[self.kind](
            self.rate(num_steps),
            global_clipnorm=self.clip_norm or None,
            **options,
        )

    def rate(
        self, num_steps: int
    ) -> keras.optimizers.schedules.LearningRateSchedule:
        """The learning rate by step, of a run of so many."""
        warmup = int(num_steps * self.warmup_share)
        if self.decay == "inverse_sqrt":
            return InverseSquareRoot(self.learning_rate, warmup)
        return keras.optimizers.schedules.CosineDecay(
            self.learning_rate / 10 if warmup else self.learning_rate,
            decay_steps=num_steps - warmup,
            alpha=self.final_share,
            warmup_target=self.learning_rate if warmup else None,
            warmup_steps=warmup,
        )

    def num_slot_values(self, shape: Sequence[int]) -> int:
        """Numbers that the optimizer keeps for a weight of this shape.

        Example:

        >>> Optimizer("adam").num_slot_values((10, 20))
        400
        """
        size = math.prod(shape)
        if self.kind == "adafactor":
            # Keras keeps the product of the two factors, too.
            factors = [*shape[:-1]], [*shape[:-2], *shape[-1:]]
            is_factored = len(shape) >= 2
            return size + is_factored * sum(map(math.prod, factors))
        if self.kind == "sgd":
            return size * (self.momentum > 0)
        if self.kind == "rmsprop":
            return size * (1 + (self.momentum > 0))
        return 2 * size


@keras.saving.register_keras_serializable("params")
class InverseSquareRoot(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly, then falls as 1 / sqrt(step).

    Args:
        learning_rate: The highest rate, at the end of the warm-up.
        warmup_steps: Steps of the warm-up, from a tenth of the rate on; 0 for
            none, and then the rate falls from the first step.
    """

    def __init__(self, learning_rate: float, warmup_steps: int) -> None:
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps

    def __call__(self, step: Any) -> Any:
        """The rate of a step, counted from 0."""
        step = keras.ops.cast(step, "float32")
        warmup = float(max(self.warmup_steps, 1))
        rising = 0.1 + 0.9 * step / warmup
        falling = keras.ops.sqrt(warmup / keras.ops.maximum(step, warmup))
        if not self.warmup_steps:
            rising = 1.0
        return self.learning_rate * keras.ops.minimum(rising, falling)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup_steps,
        }
