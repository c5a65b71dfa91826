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
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import placement

TensorOrSlices: TypeAlias = "tf.Tensor | tf.IndexedSlices"

_SMALL = 2**14  # numbers of a tensor that is looked at along with others
_WINDOW = 128  # mini-batches that an outlier is compared with
_FEWEST = 32  # before none is an outlier


def all_finite(tensors: Iterable[TensorOrSlices | None]) -> tf.Tensor:
    """Returns whether all numbers of tensors or slices are finite.

    A scalar, of one from each device.
    """
    return _all_at_once([_is_finite(tensor) for tensor in _dense(tensors)])


def _dense(tensors: Iterable[TensorOrSlices | None]) -> list[tf.Tensor]:
    return [getattr(t, "values", t) for t in tensors if t is not None]


class Findings(NamedTuple):
    """Findings about a mini-batch before its update.

    Attributes:
        is_finite: Whether it may be applied, a scalar.
        size: (3,) float32: its loss, and the norms of its gradients and of
            what it changes of state. None if nobody has asked.
    """

    is_finite: tf.Tensor
    size: tf.Tensor | None


def examine(
    loss: tf.Tensor,
    gradients: Iterable[TensorOrSlices | None],
    changes: Iterable[tuple[tf.Tensor, tf.Tensor]],
    measures: bool = False,
) -> Findings:
    """Looks at a mini-batch, once on each device; the loss is a scalar.

    Nothing but scalars leaves the device of a gradient. `changes` are pairs of
    what state was, where it is, and what it becomes; `measures` is whether the
    mini-batch's size is wanted.
    """
    flags, squares, moved = [_is_finite(loss)], [], []
    # One number for each: the sum of squares is finite only if all of it is.
    for (gradient,) in _together((g,) for g in _dense(gradients)):
        with tf.device(gradient.device or None):
            gradient = _as_real(gradient)
            if gradient.dtype == tf.float16:  # optimizers keep float32
                gradient = tf.cast(gradient, tf.float32)
            square = tf.nn.l2_loss(gradient)
            flags.append(tf.math.is_finite(square))
            squares.append(square)
    # What was infinite already, as a least value at first, may stay so.
    for old, new in _together(changes):
        with tf.device(old.device or None):
            old, new = map(_as_real, (old, new))
            stays = tf.math.is_finite(new) | ~tf.math.is_finite(old)
            flags.append(tf.reduce_all(stays))
            if measures:
                by = tf.abs(new - old)
                by = tf.where(tf.math.is_finite(by), by, tf.zeros_like(by))
                moved.append(tf.nn.l2_loss(by))
    size = None
    if measures:
        value = tf.cast(tf.math.real(loss), tf.float32)
        size = tf.stack([value, _norm(squares), _norm(moved)])
    return Findings(_all_at_once(flags), size)


