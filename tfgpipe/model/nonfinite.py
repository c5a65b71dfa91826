"""Mini-batches that are not finite, or outliers, and change nothing.

One loss or gradient of NaN or infinity would spread to all weights. Whether all
is finite is known only after the backward pass. So the layers' state and the
metrics are saved first, which costs nothing as long as they are not overwritten
in place, and restored; and the optimizer runs in a branch.

What is looked at:

* the loss;
* the squares of gradients, which optimizers keep: a finite gradient whose
  square is not makes a slot infinite, and with it, a step later, the weights;
* state, such as a moving variance, which may not become infinite: a row can do
  that whose loss and gradients are finite. What was infinite may stay so.

An outlier is finite, and so large that the last steps make it unlikely: of the
losses, and of the norms of gradients and of changes of state, of the last 128
mini-batches, skipped ones too, the median and the 90% quantile say how much
they vary. (State, because a normalisation hides a row of 1e6 from the loss.) So
where all become larger for good, the first dozen is skipped, and then no more.
Compare [Chowdhery et al., 2022](https://arxiv.org/abs/2204.02311), section 5.1,
where data of loss spikes are skipped by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import placement

TensorOrSlices: TypeAlias = "tf.Tensor | tf.IndexedSlices"
_Pairs: TypeAlias = "Iterable[tuple[TensorOrSlices | None, keras.Variable]]"
_Assigned: TypeAlias = "Iterable[tuple[keras.Variable, tf.Tensor]]"

_SMALL = 2**14  # numbers of a tensor that is looked at along with others
_WINDOW = 128  # mini-batches that an outlier is compared with
_FEWEST = 32  # before none is an outlier


def all_finite(tensors: Iterable[TensorOrSlices | None]) -> tf.Tensor:
    """Returns whether all numbers of tensors or slices are finite.

    A scalar, of one from each device.
    """
    return _all_at_once([_is_finite(t) for t in tensors if t is not None])


def examine(
    loss: tf.Tensor,
    gradients: Iterable[TensorOrSlices | None],
    changes: Iterable[tuple[tf.Tensor, tf.Tensor]] = (),
    measures: bool = False,
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Looks at a mini-batch, once on each device; the loss is a scalar.

    Nothing but scalars leaves the device of a gradient. `changes` are pairs of
    what state was, where it is, and what it becomes.

    Returns:
        Whether it may be applied, a scalar; and, if `measures`, (3,) float32:
        its loss, and the norms of its gradients and of what it changes of
        state.
    """
    flags, squares, moved = [_is_finite(loss)], [], []
    # One number for each: the sum of squares is finite only if all of it is.
    given = [(_as_real(g),) for g in gradients if g is not None]
    for (gradient,) in _together(given):
        with tf.device(gradient.device or None):
            if gradient.dtype == tf.float16:  # optimizers keep float32
                gradient = tf.cast(gradient, tf.float32)
            squares.append(tf.nn.l2_loss(gradient))
            flags.append(tf.math.is_finite(squares[-1]))
    # What was infinite already, as a least value at first, may stay so.
    for old, new in _together([(_as_real(a), _as_real(b)) for a, b in changes]):
        with tf.device(old.device or None):
            was, becomes = tf.math.is_finite(old), tf.math.is_finite(new)
            flags.append(tf.reduce_all(becomes | ~was))
            if measures:
                zeros = tf.zeros_like(new)
                by = tf.where(becomes & was, new - old, zeros)
                moved.append(tf.nn.l2_loss(by))
    size = None
    if measures:
        value = tf.cast(tf.math.real(loss), tf.float32)
        size = tf.stack([value, _norm(squares), _norm(moved)])
    return _all_at_once(flags), size


def _as_real(tensor: TensorOrSlices) -> tf.Tensor:
    """Returns the numbers of a tensor or slices, of complex ones the parts."""
    tensor = getattr(tensor, "values", tensor)
    if not tensor.dtype.is_complex:
        return tensor
    with tf.device(tensor.device or None):
        return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)])


