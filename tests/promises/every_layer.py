"""A small use of every layer of Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from beside_keras import ROWS, normal
from keras import layers as kl


class Use(NamedTuple):
    """How a layer is used."""

    make: Callable[[], Any]  # layers, or a functional model
    x: Any
    is_random: bool = False  # it draws, or takes moments of rows
    mixes: bool = False  # rows, otherwise
    dtype: str = "float64"  # for which Keras has it


LEFT_OUT = {
    "AugMix": "draws numbers of Python's once a trace",
    "Equalization": "Keras leaves it out of its models: its symbolic outputs "
    "are its inputs",
    "FlaxLayer": "of another library",
    "InputLayer": "computes nothing",
    "InputSpec": "is no layer",
    "JaxLayer": "of another library",
    "Layer": "computes nothing",
    "MaxNumBoundingBoxes": "takes a dictionary of boxes",
    "RandomElasticTransform": "changes one image where a trace is for any "
    "number of them",
    "TFSMLayer": "of a model in a file",
    "TorchModuleWrapper": "of another library",
    "Wrapper": "computes nothing",
}
USES: dict[str, Use] = {}
SEQUENCE = (6, 4)
SPATIAL = {1: (8, 3), 2: (8, 8, 3), 3: (6, 6, 6, 2)}


class Twice(kl.Layer):
    """Two tensors of one."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x):
        return [x, x * self.scale + 0.5]


def integers(limit, *shape):
    return np.random.default_rng(0).integers(0, limit, (ROWS, *shape))


def images():
    """Of which no number is a whole one, where some layers round down."""
    return integers(255, *SPATIAL[2]) + 0.5


def slopes():
    """Weights before a layer, which see its gradient."""
    return kl.PReLU("ones")


def add(
    name, x, *args, make=None, before=(slopes,), after=(), use=(), **kwargs
):
    """Notes the use of a layer that has others around it."""
    cls = getattr(kl, name.split("/")[0], None)
    if cls is None:
        return  # in another version of Keras

    def layers():
        made = make() if make else cls(*args, **kwargs)
        ends = [*(one() for one in after), kl.Flatten(), kl.Dense(1)]
        return [*(one() for one in before), made, *ends]

    USES[name] = Use(layers, x, **dict(use))


def add_model(name, call):
    """Notes the use of a layer by a functional model."""

    def model():
        x = keras.Input(SEQUENCE)
        h = call(kl.Dense(4)(x))
        return keras.Model(x, kl.Dense(1)(kl.Flatten()(h)))

    USES[name] = Use(model, normal(*SEQUENCE))


RANDOM, MIXES = ("is_random", True), ("mixes", True)
SINGLE = ("dtype", "float32")  # computed so, or for float32 alone
ROW = normal(*SEQUENCE)

# --------------------------------------------------------------------- of axes
for d, shape in SPATIAL.items():
    x = normal(*shape)
    wanting = [SINGLE] if d == 3 else []  # float64 on CPUs
    for kind in ("Average", "Max"):
        add(f"{kind}Pooling{d}D", x, 3, 2, "same", use=wanting)
        add(f"Adaptive{kind}Pooling{d}D", x, 3, use=wanting)
        add(f"Global{kind}Pooling{d}D", x)
    for name, arguments in (
        ("Conv{}D", (4, 3)),
        ("Conv{}DTranspose", (4, 3, 2)),
        ("Cropping{}D", (1,)),
        ("ZeroPadding{}D", (1,)),
        ("UpSampling{}D", (2,)),
        ("DepthwiseConv{}D", (3,)),
        ("SeparableConv{}D", (4, 3)),
    ):
        add(name.format(d), x, *arguments)
    add(f"SpatialDropout{d}D", x, 0.4, use=[RANDOM])
    add(f"ConvLSTM{d}D", normal(3, *(4,) * d, 2), 3, 3, padding="same")

# ------------------------------------------------------------ of one, of others
for name in ("AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise"):
    add(name, ROW, 0.3, use=[RANDOM])
