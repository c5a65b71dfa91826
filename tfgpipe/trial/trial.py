"""Goes through the layers of a model, and tries those that are not known.

A layer trains as in Keras if what it makes of a batch follows from what it
makes of parts of it, as `compare.py` says. That is tried before the first step,
for each phase (`training=True` and `False`): on the first rows of the data,
where they are at hand, and on drawn ones, of several lengths where a length is
not known. What differs is warned of by the layer's name.

Cost: about four forward and backward passes of five rows through the layers
that are tried, and forward passes through those before them. Layers that are
alike, as blocks of a deep model are, are all tried on the first rows, and one
of them on others. A model of layers that are known to treat each row by itself
is not run at all.

Limits: what other values alone would show is not seen, nor what is wrong with a
layer that draws by other means than `keras.random`. Python in a layer runs.

Of Keras's layers it is known what a trial would say. Both tables are checked by
trying each layer, for every version of TensorFlow and Keras that is supported.
Those of neither table are tried, as are layers of a user's, and operations.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from tfgpipe import failures, internals
from tfgpipe.cells import CellFunction
from tfgpipe.trial import compare, rows
from tfgpipe.trial.outcome import (
    Outcome,
    TrialInputs,
    TriedCall,
    Values,
    are_by_rows,
    differentiated,
    look_up,
)

TRIALS = ("warn", "error", "off")

# Of a mini-batch's rows, on which layers are tried besides: FLOPs of a run,
# numbers that go in, and rows.
_AFFORDABLE, _MOST_NUMBERS, _MOST_ROWS = 3e8, 2**18, 1024

_Difference = dict[tuple[int, str], tuple[CellFunction, Any, str]]


class Trial:
    """Tries the layers of a model, each phase once.

    `rule` says what happens where a layer differs: "warn", "error", or "off",
    which is nothing.
    """

    def __init__(self, rule: str):
        self._data: Callable[[int], Any] | None = None
        self._num_rows = 0  # of a mini-batch, where data are at hand
        self._rule = rule
        self._found: list[_Pass] = []
        self._phases: set[Any] = set()
        self._told: set[tuple[int, str]] = set()

    def note_data(self, data: Any, cast: Callable[[Any], Any]) -> None:
        """Takes rows of a mini-batch to try layers on.

        `cast` makes of them what the first layer takes.
        """
        self._num_rows = rows.num_rows(data)
        if not self._num_rows:
            self._data = None
            return
        kept = min(self._num_rows, _MOST_ROWS)
        first = rows.first_rows(data, kept)
        self._data = lambda count: cast(rows.first_rows(first, count))

    def run(
        self, functions: Sequence[CellFunction], specs: Any, count: int
    ) -> None:
        """Tries the layers, if they have not been tried in this phase.

        What was found is for `tell`: errors of the step itself come first.
        `specs` is a nest of tensors, or of specs, that the first cell takes;
        `count` is the number of micro-batches.
        """
        training = functions[0].training
        trained = frozenset(id(v) for f in functions for v in f.flat_weights)
        flat = [spec for spec in tree.flatten(specs) if spec is not None]
        sizes = (*(tuple(spec.shape)[1:] for spec in flat),)
        if (training, trained, sizes) in self._phases:
            return
        self._phases.add((training, trained, sizes))
        steps = [(f, step) for f in functions for step in f.cell.calls]
        pass_ = _Pass(steps)
        if pass_.is_needless:
            return
        with (
            internals.outside_functions(),
            internals.recording(),
            internals.without_strategy(),
            internals.random_state_kept(),
            internals.random_numbers_kept(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # the real calls will warn
            made = self._rows(functions, specs, count)
            for parts, nests in made:
                pass_.run(parts, nests)
            for state in pass_.later():
                pass_.run(*made[-1], state)
        self._found.append(pass_)

    def _rows(
        self, functions: Sequence[CellFunction], specs: Any, count: int
    ) -> list[tuple[rows.Parts, list[Any]]]:
        """What to try layers on."""
        many = self._many(functions, specs, count)
        found, real = [], []
        if self._data is not None:
            real = [own for own in (rows.FEW, many) if own is not None]
            real = [own for own in real if own.total <= self._num_rows]
            try:
                found = [
                    (own, rows.with_parts(self._data(own.total), own))
                    for own in real
                ]
            except Exception as error:  # the step itself will tell the user
                failures.inform(f"Layers are tried on drawn rows: {error}")
                real = []
            if not all(rows.are_like(nests[0], specs) for _, nests in found):
                found, real = [], []  # a subclass's step makes others of them
        lengths = rows.LENGTHS if rows.has_unknown_sizes(specs) else (1,)
        limit = _smallest_table(functions)
        tried = [(rows.FEW, n, 0) for n in lengths]
        if not real:
            tried.append((many or rows.FEW, lengths[0], 1))
        return found + [
            (own, rows.drawn(specs, n, limit, seed, own))
            for own, n, seed in tried
        ]

    def _many(
        self, functions: Sequence[CellFunction], specs: Any, count: int
    ) -> rows.Parts | None:
        """As many rows as a mini-batch has; None if that takes long."""
        flat = [spec for spec in tree.flatten(specs) if spec is not None]
        total = self._num_rows or flat[0].shape[0]
        if total is None:
            many = rows.MANY
        elif total < 2:
            return None
        else:
            many = rows.Parts(max(1, total // count), 0)
            many = many._replace(other=total - many.first)
        sizes = [size or 1 for s in flat for size in tuple(s.shape)[1:-1]]
        num_weights = sum(
            math.prod(v.shape) for f in functions for v in f.flat_weights
        )
        work = 2 * num_weights * many.total * math.prod(sizes)
        num_numbers = many.total * sum(
            math.prod(size or 1 for size in tuple(s.shape)[1:]) for s in flat
        )
        is_cheap = work <= _AFFORDABLE and num_numbers <= _MOST_NUMBERS
        return many if is_cheap and many.total <= _MOST_ROWS else None

    def tell(self) -> None:
        """Warns of layers that were found to differ, once.

        Raises:
            ValueError: If there are any, and the rule is "error".
        """
        passes, self._found = self._found, []
        for pass_ in passes if self._rule != "off" else ():
            self._tell(pass_)

    def _tell(self, pass_: _Pass) -> None:
        found = pass_.found()
        if self._rule == "warn":
            for about, function, layer, what in found:
                if (id(layer), about) not in self._told:  # in another phase
                    self._told.add((id(layer), about))
                    function.cell.warn_of(layer, what)
        if self._rule == "error" and found:
            texts = [f"{f.cell.describe(x)} {what}" for _, f, x, what in found]
            raise ValueError(
                'With trial="error", layers must treat a mini-batch as they '
                "treat its micro-batches. Received:\n"
                + "\n".join(f"* {text[0].upper()}{text[1:]}" for text in texts)
                + '\nFollow the cures, or pass trial="warn".'
            )
        for text in pass_.untried():
            failures.inform(text)


class _Pass:
    """All steps of a model, each with its cell's function, tried in turn.

    Attributes:
        said: What differs, by the place of the step and what it is about.
        is_needless: Whether all steps are known.
    """

    def __init__(self, steps: list[tuple[CellFunction, Any]]):
        self._steps = steps
        self._is_known = [is_row_by_row(step.layer) for _, step in steps]
        self.said: _Difference = {}
        self._tried: set[int] = set()
        self._errors: dict[int, str] = {}
        self._sizes_vary = False  # of what steps hand on, by their rows
        self._assigned: dict[int, Any] = {}
        self._varying: dict[int, Any] = {}  # state that follows from rows
        self._next: dict[int, Any] = {}  # state, before and after a step
        self._first: dict[int, Any] | None = None  # `_plain` of the first rows
        self._plain: dict[int, Any] = {}  # shapes for which nothing was odd
        for i, (function, step) in enumerate(steps):
            if mixes_rows(step.layer):
                apart = float("inf")
                self._say(i, "outputs", compare.of_outputs(apart))
                self._tried.add(i)
            if function.training:
                step.repeated = {}
        unknown = [i for i, known in enumerate(self._is_known) if not known]
        self._end = max(unknown, default=-1) + 1
        self.is_needless = self._end == 0

    @functools.cached_property
    def _like(self) -> dict[int, int]:
        """Of each step that is not known the first that is alike."""
        unknown = {
            i: step
            for i, (_, step) in enumerate(self._steps)
            if not self._is_known[i]
        }
        return dict(zip(unknown, _firsts_alike(unknown)))

    def later(self) -> Iterator[Values]:
        """Yields the state of the second step, and that of a late one.

        What is the same for all rows is taken for a counter.
        """
        if not self._next:
            return
        yield {key: (v, new) for key, (v, _, new) in self._next.items()}
        yield {
            key: (v, new if key in self._varying else new + 999 * (new - old))
            for key, (v, old, new) in self._next.items()
            if new.dtype.is_integer or new.dtype.is_floating
        }

    def run(
        self,
        parts: rows.Parts,
        nests: Sequence[Any],
        state: Values | None = None,
    ) -> None:
        """Tries the steps on some rows, as a whole and in parts.

        `nests` are all rows and each part; `state` is what the step begins
        with, None for the present one.
        """
        if state is not None:
            self._assigned = {}
        given = [
            TrialInputs(n, dict(state or {}), own, parts.total)
            for n, own in zip(nests, parts.slices)
        ]
        if self._first is None:
            self._first = self._plain
        else:
            self._plain = {}
        for i, (function, step) in enumerate(self._steps[: self._end]):
            if all(map(self._is_as_another, range(i, self._end))):
                return
            try:
                tried = TriedCall(function, step)
                is_known = self._is_known[i] or self._is_as_another(i)
                if is_known and rows.have_rows(given[0].nest, parts):
                    made = [tried.run(g) for g in given]
                else:
                    made = self._try(i, tried, given)
            except Exception as error:  # of rows that it cannot take
                self._errors[i] = f"{type(error).__name__}: {error}"
                return
            following = self._handed_on(i, parts, given, made)
            if following is None:
                self._errors[i + 1] = "what it takes is not known"
                return
            given = following

    def _is_as_another(self, i: int) -> bool:
        """Whether it is known what a trial of a step on these rows would say.

        On the first rows it had nothing to say, nor of a step that is alike and
        takes the same shapes; and that one was tried on these rows.
        """
        if self._is_known[i]:
            return True
        first, before = self._like[i], self._first or {}
        return (
            before is not self._plain
            and first in self._plain
            and before.get(i) is not None
            and before.get(i) == before.get(first)
        )

    def _try(
        self, i: int, tried: TriedCall, given: list[TrialInputs]
    ) -> list[Outcome]:
        trains = tried.function.training
        metrics = {id(v) for m in tried.metrics for v in m.variables}
        #     whole   [ all rows          ]    as plain Keras
        #     parts   [ first ][ second   ]    as two micro-batches
        #
        # Metrics run on from part to part; other state does not.
        whole = tried.run(given[0], trains)
        first = tried.run(given[1], trains)
        chained = [own for k, own in first.state.items() if k in metrics]
        second = tried.run(given[2], trains, chained)
        parts = [first, second]
        draws = [own.draws for own in (whole, *parts)]
        if None in draws or any(own != draws[0] for own in draws):
            self._errors[i] = "it draws random numbers for a batch as a whole"
            return [whole, *parts]
        self._tried.add(i)
        if apart := compare.output_distance(whole, parts):
            # What does not equal itself draws: there is nothing to compare.
            again = tried.run(given[0])
            is_same = not any(
                map(compare.distance, whole.tensors, again.tensors)
            )
            if not is_same or tried.has_side_effects(given[0]):
                self._errors[i] = "it draws by other means than `keras.random`"
                self._tried.discard(i)
                return [whole, *parts]
            self._say(i, "outputs", compare.of_outputs(apart))
            self._sizes_vary |= rows.UNCLEAR in _row_axes(whole, parts)
        for text in compare.of_losses(whole, parts):
            self._say(i, "losses", text)
        moving = {
            id(v)
            for norm in tried.normalizations
            for v in (norm.moving_mean, norm.moving_variance)
        }
        self._note_varying(whole, parts)
        # Moving statistics have a rule of their own, and metrics come below.
        for key, (variable, new) in whole.state.items():
            if key in metrics or key in moving:
                continue
            for text in compare.of_state(variable, new, parts):
                self._say(i, f"state {key}", text)
            old = given[0].state.get(key, (None, variable.value))[1]
            self._next.setdefault(key, (variable, old, new))
        self._try_draws(i, tried, given[0], whole, {*metrics, *moving})
        for text in compare.of_metrics(whole, second):
            self._say(i, "metrics", text)
        self._try_replicas(i, tried, given)
        is_right = not any(place == i for place, _ in self.said)
        # Of wrong outputs gradients are wrong, too: one message is enough.
        if trains and is_right:
            axes = _row_axes(whole, parts)
            whole, first, second = (
                differentiated(own, axes) for own in (whole, *parts)
            )
            parts = [first, second]
            for text in compare.of_gradients(whole, parts):
                self._say(i, "gradients", text)
            self._look_up(i, tried, given, axes, [whole, *parts])
        is_right = not any(place == i for place, _ in self.said)
        # Nothing to say, or to note: equal steps need no trial of their own.
        has_slices = any(tried.step.repeated.values())
        if is_right and not whole.state and not has_slices:
            self._plain[i] = _shapes(given)
        return [whole, *parts]

    def _look_up(
        self,
        i: int,
        tried: TriedCall,
        given: list[TrialInputs],
        axes: list[int],
        made: list[Outcome],
    ) -> None:
        """Finds out which slices of sparse gradients are those of rows."""
        repeated: dict[int, list[bool]] = {}
        odd: list[Any] = []
        if not self._sizes_vary and not are_by_rows(made):
            varying = self._varying.values()
            repeated, odd = look_up(tried, given, axes, [*varying])
        before = tried.step.repeated
        for key in made[0].dw:
            kinds = repeated.get(key, [])
            kinds = kinds if any(kinds) else []
            known = before.setdefault(key, kinds)
            before[key] = kinds if known == kinds else []
        for variable in odd:
            self._say(i, f"lookup {id(variable)}", compare.of_lookups(variable))

    def _note_varying(self, whole: Outcome, parts: list[Outcome]) -> None:
        """Notes what micro-batches may assign otherwise, and to what."""
        for made in (whole, *parts):
            for key, (variable, new) in made.state.items():
                first = self._assigned.setdefault(key, new)
                if compare.distance(first, new):
                    self._varying[key] = variable

    def _try_draws(
        self,
        i: int,
        tried: TriedCall,
        given: TrialInputs,
        whole: Outcome,
        others: set[int],
    ) -> None:
        """State that is drawn, and not row by row, is another with each seed.

        One that follows from rows, which draw, is a mean over more of them.
        """
        seeds = tried.other_seeds()
        others = others | {id(v) for v, _ in seeds}
        kept = whole.state.keys() - others
        if not kept or all(has_rows for _, has_rows, _ in whole.draws or ()):
            return
        again = tried.run(given, more=seeds).state
        for key in kept:
            variable, new = whole.state[key]
            if key in again and compare.distance(new, again[key][1]):
                self._say(i, f"state {key}", compare.of_drawn(variable))

    def _try_replicas(
        self, i: int, tried: TriedCall, given: list[TrialInputs]
    ) -> None:
        """A metric of several replicas is zero in all but the first."""
        if len(tried.function.cell.devices) == 1:
            return
        for variable in [v for m in tried.metrics for v in m.variables]:
            if variable.aggregation != "sum":
                continue
            nine = 9 * keras.ops.ones_like(variable.value)
            starts = [nine, nine, keras.ops.zeros_like(nine)]
            made = [
                tried.run(g, more=[(variable, start)]).state.get(id(variable))
                for g, start in zip(given, starts)
            ]
            values = [own[1] for own in made if own is not None]
            if len(values) < len(made):
                continue
            whole, one, other = values
            if compare.distance(whole, one + other):
                text = compare.of_replicas(variable.name)
                self._say(i, f"replicas {id(variable)}", text)

    def _handed_on(
        self,
        i: int,
        parts: rows.Parts,
        given: list[TrialInputs],
        made: list[Outcome],
    ) -> list[TrialInputs] | None:
        """What the next step takes; None if it is not known.

        A fault of this step must not be taken for one of the next.
        """
        nests = [own.nest for own in made]
        if (i, "outputs") in self.said or i in self._errors:
            if not rows.have_rows(nests[0], parts):
                return None
            nests = rows.with_parts(nests[0], parts)
        return [
            g._replace(nest=nest, state={**g.state, **own.state})
            for g, own, nest in zip(given, made, nests)
        ]

    def _say(self, i: int, about: str, what: str) -> None:
        function, step = self._steps[i]
        self.said.setdefault((i, about), (function, step.layer, what))

    def found(self) -> list[tuple[str, CellFunction, Any, str]]:
        """What differs: what it is about, cells' functions, layers, words."""
        return [
            (about, *own)
            for (i, about), own in sorted(
                self.said.items(), key=lambda pair: pair[0][0]
            )
            # Behind wrong outputs are wrong gradients.
            if about != "gradients" or (i, "outputs") not in self.said
        ]

    def untried(self) -> list[str]:
        """Which steps could not be tried, and why, in words."""
        found = []
        for i, (function, step) in enumerate(self._steps[: self._end]):
            if self._is_known[i] or i in self._tried:
                continue
            why = self._errors.get(i, "a layer before it could not be run")
            where = function.cell.describe(step.layer)
            found.append(
                f"{where[0].upper()}{where[1:]} was not tried: {why}. Whether "
                "it treats a mini-batch as its micro-batches is not known."
            )
        return found