def _as_real(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the parts of complex numbers; real numbers as they are."""
    if not tensor.dtype.is_complex:
        return tensor
    return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)])


def _norm(squares: list[tf.Tensor]) -> tf.Tensor:
    """Returns the norm, of what `tf.nn.l2_loss` makes of parts."""
    halves = [tf.cast(square, tf.float32) for square in squares]
    return tf.sqrt(2.0 * tf.add_n(halves)) if halves else tf.constant(0.0)


def _all_at_once(flags: list[tf.Tensor]) -> tf.Tensor:
    """Returns whether all scalars are true, reduced on each device first."""
    by_device: dict[str, list[tf.Tensor]] = {}
    for flag in flags:
        by_device.setdefault(flag.device, []).append(flag)
    of_devices = []
    for device, flags_there in by_device.items():
        with tf.device(device or None):
            of_devices.append(tf.reduce_all(tf.stack(flags_there)))
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


def _is_finite(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device or None):
        return tf.reduce_all(tf.math.is_finite(_as_real(tensor)))


class Skips(keras.layers.Layer):
    """How many mini-batches were skipped; a layer, so that files have it.

    `spread` says how far an outlier is above the median, in distances of the
    90% quantile from it; None if none is.
    """

    def __init__(self, device: str, spread: float | None = None):
        super().__init__(name="skips")
        self._device = device
        self.spread = spread
        self._sizes: tf.Variable | None = None
        names = ["epoch", "in_a_row", "total"]
        with tf.init_scope(), tf.device(device):
            # Not tracked: neither weights nor metrics.
            if spread is not None:
                names += ["outliers", "seen"]
                # (mini-batches, 3): sizes. Those that are not there yet are
                # infinite, and come last.
                sizes = tf.fill([_WINDOW, 3], float("inf"))
                self._sizes = tf.Variable(sizes, trainable=False, name="sizes")
            self._counts = {
                name: tf.Variable(0, trainable=False, dtype=tf.int64)
                for name in names
            }
        self.built = True

    @property
    def in_a_row(self) -> int:
        """Of the last mini-batches, up to now."""
        return int(self._counts["in_a_row"].numpy())

    @property
    def counts(self) -> list[tf.Variable]:
        """Returns the variables that hold all that it counts."""
        return [*self._counts.values()]

    @property
    def lasting(self) -> dict[str, tf.Variable]:
        """Returns the variables that a training goes on with, by names."""
        lasting = {"total": self._counts["total"]}
        if self._sizes is not None:
            lasting |= {"seen": self._counts["seen"], "sizes": self._sizes}
        return lasting

    @property
    def total(self) -> int:
        """Of all mini-batches, those before the model was saved too."""
        return int(self._counts["total"].numpy())

    def start_epoch(self) -> None:
        """Counts from 0, as metrics do when an epoch begins."""
        for name in ("epoch", "outliers"):
            if name in self._counts:
                self._counts[name].assign(0)

    def is_outlier(self, findings: Findings) -> tf.Tensor:
        """Returns whether a mini-batch is an outlier; notes its size."""
        if self._sizes is None:
            return tf.constant(False)
        with tf.device(self._device):
            is_known = findings.is_finite
            seen = self._counts["seen"].value()
            before = self._sizes.value()
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
            row = tf.where(is_known, findings.size, before[seen % _WINDOW])
            self._sizes.scatter_nd_update([[seen % _WINDOW]], [row])
            self._counts["seen"].assign_add(tf.cast(is_known, tf.int64))
            is_large = tf.reduce_any(findings.size > limit)
            return is_known & is_large & (there >= _FEWEST)

    def add(
        self, finite: tf.Tensor, outlier: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Takes a mini-batch; returns what the epoch had, for the logs."""
        with tf.device(self._device):
            one = tf.cast(tf.logical_not(finite), tf.int64)
            in_a_row = self._counts["in_a_row"]
            in_a_row.assign(one * (in_a_row + one))  # 0 after a finite one
            for name in ("epoch", "total"):
                self._counts[name].assign_add(one)
            logs = {"skipped_steps": self._counts["epoch"].value()}
            if self.spread is not None:
                other = tf.cast(outlier, tf.int64)
                for name in ("outliers", "total"):
                    self._counts[name].assign_add(other)
                logs["outlier_steps"] = self._counts["outliers"].value()
            return logs

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras to save."""
        for name, variable in self.lasting.items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras to load; files of others have no count."""
        for name, variable in self.lasting.items():
            if name in store.keys():  # noqa: SIM118 (it is no dictionary)
                variable.assign(store[name][()])


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

    def look(
        self,
        loss: tf.Tensor,
        pairs: Iterable[tuple[TensorOrSlices | None, keras.Variable]],
        assigned: Iterable[tuple[keras.Variable, tf.Tensor]],
    ) -> None:
        """Looks at a mini-batch, which may be one of several of a step.

        The loss is not scaled, a scalar; `pairs` are gradients and weights;
        `assigned` is what becomes of state, which is looked at as well.
        """
        changes = [(self._kept[id(v)][1], new) for v, new in assigned]
        measures = self._skips.spread is not None
        given = [gradient for gradient, _ in pairs]
        findings = examine(loss, given, changes, measures)
        is_outlier = self._skips.is_outlier(findings) | self._is_outlier
        self._is_finite = findings.is_finite & self._is_finite
        self._is_outlier = is_outlier & self._is_finite
        self._applies = self._is_finite & ~is_outlier

    def update(
        self,
        optimizer: keras.optimizers.Optimizer,
        loss: tf.Tensor,
        pairs: Iterable[tuple[TensorOrSlices | None, keras.Variable]],
        update: Callable[[], None],
        assigned: Iterable[tuple[keras.Variable, tf.Tensor]],
    ) -> None:
        """Updates the weights if the mini-batch is finite, and no outlier.

        If it is not finite, a loss scale falls, or the next mini-batches would
        not be finite either; of an outlier, the scale was right. `update`
        applies the gradients; for the others see `look`.
        """
        self.look(loss, pairs, assigned)
        lower = functools.partial(internals.lower_loss_scale, optimizer)
        scaled = _no_result(
            lambda: tf.cond(self._is_finite, tf.no_op, _no_result(lower))
        )
        tf.cond(self._applies, _no_result(update), scaled)

    def end(self) -> dict[str, tf.Tensor]:
        """Puts back what was kept, unless the mini-batch was applied.

        To be called when all is assigned. Returns how many mini-batches were
        skipped, for the logs.
        """

        def put_back() -> None:
            for variable, value in self._kept.values():
                with tf.device(variable.value.device):
                    variable.assign(value)

        tf.cond(self._applies, tf.no_op, _no_result(put_back))
        return self._skips.add(self._is_finite, self._is_outlier)


def _no_result(
    function: Callable[[], object],
) -> Callable[[], tf.Operation]:
    """A branch of `tf.cond` for its effects alone."""

    def branch() -> tf.Operation:
        function()
        return tf.no_op()

    return branch
