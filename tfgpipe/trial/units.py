"""The units of a model's graph that are tried: layers, and code around them.

    model(x)    dense | own block: dense, code, dense | code of the model | ...
    units       known |             one               |       one         |

A layer of Keras's is a unit, and so is one of a user's, with all that it calls:
what is inside may have its rows in any order. Models are gone into; what their
own code does between layers are units, too.

Of most of Keras's layers it is known what a trial would say. Tests try each
layer of both tables, for every version that is supported.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import is_whole
from tfgpipe.graphs import TracedModel, follows, functions_of

# Element by element, for tensors of one shape.
_ELEMENTWISE = frozenset(
    """
    Abs Add AddV2 BiasAdd Cast Ceil Cos Div DivNoNan Elu Equal Erf Erfc Exp
    Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity Inv IsFinite
    IsInf IsNan LeakyRelu Less LessEqual Log Log1p LogicalAnd LogicalNot
    LogicalOr Maximum Minimum Mul Neg NotEqual OnesLike Pow RealDiv Reciprocal
    Relu Relu6 Round Rsqrt SelectV2 Selu Sigmoid Sign Sin Softplus Softsign Sqrt
    Square SquaredDifference StopGradient Sub Tanh ZerosLike
    """.split()
)

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

_ATTENTION = frozenset(
    """
    AdditiveAttention Attention GroupQueryAttention GroupedQueryAttention
    MultiHeadAttention
    """.split()
)

# Regularisers of outputs that are sums over their elements.
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)

# It shows for some values only, or not behind what they draw.
MIXES_ROWS = frozenset({"MelSpectrogram", "RandAugment"})


@dataclasses.dataclass(eq=False)
class Unit:
    """Some operations, one after the other.

    Attributes:
        layer: The layer whose call they are; None for code of a model.
        name: What to call it in a sentence.
        cell: The cell in which it begins.
        number: Its place among all units.
        sections: Its sections.
        operations: Its operations.
        takes: The tensors that they take of other units.
        gives: What others take of it, and results.
        is_known: Whether it is known to treat each row by itself.
    """

    layer: keras.layers.Layer | None
    name: str
    cell: int
    number: int = 0
    sections: set[int] = dataclasses.field(default_factory=set)
    operations: list[tf.Operation] = dataclasses.field(default_factory=list)
    takes: list[tf.Tensor] = dataclasses.field(default_factory=list)
    gives: list[tf.Tensor] = dataclasses.field(default_factory=list)
    is_known: bool = False

    @functools.cached_property
    def layers(self) -> list[keras.layers.Layer]:
        """The layer with those inside it."""
        return [] if self.layer is None else internals.flat_layers(self.layer)

    @functools.cached_property
    def num_bytes(self) -> int:
        """Of the numbers in which most is lost."""
        dtypes = [getattr(one, "compute_dtype", None) for one in self.layers]
        dtypes += [t.dtype for t in self.takes]
        known = [tf.as_dtype(d).real_dtype for d in dtypes if d is not None]
        return min((d.size for d in known if d.is_floating), default=8)

    def inner(self, traced: TracedModel) -> list[tuple[str, tf.Tensor]]:
        """Returns what goes from call to call inside, and who made it."""
        maker: dict[str, tuple[int, str]] = {}
        for op in self.operations:
            place = traced.places[op.name]
            around = traced.section_of(place).around_at(place)
            first = around.index(self.layer) if self.layer in around else 0
            name = "/".join(layer.name for layer in around[first:])
            maker[op.name] = traced.section_at(place), f"layer '{name}'"
        return [
            (maker[op.name][1], tensor)
            for op in self.operations
            for tensor in filter(is_data, op.outputs)
            if any(
                maker.get(user.name, maker[op.name]) != maker[op.name]
                for user in tensor.consumers()
            )
        ]

    @property
    def mixes(self) -> bool:
        """Returns whether it is known to mix rows."""
        return self.layer is not None and mixes_rows(self.layer)


class Units:
    """The units of a model.

    Attributes:
        units: The units in order.
        draws: Random numbers, tensors.
        drawing: The units that draw inside loops, branches or functions, or
            turn rows round.
        differentiating: Those with a gradient of their own, or with code that
            stops gradients.
    """

    def __init__(self, traced: TracedModel):
        self._traced = traced
        self.units: list[Unit] = []
        self._unit_of: dict[str, Unit] = {}
        self._library: dict[str, Any] = {}
        if any(internals.takes_functions(op.type) for op in traced.operations):
            self._library = {
                function.signature.name: function.node_def
                for function in traced.graph.as_graph_def().library.function
            }
        key: Any = None
        # What is behind all layers only hands on what they made.
        end = traced.sections[-1].start
        for place, op in enumerate(traced.operations[:end]):
            if op.type in ("Placeholder", "Const", "NoOp"):
                continue
            place_key, unit = self._place(place)
            if place_key != key:
                key, unit.number = place_key, len(self.units)
                self.units.append(unit)
            last = self.units[-1]
            last.sections.add(traced.section_at(place))
            last.operations.append(op)
            self._unit_of[op.name] = last
        self._connect()
        for unit in self.units:
            unit.is_known = self._is_known(unit)
        self.draws: list[tf.Tensor] = []
        self.drawing: set[Unit] = set()
        self.differentiating: set[Unit] = set()
        for place, op in enumerate(traced.operations):
            self._look(place, op)

    def maker(self, tensor: tf.Tensor) -> Unit | None:
        """Returns the unit that made a tensor, maybe handed on behind all."""
        return self._unit_of.get(self._made(tensor).op.name)

    def is_inside_known(self, op: tf.Operation) -> bool:
        """Returns whether a known layer made an operation, in a unit or not."""
        place = self._traced.places[op.name]
        around = self._traced.section_of(place).around_at(place)
        layers = [one for one in around if isinstance(one, keras.layers.Layer)]
        return any(is_row_by_row(layer, 3) for layer in layers)

    def _place(self, place: int) -> tuple[Any, Unit]:
        """A key of the unit of an operation, and a new unit for it."""
        number = self._traced.section_at(place)
        section = self._traced.sections[number]
        cell = self._traced.cells[number]
        around = section.around_at(place)
        for i, one in enumerate(around):
            if not isinstance(one, keras.Model):
                path = [id(layer) for layer in around[: i + 1]]
                if isinstance(one, keras.layers.Layer):
                    return path, Unit(one, f"layer '{one.name}'", cell)
                name = f"operation '{one.name}'"
                return (number, path), Unit(None, name, cell)
        name = f"code of model '{around[-1].name}'" if around else "the model"
        if around != section.around:
            name += f" behind '{section.around[len(around)].name}'"
        return (number, len(around)), Unit(None, name, cell)

    def _connect(self) -> None:
        """Finds what each unit takes and gives."""
        traced = self._traced
        fixed = [
            *(u.tensor for u in traced.uses),
            *(t for _, t in traced.state),
        ]
        free = {t.ref() for t in fixed}
        free |= {inner.ref() for _, inner in traced.graph.captures}
        for unit in self.units:
            inputs = {
                t.ref(): t
                for op in unit.operations
                for t in op.inputs
                if self._unit_of.get(t.op.name) is not unit
                and not follows(t, free)
            }
            unit.takes = [*inputs.values()]
        # State and losses have rules of their own, whoever reads them.
        others = {t.ref() for t in (*traced.assigned, *traced.losses)}
        handed_out = [self._made(t) for t in traced.handed_out if t is not None]
        taken = [t for unit in self.units for t in unit.takes]
        for ref, tensor in {t.ref(): t for t in [*taken, *handed_out]}.items():
            maker = self._unit_of.get(tensor.op.name)
            if maker is not None and ref not in others:
                maker.gives.append(tensor)

    def _made(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what is only handed on behind all units, where it is made."""
        while tensor.op.name not in self._unit_of and tensor.op.inputs:
            tensor = tensor.op.inputs[0]
        return tensor

    def _is_known(self, unit: Unit) -> bool:
        if unit.layer is not None:
            state = {t.ref() for t in self._traced.assigned}
            ranks = [
                t.shape.rank or 0
                for t in (*unit.takes, *unit.gives)
                if is_data(t) and t.dtype != tf.bool and t.ref() not in state
            ]
            return is_row_by_row(unit.layer, min(ranks, default=2))
        weights = {u.tensor.ref() for u in self._traced.uses}
        return all(_is_elementwise(op, weights) for op in unit.operations)

    def _look(self, place: int, op: tf.Operation) -> None:
        """Notes what an operation draws, and gradients of its own."""
        unit = self._unit_of.get(op.name)
        kinds, has_gradient = _seen(self._library, op.node_def)
        if "StopGradient" in kinds and unit is not None and not unit.is_known:
            around = self._traced.section_of(place).around_at(place)
            has_gradient |= not (around and _is_keras_alone(around[-1]))
        if unit is not None and has_gradient:
            self.differentiating.add(unit)
        if not any(map(is_random, kinds)):
            return
        if is_random(op.type) and op.type != "RandomShuffle":
            self.draws += op.outputs
        elif unit is not None:
            self.drawing.add(unit)


