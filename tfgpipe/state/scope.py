"""The variables of layers while they run: values in, new values out.

Layers read and assign Keras variables. In a model's graph, they read
placeholders, and values that they assign are results; nothing is captured, and
nothing is changed on the way. Values that cannot leave the graph are refused.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs import Piece, is_continuous
from tfgpipe.state.batch_normalization import MovingStatistics, factors
from tfgpipe.state.flow import advance_seed


class Use(NamedTuple):
    """A weight, as one section of a model's graph reads it.

    Each use has a gradient, wherever cells end. A frozen weight has uses if it
    is sent.

    Attributes:
        variable: The variable, trained or sent.
        section: The number of the section.
        tensor: A placeholder.
        piece: The columns that are read; None for all.
        is_trained: Whether it may have a gradient.
    """

    variable: keras.Variable
    section: int
    tensor: tf.Tensor
    piece: Piece | None = None
    is_trained: bool = True

    def columns_of(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the columns of a value of the variable that are read."""
        return value if self.piece is None else self.piece.columns_of(value)


class ModelScope(keras.StatelessScope):
    """Runs a model on placeholders of its variables, and notes new values.

    A variable gets a placeholder when it is read first; a trained or sent one
    gets another in each section.

    Args:
        section: Returns the number of the section of the next operation.
        trained: The ids of the variables that may be trained; None for all.
        seeds: Random seeds.
        moving: Statistics that move at the end of the mini-batch.
        training: Whether there is a backward pass.
        tape: Watches trained weights; None without training.
        sent: The ids of weights that have uses if they are frozen, too.

    Attributes:
        uses: Uses of trained or sent weights, in order.
        given: By the id of another variable, it and its placeholder.
        values: All assigned values, also those that were assigned over.
        draws: By the id of a seed, the number of its draws.
        overwritten: ids and paths of seeds that got another value than the next
            one.
    """

    def __init__(
        self,
        section: Callable[[], int],
        trained: Collection[int] | None,
        seeds: Sequence[keras.Variable],
        moving: MovingStatistics,
        training: bool,
        tape: tf.GradientTape | None,
        sent: Collection[int] = (),
    ):
        self._sent = sent
        self._graph = internals.current_graph()
        self._section = section
        self._trained = trained
        self._moving = moving
        self._training = training
        self._tape = tape
        placeholders = [(v, self._placeholder(v)) for v in seeds]
        super().__init__(placeholders, collect_losses=True)
        self.given = {id(v): (v, t) for v, t in placeholders}
        self.uses: list[Use] = []
        self.values: list[tf.Tensor] = []
        self.draws: collections.Counter[int] = collections.Counter()
        self.overwritten: dict[int, str] = {}
        self._seeds = {id(v): self.state_mapping[id(v)] for v in seeds}
        self._use_of: dict[int, Use] = {}  # by the id, in the last section
        self._assigned: dict[int, keras.Variable] = {}
        self._new_weights: dict[int, tf.Tensor] = {}
        self._pieces: Mapping[int, Piece] = {}

    def _placeholder(self, variable: keras.Variable) -> tf.Tensor:
        with self._graph.as_default(), tf.control_dependencies(None):
            dtype = internals.stored_dtype(variable)
            return tf.compat.v1.placeholder(dtype, variable.shape)

    @contextlib.contextmanager
    def reading(
        self, pieces: Sequence[tuple[keras.Variable, Piece]]
    ) -> Iterator[None]:
        """Inside, pieces of variables are read instead of the variables.

        To be entered when a section has begun, and left before the next one.
        """
        by_id = {id(variable): piece for variable, piece in pieces}
        before = {key: self.state_mapping.get(key) for key in by_id}
        with contextlib.ExitStack() as stack:
            stack.enter_context(internals.replaced(self, "_pieces", by_id))
            for variable, piece in pieces:
                shape = piece.shape(variable.shape)
                stack.enter_context(internals.of_shape(variable, shape))
            yield
        for key, value in before.items():
            self._use_of.pop(key, None)
            self.state_mapping.pop(key, None)
            if value is not None:
                self.state_mapping[key] = value

    def _know(self, variable: keras.Variable) -> None:
        """Gives a variable a placeholder, if it has none here."""
        key, section = id(variable), self._section()
        piece = self._pieces.get(key)
        may_train = self._trained is None or key in self._trained
        is_trained = may_train and internals.is_trained(variable)
        if not is_trained and piece is None and key not in self._sent:
            if key not in self.given:
                tensor = self._placeholder(variable)
                self.given[key] = variable, tensor
                self.state_mapping[key] = tensor
            return
        known = self._use_of.get(key)
        if known is not None and known.section == section:
            return
        tensor = self._placeholder(variable)
        use = Use(variable, section, tensor, piece, is_trained)
        if self._tape is not None and is_trained:
            self._tape.watch(use.tensor)
        self.uses.append(use)
        self._use_of[key] = use
        new = self._new_weights.get(key)
        self.state_mapping[key] = (
            use.tensor
            if new is None
            else _with_value(use.tensor, use.columns_of(new))
        )

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor:
        """Returns the value of a variable; Keras calls it."""
        self._know(variable)
        key = id(variable)
        if self._training:
            self._check_read(variable)
        value = super().get_current_value(variable)
        is_new = key in self._assigned and key not in self._use_of
        if is_new and is_continuous(value):
            value = tf.stop_gradient(value)  # as in Keras, at the variable
        return value

    def _check_read(self, variable: keras.Variable) -> None:
        """Refuses reads whose gradient would be lost; notes late ones."""
        use = self._use_of.get(id(variable))
        is_trained = use is not None and use.is_trained
        is_refused = is_trained or id(variable) in self._seeds
        if is_refused and internals.in_custom_gradient(variable):
            raise ValueError(
                "A layer must not read its variables in a function with a "
                "gradient of its own, as `keras.remat(f)`. Received: "
                f"'{variable.path}'. Choose `remat` of `GPipe`; pass what a "
                "`tf.custom_gradient` needs as arguments."
            )
        self._moving.read(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Has later layers read a new value; `Variable.assign` calls it."""
        variable, value = update
        self._know(variable)
        key = id(variable)
        if self._moving.has(variable):
            if internals.current_graph() is not self._graph:
                self._refuse_graph(f"an assignment of '{variable.path}'")
            self._moving.assign(variable, self.state_mapping[key], value)
            return
        if self._is_foreign_seed(variable):
            self._seeds[key] = self.given[key][1]
        if key in self._seeds:
            self.draws[key] += 1
            if not _is_next(value, self.state_mapping[key]):
                self.overwritten[key] = variable.path
        value = self._value_outside(variable, value)
        use = self._use_of.get(key)
        if use is not None:
            # As in Keras the gradient is the new value's.
            self._new_weights[key] = value
            value = _with_value(use.tensor, value)
        self._assigned[key] = variable
        super().add_update((variable, value))
        self.values.append(self._new_value(key))

    def _is_foreign_seed(self, variable: keras.Variable) -> bool:
        """Returns whether no layer lists its generator, as the global one."""
        return (
            id(variable) in self.given
            and variable.name == "seed_generator_state"
            and variable.shape == (2,)
        )

    def _new_value(self, key: int) -> tf.Tensor:
        value = self._new_weights.get(key, self.state_mapping[key])
        return tf.convert_to_tensor(value)

    def new_state(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns assigned variables and their new values."""
        return [(v, self._new_value(key)) for key, v in self._assigned.items()]

    def _value_outside(
        self, variable: keras.Variable, value: tf.Tensor
    ) -> tf.Tensor:
        """Returns a value of a function inside a layer in the model's graph."""
        current = internals.current_graph()
        if current is self._graph:
            return value
        seed = self._seeds.get(id(variable))
        is_outside = internals.graph_of(value) in (self._graph, None)
        is_drawn = seed is not None and id(variable) not in self.overwritten
        if internals.in_control_flow(current, self._graph) or (
            not is_drawn and not is_outside
        ):
            self._refuse_graph(f"an assignment of '{variable.path}'")
        if is_outside:
            return value
        with self._graph.as_default():
            return advance_seed(seed, 0, 0, self.draws[id(variable)])

    def _refuse_graph(self, action: str) -> None:
        """Refuses an action whose value cannot leave a loop or a function."""
        raise ValueError(
            "Variables must be assigned, random numbers drawn and batches "
            f"normalised by a layer directly. Received: {action} in a loop, a "
            "branch or a `tf.function`. Do it before, or by `keras.ops.where`."
        )

    def record(
        self, layer: keras.layers.BatchNormalization, *data: tf.Tensor | None
    ) -> None:
        """Notes inputs, mask, mean and variance, see `MovingStatistics`."""
        if internals.current_graph() is not self._graph:
            self._refuse_graph(f"a call of '{layer.name}'")
        self._moving.record(layer, *data)


class InnerScope(keras.StatelessScope):
    """Holds assignments back; reads as the scope around it does."""

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns the value of a variable; Keras calls it."""
        value = super().get_current_value(variable)
        if value is None and self.original_scope is not None:
            return self.original_scope.get_current_value(variable)
        return value


def _with_value(weight: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Returns the exact value, with the gradient and dtype of the weight."""
    value = tf.cast(value, weight.dtype)
    return tf.stop_gradient(value) + (weight - tf.stop_gradient(weight))


def _is_next(value: tf.Tensor, seed: tf.Tensor) -> bool:
    """Returns whether `SeedGenerator.next()` made it: the seed plus (0, 1)."""
    numbers = factors(value, [seed])
    if numbers is None:
        return False
    scale, offset = numbers
    if internals.is_eager(seed):  # a graph may have copied it
        seed = seed.numpy()
        return np.array_equal(scale * seed + offset, seed + [0, 1])
    return bool(np.all(scale == 1)) and np.array_equal(offset, [0, 1])
