"""Makes Keras layers of the plain data of a case.

A kind is a class whose options are its arguments; or one that holds other
layers, which its options say; or reads a layer that was made before.
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
import storage_layers as storage
import weight_layers
from case import Spec
from keras import layers as kl
from keras import ops

Made = dict[str, Any]
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
    **storage.CLASSES,
    **weight_layers.CLASSES,
}
INNER = {
    "dropout": {"rate": 0.4},
    "gaussian_noise": {"stddev": 0.1},
    "batch_norm": {"momentum": 0.8},
}


def dense(units: int, **options: Any) -> Any:
    return "dense", {"units": units, **options}


def two(units: int) -> Any:
    return [dense(units, activation="tanh"), dense(units)]


# Of options: the layers inside.
HOLDERS: dict[str, tuple[Any, Callable[..., list[Any]]]] = {
    "bidirectional": (
        kl.Bidirectional,
        lambda units: [("lstm", {"units": units, "return_sequences": True})],
    ),
    "block": (
        own.Block,
        lambda inner, units: ["layer_norm", inner, dense(units)],
    ),
    "changed": (storage.Changed, two),
    "fixed": (own.Fixed, lambda inner: [inner]),
    "hidden": (own.Hidden, lambda inner: [inner]),
    "outputs": (
        own.Outputs,
        lambda units, activation: [
            dense(units[0]),
            dense(units[1], activation=activation),
        ],
    ),
    "rematerialized": (own.Rematerialized, lambda units: [dense(units)]),
    "sized": (storage.Sized, two),
    "spare": (storage.Spare, lambda units: [dense(units)]),
    "spectral": (kl.SpectralNormalization, lambda units: [dense(units)]),
    "step": (own.Step, lambda units: [dense(units, activation="tanh")]),
    "time_distributed": (kl.TimeDistributed, lambda units: [dense(units)]),
}
# What they hold themselves.
KEPT = ("axis", "named", "phase", "size", "value")
# Made of the layer that they read.
READERS = {
    "count_reader": sharing.CountReader,
    "logits": sharing.Logits,
    "moments_reader": weight_layers.MomentsReader,
    "state_reader": state_layers.StateReader,
    "tied": sharing.Tied,
    "tied_inner": sharing.Tied,
}
LAMBDAS: dict[str, Callable[[Any], Any]] = {
    "double": lambda x: x * 2.0,
    "sine": ops.sin,
    "centre": lambda x: x - ops.mean(x, axis=-1, keepdims=True),
    "softly": lambda x: ops.softmax(x, axis=-1) + x,
}


def _closure(made: Made, common: Any, of: str) -> Any:
    """Reads a kernel that may be that of a later layer."""
    return kl.Lambda(
        lambda x: ops.matmul(x, ops.transpose(made[of].kernel)), **common
    )


def _noise_of_shared_seeds(made: Made, common: Any) -> Any:
    generator = made.setdefault("seeds", keras.random.SeedGenerator(11))
    return sharing.Noise(seed_generator=generator, **common)


def _sequential(made: Made, common: Any, layers: list[Any]) -> Any:
    trainable = common.pop("trainable", True)
    model = keras.Sequential(
        [make_one(Spec(**spec), made) for spec in layers], **common
    )
    if not trainable:
        model.trainable = False
    return model


def _plus(made: Made, common: Any, of: str) -> Any:
    """An operation with a variable as an argument."""
    bias = getattr(made[of], "layer", made[of]).bias
    return lambda x: ops.add(x, bias)


KINDS: dict[str, Callable[..., Any]] = {
    **weight_layers.KINDS,
    "again": lambda made, common, of: made[of],
    "closure": _closure,
    "inner_of": lambda made, common, of: made[of].layer,
    "lambda": lambda made, common, which: kl.Lambda(LAMBDAS[which], **common),
    "noise_of_shared_seeds": _noise_of_shared_seeds,
    # Operations of a graph, without a layer.
    "op": lambda made, common, which: LAMBDAS[which],
    "plus": _plus,
    "sequential": _sequential,
}
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
    """New layers, of which some are set to `trainable=False` at last."""
    made: Made = {}
    found = [make_one(spec, made) for spec in layers]
    for name in frozen:
        made[name].trainable = False
    return found


def make_one(spec: Spec, made: Made) -> Any:
    """A new layer, or one of those made before."""
    kind, options = spec.kind, dict(spec.options)
    built = options.pop("built", None)
    common = {"name": spec.name}
    if options.pop("frozen", False):
        common["trainable"] = False
    if kind in CLASSES:
        layer = CLASSES[kind](**options, **common)
    elif kind in READERS:
        layer = READERS[kind](made[options["of"]], **common)
    elif kind in HOLDERS:
        cls, inside = HOLDERS[kind]
        kept = {name: options.pop(name) for name in KEPT if name in options}
        inner = []
        for i, one in enumerate(inside(**options)):
            own_kind, given = (one, {}) if isinstance(one, str) else one
            given = {**INNER.get(own_kind, {}), **given}
            own_spec = Spec(f"{spec.name}_inner_{i}", own_kind, given)
            inner.append(make_one(own_spec, made))
        layer = cls(*inner, **kept, **common)
    else:
        layer = KINDS[kind](made, common, **options)
    if built is not None:  # before the model is, for those that read it first
        layer.build(tuple(built))
    made.setdefault(spec.name, layer)
    return layer
