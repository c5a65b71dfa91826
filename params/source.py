"""What every data set offers to a training run."""

from typing import Any, Protocol

import tensorflow as tf


class Source(Protocol):
    """Mini-batches in an order that follows from the seed and the step alone.

    Attributes:
        input_spec: Nest of `keras.KerasTensor` of a model's inputs. The batch
            is `None`, and so are lengths that differ between batches.
    """

    input_spec: Any

    def largest_batch(self, batch_size: int) -> Any:
        """The inputs of the mini-batch that needs the most memory.

        Args:
            batch_size: As for `train`.
        """

    def steps_per_epoch(self, batch_size: int) -> int:
        """Mini-batches an epoch, the same number in every epoch."""

    def train(
        self, batch_size: int, *, seed: int, first_step: int, num_steps: int
    ) -> tf.data.Dataset:
        """Makes the mini-batches of the steps `first_step` to `num_steps - 1`.

        A run that begins at a later step sees what an uninterrupted one sees
        from there on.

        Args:
            batch_size: Examples in a mini-batch; or positions, where examples
                differ in length. Positive.
            seed: Determines the order, and whatever else is drawn.
            first_step: The first step, from 0.
            num_steps: Steps in the whole run.
        """

    def evaluation(self, batch_size: int) -> tf.data.Dataset:
        """Makes mini-batches of the test examples, each of them once."""


class Data(Protocol):
    """A frozen dataclass that says which examples, and how they are cut.

    Attributes:
        name: What they are called.
    """

    name: str

    def source(self) -> Source:
        """Makes the source. Files are read when it is first asked for them."""