def _shapes(given: list[TrialInputs]) -> list[Any]:
    return [
        None if t is None else (tuple(t.shape), t.dtype)
        for own in given
        for t in tree.flatten(own.nest)
    ]


def _row_axes(whole: Outcome, parts: list[Outcome]) -> list[int]:
    """For each output, along which axis it has the rows."""
    columns = zip(whole.tensors, *(own.tensors for own in parts))
    counts = [own.num_rows for own in (whole, *parts)]
    return [
        rows.NONE
        if any(t is None for t in column)
        else rows.row_axis([tuple(t.shape) for t in column], counts)
        for column in columns
    ]


def _smallest_table(functions: Sequence[CellFunction]) -> int:
    """How many words the smallest lookup knows, at least 2."""
    sizes = [
        layer.input_dim
        for function in functions
        for layer in internals.flat_layers(function.cell)
        if isinstance(layer, keras.layers.Embedding)
    ]
    return max(2, min([*sizes, 100]))


# What one row becomes does not depend on another one, whatever the values.
ROW_BY_ROW = frozenset(
    """
    Activation Add AdditiveAttention AlphaDropout Attention Average
    AveragePooling1D AveragePooling2D AveragePooling3D BatchNormalization
    Bidirectional CategoryEncoding CenterCrop Concatenate Conv1D
    Conv1DTranspose Conv2D Conv2DTranspose Conv3D Conv3DTranspose ConvLSTM1D
    ConvLSTM2D ConvLSTM3D Cropping1D Cropping2D Cropping3D Dense DepthwiseConv1D
    DepthwiseConv2D Dot Dropout ELU EinsumDense Flatten GRU GRUCell
    GaussianDropout GaussianNoise GlobalAveragePooling1D
    GlobalAveragePooling2D GlobalAveragePooling3D GlobalMaxPooling1D
    GlobalMaxPooling2D GlobalMaxPooling3D GroupNormalization
    GroupQueryAttention GroupedQueryAttention Identity LSTM LSTMCell
    LayerNormalization LeakyReLU Masking MaxPooling1D MaxPooling2D MaxPooling3D
    Maximum Minimum MultiHeadAttention Multiply Normalization PReLU Permute RNN
    RMSNormalization ReLU RepeatVector Rescaling Reshape Resizing
    SeparableConv1D SeparableConv2D Sequential SimpleRNN SimpleRNNCell Softmax
    SpatialDropout1D SpatialDropout2D SpatialDropout3D StackedRNNCells Subtract
    TimeDistributed UnitNormalization UpSampling1D UpSampling2D UpSampling3D
    ZeroPadding1D ZeroPadding2D ZeroPadding3D
    """.split()
)

