"""Makes Keras layers of the plain data of a case.

`KINDS` has a function for every kind of layer. It gets what was made before,
by name, so that layers can share and read others, and `common`: the arguments
that every layer takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import mixing_layers
import own_layers as own
import sharing_layers as sharing
import special_layers
import state_layers
import storage_layers
import weight_layers
from case import Spec
from keras import layers as kl
from keras import ops

Made = dict[str, Any]
# Plain classes of Keras whose options are the arguments.
CLASSES = {
    "activity": kl.ActivityRegularization,
    "activation": kl.Activation,
    "add": kl.Add,
    "alpha_dropout": kl.AlphaDropout,
    "average_pooling_1d": kl.AveragePooling1D,
    "average_pooling_2d": kl.AveragePooling2D,
    "batch_norm": kl.BatchNormalization,
    "concatenate": kl.Concatenate,
    "conv_1d": kl.Conv1D,
    "conv_2d": kl.Conv2D,
    "dense": kl.Dense,
    "depthwise_conv_2d": kl.DepthwiseConv2D,
    "dropout": kl.Dropout,
    "embedding": kl.Embedding,
    "flatten": kl.Flatten,
    "gaussian_dropout": kl.GaussianDropout,
    "gaussian_noise": kl.GaussianNoise,
    "global_average_1d": kl.GlobalAveragePooling1D,
    "global_average_2d": kl.GlobalAveragePooling2D,
    "global_max_1d": kl.GlobalMaxPooling1D,
    "global_max_2d": kl.GlobalMaxPooling2D,
    "group_norm": kl.GroupNormalization,
    "gru": kl.GRU,
    "layer_norm": kl.LayerNormalization,
    "leaky_relu": kl.LeakyReLU,
    "lstm": kl.LSTM,
    "masking": kl.Masking,
    "max_pooling_1d": kl.MaxPooling1D,
    "max_pooling_2d": kl.MaxPooling2D,
    "multiply": kl.Multiply,
    "prelu": kl.PReLU,
    "rescaling": kl.Rescaling,
    "reshape": kl.Reshape,
    "rms_norm": kl.RMSNormalization,
    "separable_conv_1d": kl.SeparableConv1D,
    "simple_rnn": kl.SimpleRNN,
    "softmax": kl.Softmax,
    "spatial_dropout_1d": kl.SpatialDropout1D,
    "unit_norm": kl.UnitNormalization,
    "upsampling_1d": kl.UpSampling1D,
    "upsampling_2d": kl.UpSampling2D,
    "zero_padding_1d": kl.ZeroPadding1D,
    "branch": sharing.Branch,
    "choice": sharing.Choice,
    "combine": own.Combine,
    "counter": sharing.Counter,
    "fork": own.Fork,
    "from_complex": own.FromComplex,
    "join": own.Join,
    "noise": sharing.Noise,
    "penalty": own.Penalty,
    "rotate": own.Rotate,
    "self_attention": own.Attention,
    "to_complex": own.ToComplex,
    **mixing_layers.CLASSES,
    **special_layers.CLASSES,
    **state_layers.CLASSES,
    **storage_layers.CLASSES,
    **weight_layers.CLASSES,
}
KINDS: dict[str, Callable[..., Any]] = {**weight_layers.KINDS}
# Layers that cannot be read from a file: theirs is not all in their config.
WITHOUT_FILE = {
    "changed",
    "closure",
    "float8_dense",  # Keras changes the order of its weights
    "frozen_weight",
    "inner_of",
    "lambda",
    "near_dense",
    "noise_of_shared_seeds",
    "plus",
}
# Keras merges what was trained with the rest when it saves.
# Neither has a `tf.Variable` a place there.
WITHOUT_WEIGHTS = {"lora_dense", "resource"}


def make(layers: Sequence[Spec], frozen: Sequence[str] = ()) -> list[Any]:
    """New layers.

    Args:
        layers: What to make.
        frozen: Names of those that are set to `trainable=False` when all are
            made.
    """
    made: Made = {}
    found = [make_one(spec, made) for spec in layers]
    for name in frozen:
        made[name].trainable = False
    return found


def make_one(spec: Spec, made: Made) -> Any:
    """A new layer, or one of those made before."""
    return _make(spec.kind, spec.name, spec.options, made)


def _make(kind: str, name: str, options: dict[str, Any], made: Made) -> Any:
    options = dict(options)
    built = options.pop("built", None)
    common = {"name": name}
    if options.pop("frozen", False):
        common["trainable"] = False
    if kind in CLASSES:
        layer = CLASSES[kind](**options, **common)
    else:
        layer = KINDS[kind](made, common, **options)
    if built is not None:  # before the model is, for those that read it first
        layer.build(tuple(built))
    made.setdefault(name, layer)
    return layer


def _kind(function: Callable[..., Any]) -> Callable[..., Any]:
    KINDS[function.__name__.rstrip("_")] = function
    return function


def _inner(kind: str, name: str, made: Made, **options: Any) -> Any:
    """The one sublayer of a layer."""
    defaults: dict[str, dict[str, Any]] = {
        "dropout": {"rate": 0.4},
        "gaussian_noise": {"stddev": 0.1},
        "batch_norm": {"momentum": 0.8},
    }
    return _make(kind, name, {**defaults.get(kind, {}), **options}, made)


# -------------------------------------------------------- shared and tied ones
@_kind
def again(made: Made, common: Any, of: str) -> Any:
    """The same layer once more."""
    return made[of]


@_kind
def tied(made: Made, common: Any, of: str) -> Any:
    return sharing.Tied(made[of], **common)


KINDS["tied_inner"] = tied


@_kind
def logits(made: Made, common: Any, of: str) -> Any:
    return sharing.Logits(made[of], **common)


@_kind
def closure(made: Made, common: Any, of: str) -> Any:
    """Reads a kernel that may be that of a later layer."""

    def read(x: Any) -> Any:
        return ops.matmul(x, ops.transpose(made[of].kernel))

    return kl.Lambda(read, **common)


@_kind
def count_reader(made: Made, common: Any, of: str) -> Any:
    return sharing.CountReader(made[of], **common)


@_kind
def noise_of_shared_seeds(made: Made, common: Any) -> Any:
    generator = made.setdefault("seeds", keras.random.SeedGenerator(11))
    return sharing.Noise(seed_generator=generator, **common)


@_kind
def state_reader(made: Made, common: Any, of: str) -> Any:
    return state_layers.StateReader(made[of], **common)


# --------------------------------------------------------------------- storage
@_kind
def spare(made: Made, common: Any, units: int) -> Any:
    inner = _inner("dense", f"{common['name']}_inner", made, units=units)
    return storage_layers.Spare(inner, **common)


def _two(made: Made, common: Any, units: int) -> list[Any]:
    name = common["name"]
    return [
        _inner("dense", f"{name}_a", made, units=units, activation="tanh"),
        _inner("dense", f"{name}_b", made, units=units),
    ]


@_kind
def sized(made: Made, common: Any, units: int, **options: Any) -> Any:
    layers = _two(made, common, units)
    return storage_layers.Sized(*layers, **options, **common)


@_kind
def changed(made: Made, common: Any, units: int, phase: bool) -> Any:
    layers = _two(made, common, units)
    return storage_layers.Changed(*layers, phase, **common)


# ------------------------------------------------------------ layers of layers
@_kind
def fixed(made: Made, common: Any, inner: str, value: bool) -> Any:
    layer = _inner(inner, f"{common['name']}_inner", made)
    return own.Fixed(layer, value, **common)


@_kind
def hidden(made: Made, common: Any, inner: str) -> Any:
    return own.Hidden(_inner(inner, f"{common['name']}_inner", made), **common)


@_kind
def rematerialized(made: Made, common: Any, units: int) -> Any:
    name = f"{common['name']}_inner"
    return own.Rematerialized(
        _inner("dense", name, made, units=units), **common
    )


@_kind
def block(made: Made, common: Any, inner: str, units: int) -> Any:
    name = common["name"]
    return own.Block(
        _inner("layer_norm", f"{name}_norm", made),
        _inner(inner, f"{name}_inner", made),
        _inner("dense", f"{name}_dense", made, units=units),
        **common,
    )


@_kind
def step(made: Made, common: Any, units: int) -> Any:
    name = f"{common['name']}_inner"
    dense = _inner("dense", name, made, units=units, activation="tanh")
    return own.Step(dense, **common)


@_kind
def sequential(made: Made, common: Any, layers: list[dict[str, Any]]) -> Any:
    trainable = common.pop("trainable", True)
    found = [
        _make(spec["kind"], spec["name"], spec.get("options", {}), made)
        for spec in layers
    ]
    model = keras.Sequential(found, **common)
    if not trainable:
        model.trainable = False
    return model


@_kind
def functional(
    made: Made, common: Any, shape: list[int], inner: str, units: int
) -> Any:
    name, trainable = common["name"], common.pop("trainable", True)
    inputs = keras.Input(tuple(shape))
    h = _inner("dense", f"{name}_dense", made, units=units)(inputs)
    h = _inner(inner, f"{name}_inner", made)(h)
    model = keras.Model(inputs, kl.Add()([inputs, h]), **common)
    if not trainable:
        model.trainable = False
    return model


@_kind
def bidirectional(made: Made, common: Any, units: int) -> Any:
    layer = kl.LSTM(units, return_sequences=True, name=f"{common['name']}_one")
    return kl.Bidirectional(layer, **common)


@_kind
def time_distributed(made: Made, common: Any, units: int) -> Any:
    inner = _inner("dense", f"{common['name']}_inner", made, units=units)
    return kl.TimeDistributed(inner, **common)


@_kind
def spectral(made: Made, common: Any, units: int) -> Any:
    inner = _inner("dense", f"{common['name']}_inner", made, units=units)
    return kl.SpectralNormalization(inner, **common)


@_kind
def outputs(
    made: Made, common: Any, units: list[int], activation: str, named: bool
) -> Any:
    name = common["name"]
    return own.Outputs(
        _inner("dense", f"{name}_a", made, units=units[0]),
        _inner(
            "dense", f"{name}_b", made, units=units[1], activation=activation
        ),
        named,
        **common,
    )


LAMBDAS: dict[str, Callable[[Any], Any]] = {
    "double": lambda x: x * 2.0,
    "sine": lambda x: ops.sin(x),
    "centre": lambda x: x - ops.mean(x, axis=-1, keepdims=True),
    "softly": lambda x: ops.softmax(x, axis=-1) + x,
}


OPS = {
    "sine": ops.sin,
    "centre": LAMBDAS["centre"],
    "softly": LAMBDAS["softly"],
    "similarities": lambda x: ops.matmul(x, ops.transpose(x)),
}


@_kind
def op(made: Made, common: Any, which: str) -> Any:
    """Operations of a graph, without a layer."""
    return OPS[which]


@_kind
def lambda_(made: Made, common: Any, which: str) -> Any:
    return kl.Lambda(LAMBDAS[which], **common)
