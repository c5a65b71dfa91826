"""`generate` of a task of KerasHub, whose layers are on several devices.

Prompts go through the devices in groups. Each group has its own loop over
tokens, and loops do not wait for each other: while one group is in the second
cell, another is in the first.

    device 0    group 0   group 1   group 0   group 1   ...
    device 1              group 0   group 1   group 0   ...

What is computed is the task's own `generate_step`, group by group, with caches
that stay on their devices (`caches.py`). With more groups than devices, weights
would be read more often for nothing: a device reads all of its weights for each
token of each group.

A sampler of KerasHub draws for all rows in each turn of its loop, and moves its
seed on. A group does as well, and keeps its own rows of it:

    seed of turn s = seed at the start + s
    drawn for all rows, of which group m takes its own

so that tokens do not depend on groups. A seed that each loop moves on would
also make TensorFlow run the loops one after the other: here it is moved on
once, at the end, by the turns of the longest loop.

Known of a task: `generate_step(inputs, stop_token_ids)`, which calls
`self.sampler(next, prompt, cache, index, ...)`; and `make_generate_function`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.generation.caches import CacheGroups, HeldCache, zeros_apart

# Samplers of KerasHub that leave rows where they are.
_IN_PLACE = {"GreedySampler", "RandomSampler", "TopKSampler", "TopPSampler"}
_REORDERING = {"BeamSampler", "ContrastiveSampler"}


def install(task: Any, num_groups: int) -> GroupedGeneration | None:
    """Has a task generate in at most `num_groups` groups from now on.

    Returns what it generates by; None for a model that does not generate, to
    which it does nothing.
    """
    if not can_generate(task):
        return None
    found = GroupedGeneration(task, num_groups)
    object.__setattr__(task, "make_generate_function", found.function)
    return found


def can_generate(model: Any) -> bool:
    """Whether a model generates as tasks of KerasHub do."""
    names = ("generate", "generate_step", "make_generate_function")
    return isinstance(model, keras.Model) and all(
        callable(getattr(model, name, None)) for name in names
    )


class GroupedGeneration:
    """Generates by a task, in groups of prompts.

    Attributes:
        num_groups: How many groups, at most.
    """

    def __init__(self, task: Any, num_groups: int):
        self._task = task
        self.num_groups = num_groups
        self._make = type(task).make_generate_function
        self._groups = CacheGroups()

    def function(self) -> Callable:
        """What the task calls with inputs and the tokens at which it stops."""
        task = self._task
        if task.run_eagerly:
            return self._make(task)
        if task.generate_function is None:
            run = tf.function(self._run, autograph=False)

            @functools.wraps(task.generate_step)
            def generate(inputs: Any, stop_token_ids: Any = None) -> Any:
                inputs = tree.map_structure(_as_tensor, inputs)
                if stop_token_ids is not None:
                    stop_token_ids = tuple(stop_token_ids)
                with self._groups.lock:  # one set of caches
                    groups = self._groups_of(inputs)
                    return run(inputs, stop_token_ids, groups)

            task.generate_function = generate
        return task.generate_function

    def in_groups(
        self, num_groups: int | None
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, there are as many groups, if it is not None."""
        count = self.num_groups if num_groups is None else num_groups
        return internals.replaced(self, "num_groups", count)

    def _groups_of(self, inputs: Any) -> int:
        """How many groups there are: each has a prompt, or more."""
        if _kind(self._task.sampler) is None:
            return 1  # it may draw in other ways
        if _start(inputs) is None:
            return 1
        counts = {t.shape[0] if t.shape.rank else None for t in _flat(inputs)}
        (rows,) = counts if len(counts) == 1 else (None,)
        return min(self.num_groups, rows or 1)

    def _run(self, inputs: Any, stop_token_ids: Any, groups: int) -> Any:
        """All groups, in one graph."""
        task, sampler = self._task, self._task.sampler
        rows = _flat(inputs)[0].shape[0]
        draws = None
        if groups > 1:
            draws = Draws(sampler, rows, _start(inputs))

        def generate(m: int, first: int, last: int) -> Any:
            own = inputs
            if groups > 1:
                own = tree.map_structure(
                    lambda t: None if t is None else t[first:last], inputs
                )
            reorders = _kind(sampler) is not _IN_PLACE
            held = HeldCache(self._groups, m, reorders)
            with contextlib.ExitStack() as stack:
                enter = stack.enter_context
                call = _Sampling(sampler, held, draws)
                enter(internals.replaced(task, "sampler", call))
                enter(zeros_apart())
                if draws is not None:
                    enter(draws.of_rows(first, last))
                return task.generate_step(own, stop_token_ids)

        found = self._groups.run(generate, rows, groups)
        if draws is not None:
            draws.move_on()
        return found