for name, arguments in {
    "Activation": ("tanh",),
    "ActivityRegularization": (0.1,),
    "Dense": (3,),
    "ELU": (),
    "EinsumDense": ("abc,cd->abd", (6, 5), None, "d"),
    "Flatten": (),
    "GroupNormalization": (2,),
    "Identity": (),
    "Lambda": (lambda x: x * x,),
    "LayerNormalization": (),
    "LeakyReLU": (),
    "PReLU": (),
    "Permute": ((2, 1),),
    "RMSNormalization": (),
    "ReLU": (),
    "Rescaling": (0.5, 1),
    "Reshape": ((8, 3),),
    "Softmax": (),
    "UnitNormalization": (),
}.items():
    add(name, ROW, *arguments)
add("BatchNormalization", ROW, use=[RANDOM])
for name in (
    *("Add", "AdditiveAttention", "Attention", "Average", "Concatenate"),
    *("Maximum", "Minimum", "Multiply", "Subtract"),
):
    add(name, ROW, before=[slopes, Twice])
add("Dot", ROW, 2, before=[slopes, Twice])
add("Masking", ROW, after=[lambda: kl.LSTM(2)])
add("RepeatVector", normal(4), 3)
for name in ("SpectralNormalization", "TimeDistributed"):
    add(name, ROW, make=lambda name=name: getattr(kl, name)(kl.Dense(3)))
for name in ("Embedding", "ReversibleEmbedding"):
    add(name, integers(9, 6), 9, 4, before=[])
add_model("MultiHeadAttention", lambda h: kl.MultiHeadAttention(2, 3)(h, h))
add_model(
    "GroupedQueryAttention", lambda h: kl.GroupQueryAttention(3, 4, 2)(h, h)
)

# ------------------------------------------------------------------- recurrent
for name in ("GRU", "LSTM", "SimpleRNN"):
    cell = f"{name}Cell"
    dropped = {"dropout": 0.3, "recurrent_dropout": 0.2}
    add(name, ROW, 3)
    add(cell, ROW, make=lambda cell=cell: kl.RNN(getattr(kl, cell)(3)))
    add(f"{name}/dropout", ROW, 3, use=[RANDOM], **dropped)
    add(f"{name}/unrolled", ROW, 3, unroll=True, return_sequences=True)
for name, make in {
    "Bidirectional": lambda: kl.Bidirectional(kl.LSTM(3)),
    "RNN": lambda: kl.RNN(kl.GRUCell(3)),
    "StackedRNNCells": lambda: kl.RNN([kl.LSTMCell(3), kl.GRUCell(2)]),
}.items():
    add(name, ROW, make=make)


# --------------------------------------------------- texts, categories, signals
def embedding():
    return kl.Embedding(6, 3)


def adapted():
    layer = kl.Normalization()
    layer.adapt(3 * normal(4) + 1)
    return layer


LETTERS = ["a", "b", "c"]
TEXTS = tf.constant(
    [["a b c"], ["b c"], ["c c a b"], ["d"], ["a"], ["e b"], ["b b b"]]
)
LETTER = tf.constant([[word] for word in "abccdab"])
KNOWN = {"vocabulary": LETTERS}
WEIGHED = {"idf_weights": [0.1, 0.2, 0.3], "output_mode": "tf_idf"}
FRAMES = {"frame_length": 16, "frame_step": 8, "fft_length": 16}
LOOKED_UP = {"before": [], "after": [embedding]}
PLAIN = {"before": []}
ids = integers(9, 6)
add("CategoryEncoding/multi", ids, 9, **PLAIN)
add("CategoryEncoding", ids, 9, output_mode="count", **PLAIN)
add("Discretization", normal(6), [-1, 0, 1], **LOOKED_UP)
add("Hashing", integers(90, 6), 5, **LOOKED_UP)
add("IntegerLookup", integers(7, 6), vocabulary=[1, 3, 5], **LOOKED_UP)
add("StringLookup", LETTER, **KNOWN, **LOOKED_UP)
add("StringLookup/multi", LETTER, output_mode="multi_hot", **KNOWN, **PLAIN)
add("TextVectorization", TEXTS, output_sequence_length=3, **KNOWN, **LOOKED_UP)
add("TextVectorization/weights", TEXTS, **KNOWN, **WEIGHED, **PLAIN)
add(
    "TextVectorization/longest",
    TEXTS,
    before=[],
    after=[embedding, kl.GlobalAveragePooling1D],
    use=[MIXES],
    **KNOWN,
)
add("Normalization", normal(4), make=adapted, **PLAIN)
add("STFTSpectrogram", normal(64, 1), **FRAMES, **PLAIN)
add(
    "MelSpectrogram",
    normal(128).astype("float32"),
    fft_length=64,
    sequence_stride=16,
    num_mel_bins=8,
    sampling_rate=100,
    before=[],
    use=[MIXES, SINGLE],  # by the largest value of the batch
)


