"""The optimizer of an experiment and its learning-rate schedule."""

import dataclasses

import keras

from params import names

_KINDS = {
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "rmsprop": keras.optimizers.RMSprop,
    "sgd": keras.optimizers.SGD,
}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer whose learning rate warms up and decays.

    The rate rises linearly from a tenth of `learning_rate` to all of it
    during the warm-up, then falls along half a cosine to `final_share` of it.

    Attributes:
        kind: "adam", "adamw", "rmsprop" or "sgd" (with Nesterov momentum).
        learning_rate: The highest learning rate. Positive.
        warmup_share: Share of all steps that the warm-up takes, from 0 to
            below 1.
        final_share: Learning rate after the last step, as a share of
            `learning_rate`, from 0 to 1.
        momentum: Momentum of "rmsprop" and "sgd"; the others have none.
        weight_decay: Decoupled weight decay, 0 for none.
    """

    kind: str = "adam"
    learning_rate: float = 1e-3
    warmup_share: float = 0.1
    final_share: float = 0.0
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in _KINDS:
            problems.append(names.unknown("kind", self.kind, _KINDS))
        if not self.learning_rate > 0:
            problems.append(
                "`learning_rate` must be positive. "
                f"Received: learning_rate={self.learning_rate}."
            )
        if not 0 <= self.warmup_share < 1:
            problems.append(
                "`warmup_share` must be from 0 to below 1. "
                f"Received: warmup_share={self.warmup_share}."
            )
        for field in ("final_share", "momentum"):
            if not 0 <= getattr(self, field) <= 1:
                problems.append(
                    f"`{field}` must be from 0 to 1. "
                    f"Received: {field}={getattr(self, field)}."
                )
        if not self.weight_decay >= 0:
            problems.append(
                "`weight_decay` must not be negative. "
                f"Received: weight_decay={self.weight_decay}."
            )
        if problems:
            raise ValueError("\n".join(problems))

    def make(self, num_steps: int) -> keras.optimizers.Optimizer:
        """Makes the Keras optimizer of a training run.

        Args:
            num_steps: Optimizer updates in the whole run. Positive.

        Returns:
            A new optimizer.
        """
        warmup = int(num_steps * self.warmup_share)
        rate = keras.optimizers.schedules.CosineDecay(
            self.learning_rate / 10 if warmup else self.learning_rate,
            decay_steps=num_steps - warmup,
            alpha=self.final_share,
            warmup_target=self.learning_rate if warmup else None,
            warmup_steps=warmup,
        )
        options = {}
        if self.kind in ("rmsprop", "sgd"):
            options["momentum"] = self.momentum
        if self.kind == "sgd":
            options["nesterov"] = True
        return _KINDS[self.kind](
            rate, weight_decay=self.weight_decay or None, **options
        )