def is_data(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor has values, not a handle of something."""
    return tensor.dtype not in (tf.variant, tf.resource)


def is_random(kind: str) -> bool:
    """Returns whether operations of a type draw random numbers."""
    names = ("Random", "TruncatedNormal", "Multinomial")
    if not any(name in kind for name in names):
        return False
    return not kind.startswith(("StatelessRandomGet", "RandomDataset"))


def _seen(library: Any, node: tf.compat.v1.NodeDef) -> tuple[set[str], bool]:
    """Returns the types of all that it calls, and if a gradient is custom."""
    kinds, has_gradient = set(), False
    waiting = [node]
    known: set[str] = set()
    while waiting:
        one = waiting.pop()
        kinds.add(one.op)
        gradient = one.attr.get("_gradient_op_type")
        has_gradient |= gradient is not None and gradient.s.startswith(
            b"CustomGradient"
        )
        for name in {*functions_of(one)} - known:
            known.add(name)
            waiting += library.get(name, ())
    return kinds, has_gradient


def _is_elementwise(op: tf.Operation, weights: set[Hashable]) -> bool:
    """Returns whether each element follows from the elements at its place."""
    if op.type not in _ELEMENTWISE or len(op.outputs) != 1:
        return False
    made = op.outputs[0].shape
    if made.rank is None or made.rank == 0:
        return False
    return all(
        _fits(t.shape, made, t.op.type == "Const" or t.ref() in weights)
        for t in op.inputs
    )


def _fits(
    shape: tf.TensorShape, result: tf.TensorShape, is_fixed: bool
) -> bool:
    if shape.rank is None:
        return False
    if is_fixed:
        return bool(shape.rank < result.rank)
    return shape.as_list() == result.as_list()


# -------------------------------------------------------------- what is known
def mixes_rows(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer, or one inside it, is known to mix rows."""
    inside = internals.flat_layers(layer)
    return any(_is_of(one, MIXES_ROWS) for one in inside)


def is_row_by_row(layer: keras.layers.Layer, rank: int) -> bool:
    """Returns whether a layer, as it is set, is known to treat rows apart.

    `rank` is the least of what it takes and gives but masks. Where it is
    1, the last axis is the rows'; where it is 2, the last but one, along which
    attention looks.
    """
    if isinstance(layer, keras.layers.TimeDistributed):
        rank -= 1  # of one time step
    inside = internals.flat_layers(layer)
    least = 3 if any(_is_of(one, _ATTENTION) for one in inside) else 2
    return rank >= least and all(
        _is_of(one, ROW_BY_ROW) and _is_plain(one) for one in inside
    )


def _is_keras_alone(operation: keras.Operation) -> bool:
    """Returns whether a call runs Keras's code alone: it stops no gradient."""
    return (
        isinstance(operation, keras.layers.Layer)
        and not isinstance(operation, keras.layers.Lambda)
        and is_whole(operation)
        and all(map(_is_plain, internals.flat_layers(operation)))
    )


def _is_of(layer: keras.layers.Layer, names: frozenset[str]) -> bool:
    cls = type(layer)
    in_layers = getattr(keras.layers, cls.__name__, None) is cls
    return cls.__name__ in names and (in_layers or cls is keras.Sequential)


def _is_plain(layer: keras.layers.Layer) -> bool:
    """Returns whether no argument is a user's, or takes the rows' axis."""
    attributes = vars(layer)
    # What a batch normalisation finds by itself are all but its channels'.
    names = [name for name in attributes if name.endswith(("axis", "axes"))]
    axes = [attributes[name] for name in names if name != "_reduction_axes"]
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
    cells = [
        attributes[name] for name in ("cell", "cells") if name in attributes
    ]
    if not all(
        isinstance(cell, keras.layers.Layer)
        for cell in keras.tree.flatten(cells)
    ):
        return False  # a plain object, of which nothing is known
    return all(
        _is_known(name, value)
        for name, value in attributes.items()
        if callable(value) and not isinstance(value, keras.layers.Layer)
        if "activation" in name
        or "regularizer" in name
        or hasattr(type(layer), name)
    )


def _is_known(name: str, function: Any) -> bool:
    """Returns whether a layer calls a function of Keras's, for each row."""
    if name == "activity_regularizer":
        return type(function) in _SUMS
    if name.endswith("regularizer"):  # of weights
        return True
    if "activation" not in name:  # a method
        return internals.is_keras(function)
    of_keras = getattr(
        keras.activations, getattr(function, "__name__", ""), None
    )
    return of_keras is function


def _keeps_rows(equation: str) -> bool:
    """Returns whether the first axis that goes in comes out first alone."""
    given, made = equation.replace(" ", "").split("->")
    taken, weights = given.split(",")
    if made[:1] != taken[:1]:
        return False
    row = taken[0]
    return row == "." or (taken.count(row) == 1 and row not in weights)