def _is_finite(tensor: TensorOrSlices) -> tf.Tensor:
    tensor = _as_real(tensor)
    with tf.device(tensor.device or None):
        return tf.reduce_all(tf.math.is_finite(tensor))


def _norm(squares: list[tf.Tensor]) -> tf.Tensor:
    """Returns the norm, of what `tf.nn.l2_loss` makes of parts."""
    halves = [tf.cast(square, tf.float32) for square in squares]
    return tf.sqrt(2.0 * tf.add_n(halves)) if halves else tf.constant(0.0)


def _all_at_once(flags: list[tf.Tensor]) -> tf.Tensor:
    """Returns whether all scalars are true, reduced on each device first."""
    of_devices = []
    for device in dict.fromkeys(flag.device for flag in flags):
        with tf.device(device or None):
            there = [flag for flag in flags if flag.device == device]
            of_devices.append(tf.reduce_all(tf.stack(there)))
    return tf.reduce_all(tf.stack(of_devices))


def _together(
    rows: Iterable[tuple[tf.Tensor, ...]],
) -> Iterator[tuple[tf.Tensor, ...]]:
    """Joins small tensors of a device and a dtype, of each column.

    An operation takes longer to start than to look at some hundred numbers. The
    tensors of a row are of equal shapes; the first says where they are.
    """
    small: dict[tuple[str, tf.DType], list[tuple[tf.Tensor, ...]]] = {}
    for row in rows:
        size = row[0].shape.num_elements()
        if size is None or size > _SMALL:
            yield row
        else:
            key = row[0].device, row[0].dtype
            small.setdefault(key, []).append(row)
    for (device, _), small_rows in small.items():
        with tf.device(device or None):
            yield tuple(
                tf.concat([tf.reshape(t, [-1]) for t in column], 0)
                for column in zip(*small_rows)
            )


