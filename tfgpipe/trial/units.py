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
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs import TracedModel, called_functions, follows

# Element by element, for tensors of one shape.
_ELEMENTWISE = frozenset(
    """
    Abs Add AddV2 Cast Exp Identity Log Maximum Minimum Mul Neg RealDiv Relu
    Rsqrt Sigmoid Softplus Sqrt Square StopGradient Sub Tanh
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
        takes: The tensors with values that they take of other units.
        gives: What others take of it, and results.
        is_known: Whether it is known to treat each row by itself.
        mixes: Whether it is known to mix rows.
        draws: Whether it draws inside loops, branches or functions, or turns
            rows round.
        has_gradient: Whether it has a gradient of its own, or code that stops
            gradients.
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
    mixes: bool = False
    draws: bool = False
    has_gradient: bool = False

    @property
    def is_wanted(self) -> bool:
        """Returns whether it is tried as it is."""
        return not (self.is_known or self.mixes or self.draws)

    @functools.cached_property
    def num_bytes(self) -> int:
        """Of the numbers in which most is lost."""
        inside = [] if self.layer is None else internals.flat_layers(self.layer)
        dtypes = [getattr(one, "compute_dtype", None) for one in inside]
        dtypes += [t.dtype for t in self.takes]
        known = [tf.as_dtype(d).real_dtype for d in dtypes if d is not None]
        return min((d.size for d in known if d.is_floating), default=8)


class Units:
    """The units of a model.

    Attributes:
        units: The units in order.
        random: Random numbers, tensors.
    """

    def __init__(self, traced: TracedModel):
        self._traced = traced
        self.units: list[Unit] = []
        self._unit_of: dict[str, Unit] = {}
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
            unit.mixes = unit.layer is not None and any(
                _is_of(one, MIXES_ROWS)
                for one in internals.flat_layers(unit.layer)
            )
        self.random: list[tf.Tensor] = []
        library: dict[str, Any] = {}
        if any(internals.takes_functions(op.type) for op in traced.operations):
            library = {
                function.signature.name: function
                for function in traced.graph.as_graph_def().library.function
            }
        for op in traced.operations:
            self._look(op, library)

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
        free = {t.ref() for t in (use.tensor for use in traced.uses)}
        free |= {t.ref() for _, t in traced.state}
        free |= {inner.ref() for _, inner in traced.graph.captures}
        handed_out = [self._made(t) for t in traced.handed_out if t is not None]
        given = {t.ref(): t for t in handed_out}
        for unit in self.units:
            inputs = {
                t.ref(): t
                for op in unit.operations
                for t in op.inputs
                if self._unit_of.get(t.op.name) is not unit
                and not follows(t, free)
            }
            unit.takes = [*filter(is_data, inputs.values())]
            given |= inputs
        # State and losses have rules of their own, whoever reads them.
        others = {t.ref() for t in (*traced.assigned, *traced.losses)}
        for ref, tensor in given.items():
            maker = self._unit_of.get(tensor.op.name)
            if maker is not None and ref not in others and is_data(tensor):
                maker.gives.append(tensor)

    def _made(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what is only handed on behind all units, where it is made."""
        while tensor.op.name not in self._unit_of and tensor.op.inputs:
            tensor = tensor.op.inputs[0]
        return tensor

    def _is_known(self, unit: Unit) -> bool:
        if unit.layer is None:
            return all(map(_is_elementwise, unit.operations))
        state = {t.ref() for t in self._traced.assigned}
        ranks = [
            t.shape.rank or 0
            for t in (*unit.takes, *unit.gives)
            if t.dtype != tf.bool and t.ref() not in state
        ]
        return is_row_by_row(unit.layer, min(ranks, default=2))

    def _look(self, op: tf.Operation, library: dict[str, Any]) -> None:
        """Notes what an operation draws, and gradients of its own."""
        unit = self._unit_of.get(op.name)
        calls = internals.takes_functions(op.type)
        if is_random(op.type) and op.type != "RandomShuffle":
            self.random += op.outputs
        elif unit is not None and (calls or not unit.is_known):
            nodes = [op.node_def]
            for function in called_functions(nodes, library).values():
                nodes += function.node_def
            kinds = {node.op for node in nodes}
            unit.draws |= any(map(is_random, kinds))
            unit.has_gradient |= (
                "StopGradient" in kinds and not self.is_inside_known(op)
            ) or any(
                node.attr["_gradient_op_type"].s.startswith(b"CustomGradient")
                for node in nodes
                if "_gradient_op_type" in node.attr
            )


def is_data(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor has values, not a handle of something."""
    return tensor.dtype not in (tf.variant, tf.resource)


def is_random(kind: str) -> bool:
    """Returns whether operations of a type draw random numbers."""
    names = ("Random", "TruncatedNormal", "Multinomial")
    if not any(name in kind for name in names):
        return False
    return not kind.startswith(("StatelessRandomGet", "RandomDataset"))


def _is_elementwise(op: tf.Operation) -> bool:
    """Returns whether each element follows from the elements at its place."""
    return op.type in _ELEMENTWISE and all(
        t.shape.rank == 0
        if t.op.type == "Const"
        else t.shape.rank and t.shape.as_list() == op.outputs[0].shape.as_list()
        for t in op.inputs
    )


# -------------------------------------------------------------- what is known
def is_row_by_row(layer: keras.layers.Layer, rank: int) -> bool:
    """Returns whether a layer, as it is set, is known to treat rows apart.

    `rank` is the least of what it takes and gives but masks. Where it is
    1, the last axis is the rows'; where it is 2, the last but one, along which
    attention looks.
    """
    if isinstance(layer, keras.layers.TimeDistributed):
        rank -= 1  # of one time step
    inside = internals.flat_layers(layer)
    least = 3 if any("Attention" in type(one).__name__ for one in inside) else 2
    return rank >= least and all(
        _is_of(one, ROW_BY_ROW) and _is_plain(one) for one in inside
    )


def _is_of(layer: keras.layers.Layer, names: frozenset[str]) -> bool:
    cls = type(layer)
    in_layers = getattr(keras.layers, cls.__name__, None) is cls
    return cls.__name__ in names and (in_layers or cls is keras.Sequential)


def _is_plain(layer: keras.layers.Layer) -> bool:
    """Returns whether no argument is a user's, or takes the rows' axis."""
    values = [
        (name, value)
        for name, values in vars(layer).items()
        for value in (values if isinstance(values, list | tuple) else [values])
    ]
    # -2 is the rows' axis of a matrix. What a batch normalisation finds by
    # itself are all but its channels'.
    if any(
        isinstance(value, int) and (value == 0 or value < -1)
        for name, value in values
        if name.endswith(("axis", "axes")) and name != "_reduction_axes"
    ):
        return False
    if isinstance(layer, keras.layers.EinsumDense) and not _keeps_rows(
        layer.equation
    ):
        return False
    return all(
        _is_known(name, value)
        for name, value in values
        if callable(value) and not isinstance(value, keras.layers.Layer)
    )


def _is_known(name: str, function: Any) -> bool:
    """Returns whether a layer calls a function of Keras's, for each row."""
    if name == "activity_regularizer":
        return type(function) in _SUMS
    if "activation" in name:
        name = getattr(function, "__name__", "")
        return getattr(keras.activations, name, None) is function
    return internals.is_keras(function)


def _keeps_rows(equation: str) -> bool:
    """Returns whether the first axis that goes in comes out first alone."""
    given, made = equation.replace(" ", "").split("->")
    taken, weights = given.split(",")
    if made[:1] != taken[:1]:
        return False
    row = taken[0]
    return row == "." or (taken.count(row) == 1 and row not in weights)