def crossing():
    inputs = {
        name: keras.Input((1,), dtype="int64", name=name)
        for name in LETTERS[:2]
    }
    h = kl.HashedCrossing(5)(tuple(inputs.values()))
    return keras.Model(inputs, kl.Dense(1)(kl.Flatten()(embedding()(h))))


USES["HashedCrossing"] = Use(
    crossing, {"a": integers(9, 1), "b": integers(5, 1)}
)


# ---------------------------------------------------------------------- images
def scaled():
    return kl.Rescaling(1 / 255)


FACTOR, SIZE = {"factor": 0.3}, {"height": 5, "width": 5}
JITTER = ("brightness", "contrast", "saturation", "hue")
for name, options, *use in (
    ("AutoContrast", {}),
    ("CenterCrop", SIZE),
    ("ContrastLimitedAdaptiveHistogramEqualization", {}),
    ("Resizing", SIZE),
    ("CutMix", {}, RANDOM, MIXES),
    ("MixUp", {}, RANDOM, MIXES),
    ("RandAugment", {}, RANDOM, SINGLE, MIXES),
    ("RandomBrightness", FACTOR, RANDOM),
    ("RandomColorDegeneration", FACTOR, RANDOM),
    (
        "RandomColorJitter",
        {f"{kind}_factor": 0.3 for kind in JITTER},
        RANDOM,
        SINGLE,
    ),
    ("RandomContrast", FACTOR, RANDOM),
    ("RandomErasing", {}, RANDOM),
    ("RandomFlip", {}, RANDOM),
    ("RandomGaussianBlur", {}, RANDOM),
    ("RandomGrayscale", {}, RANDOM),
    ("RandomHue", FACTOR, RANDOM, SINGLE),
    ("RandomInvert", {}, RANDOM),
    ("RandomPerspective", {}, RANDOM),
    ("RandomPosterization", {"factor": 3}, RANDOM),
    ("RandomRotation", FACTOR, RANDOM, SINGLE),
    ("RandomSaturation", FACTOR, RANDOM),
    ("RandomSharpness", FACTOR, RANDOM),
    ("RandomShear", {"x_factor": 0.2}, RANDOM),
    (
        "RandomTranslation",
        {"height_factor": 0.2, "width_factor": 0.2},
        RANDOM,
    ),
    ("RandomZoom", {"height_factor": 0.2}, RANDOM),
    (
        "Solarization",
        {"addition_factor": 0.3, "threshold_factor": 0.3},
        RANDOM,
    ),
):
    add(name, images(), before=[], after=[scaled], use=use, **options)
add(
    "RandomCrop",  # in inference, of another size
    images(),
    5,
    5,
    before=[],
    after=[kl.GlobalAveragePooling2D, scaled],
    use=[RANDOM],
)
add(
    "Pipeline",
    images(),
    make=lambda: kl.Pipeline([kl.Rescaling(0.1), kl.RandomFlip()]),
    before=[],
    after=[scaled],
    use=[RANDOM],
)