class Skips(keras.layers.Layer):
    """How many mini-batches were skipped; a layer, so that files have it.

    `spread` says how far an outlier is above the median, in distances of the
    90% quantile from it; None if none is.

    Attributes:
        counts: All that it counts, by names.
        lasting: What a training goes on with, by names.
    """

    def __init__(self, device: str, spread: float | None = None):
        super().__init__(name="skips")
        self._device = device
        self.spread = spread
        names = ["epoch", "in_a_row", "total"]
        if spread is not None:
            names += ["outliers", "seen"]
        with tf.init_scope(), tf.device(device):
            # Not tracked: neither weights nor metrics.
            self.counts = {
                name: tf.Variable(0, trainable=False, dtype=tf.int64)
                for name in names
            }
            self.lasting = {"total": self.counts["total"]}
            if spread is not None:
                # (mini-batches, 3): sizes. Those that are not there yet are
                # infinite, and come last.
                sizes = tf.fill([_WINDOW, 3], float("inf"))
                self.lasting["seen"] = self.counts["seen"]
                self.lasting["sizes"] = tf.Variable(sizes, trainable=False)
        self.built = True

    def start_epoch(self) -> None:
        """Counts from 0, as metrics do when an epoch begins."""
        for name in self.counts.keys() & {"epoch", "outliers"}:
            self.counts[name].assign(0)

    def is_outlier(
        self, is_finite: tf.Tensor, size: tf.Tensor | None
    ) -> tf.Tensor:
        """Returns whether a mini-batch is an outlier; notes its size."""
        if self.spread is None:
            return tf.constant(False)
        with tf.device(self._device):
            sizes = self.lasting["sizes"]
            seen, before = self.counts["seen"].value(), sizes.value()
            there = tf.minimum(seen, _WINDOW)
            # (mini-batches, 3), the least first; infinite where there is none.
            ordered = tf.sort(before, axis=0)
            last = tf.maximum(there - 1, 0)
            median = tf.gather(ordered, last // 2)
            most = tf.gather(ordered, last * 9 // 10)
            # Of equal numbers, rounding makes none an outlier.
            varies = tf.maximum(most - median, 0.01 * tf.abs(median))
            limit = median + self.spread * varies
            # A ring; what is not finite does not move on in it.
            row = tf.where(is_finite, size, before[seen % _WINDOW])
            sizes.scatter_nd_update([[seen % _WINDOW]], [row])
            self.counts["seen"].assign_add(tf.cast(is_finite, tf.int64))
            is_large = tf.reduce_any(size > limit)
            return is_finite & is_large & (there >= _FEWEST)

    def add(
        self, is_finite: tf.Tensor, is_outlier: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Takes a mini-batch; returns what the epoch had, for the logs."""
        counts = self.counts
        with tf.device(self._device):
            one = tf.cast(~is_finite, tf.int64)
            counts["in_a_row"].assign(one * (counts["in_a_row"] + one))
            counts["epoch"].assign_add(one)
            counts["total"].assign_add(one)
            logs = {"skipped_steps": counts["epoch"].value()}
            if self.spread is not None:
                other = tf.cast(is_outlier, tf.int64)
                counts["outliers"].assign_add(other)
                counts["total"].assign_add(other)
                logs["outlier_steps"] = counts["outliers"].value()
            return logs

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras to save."""
        for name, variable in self.lasting.items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras to load; files of others have no count."""
        for name in self.lasting.keys() & {*store.keys()}:
            self.lasting[name].assign(store[name][()])


class Guard:
    """Undoes a mini-batch that is not finite.

    Made when nothing was assigned yet, of all variables that the mini-batch may
    assign but by the optimizer.
    """

    def __init__(self, variables: Iterable[keras.Variable], skips: Skips):
        self._skips = skips
        self._kept: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self.keep(variables)
        self._is_finite: Any = True
        self._is_outlier: Any = False
        self._applies: Any = None

    def keep(self, variables: Iterable[keras.Variable]) -> None:
        """Keeps the values of variables that are not kept yet."""
        for variable in variables:
            if id(variable) not in self._kept:
                with tf.device(variable.value.device):
                    value = placement.read_variable(variable)
                self._kept[id(variable)] = variable, value

    def look(self, loss: tf.Tensor, pairs: _Pairs, assigned: _Assigned) -> None:
        """Looks at a mini-batch, which may be one of several of a step.

        The loss is not scaled, a scalar; `pairs` are gradients and weights;
        `assigned` is what becomes of state, which is looked at as well.
        """
        changes = [(self._kept[id(v)][1], new) for v, new in assigned]
        gradients = [gradient for gradient, _ in pairs]
        measures = self._skips.spread is not None
        is_finite, size = examine(loss, gradients, changes, measures)
        is_outlier = self._skips.is_outlier(is_finite, size) | self._is_outlier
        self._is_finite &= is_finite
        self._is_outlier = is_outlier & self._is_finite
        self._applies = self._is_finite & ~is_outlier

    def update(
        self,
        optimizer: keras.optimizers.Optimizer,
        loss: tf.Tensor,
        pairs: _Pairs,
        update: Callable[[], None],
        assigned: _Assigned,
    ) -> None:
        """Updates the weights if the mini-batch is finite, and no outlier.

        If it is not finite, a loss scale falls, or the next mini-batches would
        not be finite either; of an outlier, the scale was right. `update`
        applies the gradients; for the others see `look`.
        """
        self.look(loss, pairs, assigned)
        lower = functools.partial(internals.lower_loss_scale, optimizer)
        tf.cond(
            self._applies,
            update,
            lambda: tf.cond(self._is_finite, lambda: None, lower),
        )

    def end(self) -> dict[str, tf.Tensor]:
        """Puts back what was kept, unless the mini-batch was applied.

        To be called when all is assigned. Returns how many mini-batches were
        skipped, for the logs.
        """

        def put_back() -> None:
            for variable, value in self._kept.values():
                with tf.device(variable.value.device):
                    variable.assign(value)

        tf.cond(self._applies, lambda: None, put_back)
        return self._skips.add(self._is_finite, self._is_outlier)
