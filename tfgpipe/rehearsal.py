"""Training steps that change nothing, for those who look at them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.nonfinite import Guard, all_finite
from tfgpipe.steps import Stepped


class Rehearsal(NamedTuple):
    """What a step has come to.

    Attributes:
        total: The loss, a scalar.
        pairs: Gradients, or None, and their weights.
        gradient_dtype: In which gradients are summed over micro-batches; None
            for that of each weight.
    """

    total: tf.Tensor
    pairs: list[tuple[Any, keras.Variable]]
    gradient_dtype: str | None

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are."""
        return bool(all_finite(self.total, [d for d, _ in self.pairs]))


class Rehearsed(Stepped):
    """The part of `GPipe` whose steps are looked at."""

    def rehearse(
        self, data: Any, watch: Callable, keeps_all: bool = False
    ) -> Rehearsal:
        """Runs a training step eagerly, which changes nothing.

        Args:
            data: A mini-batch, as `train_step` takes it.
            watch: Runs each step of the cells: called with the cell, the
                position of the step there, its inputs and `training`,
                micro-batch after micro-batch; again where it is recomputed.
            keeps_all: Whether nothing is recomputed, whatever `remat` says.
        """
        was_eager = bool(self._is_eager)
        self.run_eagerly = True
        self._plan.keeps_all = keeps_all
        for cell in self._plan.cells:
            cell.watch = watch
        try:
            batch, _ = self._unpack(data)
            head, loss = self._loss_of(batch, training=True)
            run = self._forward(batch, head, loss, training=True)
            guard = Guard(self._kept(run), None)
            run.backward(loss.start(run))
            total, pairs = loss.total(run), self._gradients(run, loss)
            guard.put_back()
            return Rehearsal(total, pairs, self._arguments.gradient_dtype)
        finally:
            self.run_eagerly = was_eager
            self._plan.keeps_all = False
            for cell in self._plan.cells:
                cell.watch = None

    @contextlib.contextmanager
    def telling_gradients(
        self, tell: Callable[[list[tuple[Any, keras.Variable]]], None]
    ) -> Iterator[None]:
        """Inside, training steps tell the gradients that they apply.

        Args:
            tell: Called with pairs of a gradient, or None, and its weight.
        """
        self._plan.tell_gradients = tell
        try:
            yield
        finally:
            self._plan.tell_gradients = None

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[Callable[[], None]]:
        """Inside, steps may run: at the end the variables are as before.

        Those of the layers, of metrics, of the optimizer, and seeds. It yields
        what puts them back at once.
        """
        skips, optimizer = self._plan.skips, self.optimizer
        variables: list[Any] = [
            *self.variables,
            *self.metrics_variables,
            *(v for o in internals.with_inner(optimizer) for v in o.variables),
            *internals.unlisted(optimizer),
            *internals.global_seed(),
            *([] if skips is None else skips.counts),
        ]
        values = {id(v): (v, v.numpy()) for v in variables}

        def put_back() -> None:
            for variable, value in values.values():
                is_own = isinstance(variable, keras.Variable)
                storage = variable.value if is_own else variable
                with tf.device(storage.device):
                    variable.assign(value)

        try:
            yield put_back
        finally:
            put_back()