# It shows for some values only, or not behind what they draw.
MIXES_ROWS = frozenset({"MelSpectrogram", "RandAugment"})


def mixes_rows(layer: keras.layers.Layer) -> bool:
    """Whether a layer, or one inside it, is known to mix rows."""
    inside = internals.flat_layers(layer)
    return any(_is_of(own, MIXES_ROWS) for own in inside)


def is_row_by_row(layer: keras.layers.Layer) -> bool:
    """Whether a layer, as it is set, is known to treat each row by itself."""
    return all(
        _is_of(own, ROW_BY_ROW) and _is_plain(own)
        for own in internals.flat_layers(layer)
    )


def _firsts_alike(steps: Mapping[int, Any]) -> Iterator[int]:
    """For each step, by its place, which one is the first that is like it."""
    firsts: list[int] = []
    for i, step in steps.items():
        for first in firsts:
            other = steps[first]
            if step.wiring == other.wiring and _are_alike(
                step.layer, other.layer, set()
            ):
                yield first
                break
        else:
            firsts.append(i)
            yield i


def _are_alike(one: Any, other: Any, compared: set[tuple[int, int]]) -> bool:
    """Whether two layers compute the same, but for the values of weights.

    They have one class, and equal attributes. Attributes that are neither
    numbers, texts, layers, variables nor collections of them have to be one
    object, if they are not Keras's own. `compared` are pairs that have been
    seen, as layers may refer to each other.
    """
    if one is other or (id(one), id(other)) in compared:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, keras.Variable):
        facts = [(v.shape, v.dtype, v.trainable) for v in (one, other)]
        if facts[0] != facts[1]:
            return False
        may_switch = not one.trainable and math.prod(one.shape) <= _MOST_ROWS
        return not may_switch or bool(np.array_equal(one.value, other.value))
    if isinstance(one, (bool, int, float, str, bytes, set, frozenset)):
        return bool(one == other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(
            _are_alike(a, b, compared) for a, b in zip(one, other)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _are_alike(one[key], other[key], compared) for key in one
        )
    makes_values = (keras.initializers.Initializer, keras.random.SeedGenerator)
    if isinstance(one, makes_values):
        return True
    if isinstance(one, keras.Layer) or internals.is_keras(type(one)):
        compared.add((id(one), id(other)))
        left, right = _attributes(one), _attributes(other)
        return _are_alike(left, right, compared)
    return False


def _attributes(value: Any) -> dict[str, Any]:
    """What an object computes may follow from; of names the words alone."""
    if not isinstance(value, keras.Operation):
        return getattr(value, "__dict__", {})
    words = re.sub(r"_?\d+", "", value.name)
    return {**internals.compared_attributes(value), "name": words}


def _is_of(layer: keras.layers.Layer, names: frozenset[str]) -> bool:
    cls = type(layer)
    in_layers = getattr(keras.layers, cls.__name__, None) is cls
    return cls.__name__ in names and (in_layers or cls is keras.Sequential)


def _is_plain(layer: keras.layers.Layer) -> bool:
    """Whether nothing in its arguments is a user's, or takes the rows' axis."""
    own = vars(layer)
    axes = [own[name] for name in own if name.endswith(("axis", "axes"))]
    # -2 is the rows' axis of a matrix.
    if any(
        isinstance(axis, int) and (axis == 0 or axis < -1)
        for axis in keras.tree.flatten(axes)
    ):
        return False
    if isinstance(layer, keras.layers.EinsumDense) and not _keeps_rows(
        layer.equation
    ):
        return False
    functions = [
        value
        for name, value in own.items()
        if callable(value)
        and (
            "activation" in name
            or "regularizer" in name
            or hasattr(type(layer), name)
        )
    ]
    return all(
        internals.is_keras(f) or internals.is_keras(type(f)) for f in functions
    )


def _keeps_rows(equation: str) -> bool:
    """Whether the first axis that goes in comes out first alone."""
    given, made = equation.replace(" ", "").split("->")
    taken, weights = given.split(",")
    if made[:1] != taken[:1]:
        return False
    row = taken[0]
    return row == "." or (taken.count(row) == 1 and row not in weights)