class _Sampling:
    """Stands for the sampler of a task, with a cache that stays."""

    def __init__(self, sampler: Any, held: HeldCache, draws: Draws | None):
        self._sampler = sampler
        self._held = held
        self._draws = draws

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(
        self,
        next: Callable,
        prompt: Any,
        cache: Any = None,
        index: Any = 0,
        **kwargs: Any,
    ) -> Any:
        held, draws = self._held, self._draws

        def step(prompt: Any, kept: Any, index: Any) -> Any:
            if draws is not None:
                draws.index = index
            *others, cache = next(prompt, held.read(kept), index)
            return *others, held.write(kept, cache)

        kept = None if cache is None else held.hold(cache)
        if draws is None:
            return self._sampler(step, prompt, kept, index, **kwargs)
        run_loop = type(self._sampler).run_loop

        def counted(*args: Any, **kwargs: Any) -> Any:
            found = run_loop(self._sampler, *args, **kwargs)
            draws.note_end(found[2])
            return found

        with internals.replaced_method(self._sampler, "run_loop", counted):
            # All groups begin where all rows together would.
            index = draws.begin(index)
            return self._sampler(step, prompt, kept, index, **kwargs)


def _kind(sampler: Any) -> set[str] | None:
    """What a sampler does with rows; None if it is not KerasHub's."""
    if not type(sampler).__module__.startswith("keras_hub."):
        return None
    name = type(sampler).__name__
    return next((k for k in (_IN_PLACE, _REORDERING) if name in k), None)


def _as_tensor(value: Any) -> Any:
    return None if value is None else tf.convert_to_tensor(value)


def _flat(inputs: Any) -> list[tf.Tensor]:
    return [t for t in tree.flatten(inputs) if t is not None]


def _start(inputs: Any) -> Any:
    """Where the first token goes: behind the shortest prompt."""
    if not isinstance(inputs, dict):
        return None
    names = ("decoder_padding_mask", "padding_mask")
    mask = next((inputs[name] for name in names if name in inputs), None)
    if mask is None:
        return None
    return tf.reduce_min(tf.reduce_sum(tf.cast(mask, tf.int32), -1))


_categorical = internals.Replaceable(keras.random, "categorical")


# ------------------------------------------------ draws of groups, as of all
class Draws:
    """The draws of a sampler in one call of `generate`.

    `num_rows` are the prompts of all groups; `start` is the position of the
    first token that is generated, if tasks ask for the one behind the shortest
    prompt.

    Attributes:
        index: The position of the token of this turn.
    """

    def __init__(self, sampler: Any, num_rows: int, start: tf.Tensor):
        generators = [
            value
            for value in vars(sampler).values()
            if isinstance(value, keras.random.SeedGenerator)
        ]
        self._base = [(g, tf.identity(g.state.value)) for g in generators]
        self._num_rows = num_rows
        self._start = start
        self._begins: list[Any] = []
        self._turns: list[tf.Tensor] = []
        self.index: Any = None

    @contextlib.contextmanager
    def of_rows(self, first: int, last: int) -> Iterator[None]:
        """Inside, a group of rows draws."""

        def categorical(
            logits: Any,
            num_samples: int,
            dtype: Any = "int32",
            seed: Any = None,
        ) -> Any:
            base = next((b for g, b in self._base if g is seed), None)
            if base is None:
                return _categorical.original(logits, num_samples, dtype, seed)
            turn = tf.cast(self.index - self._start, base.dtype)
            # (own rows, ids) -> (all rows, ids): what a row draws depends on
            # how many there are. So all draw, and the group's are taken.
            paddings = [[first, self._num_rows - last], [0, 0]]
            drawn = _categorical.original(
                tf.pad(logits, paddings),
                num_samples,
                dtype,
                _Known(base + tf.stack([0 * turn, turn])),
            )
            return drawn[first:last]

        with _categorical.by(categorical):
            yield

    def begin(self, index: Any) -> Any:
        """Where a group begins that would begin at `index` by itself."""
        if not isinstance(index, tf.Tensor):  # the same for all groups
            self._start = tf.convert_to_tensor(index, tf.int32)
        self._begins.append(tf.cast(index, tf.int32))
        return self._start

    def note_end(self, index: tf.Tensor) -> None:
        """Notes the position at which a group's loop has ended."""
        self._turns.append(tf.cast(index, tf.int32) - self._start)

    def move_on(self) -> None:
        """Moves the seeds on, as one loop over all rows would."""
        tf.debugging.assert_equal(
            tf.reduce_min(tf.stack(self._begins)),
            self._start,
            "A task must begin to generate behind its shortest prompt, if "
            "prompts go through in several groups. Pass num_groups=1.",
        )
        for generator, base in self._base:
            turns = tf.cast(tf.reduce_max(tf.stack(self._turns)), base.dtype)
            generator.state.assign(base + tf.stack([0 * turns, turns]))


class _Known(keras.random.SeedGenerator):
    """A seed that is known."""

    def __init__(self, value: tf.Tensor):
        self.__dict__["known"] = value

    def next(self, ordered: bool = True) -> tf.Tensor:
        return self.__dict__["known"]
