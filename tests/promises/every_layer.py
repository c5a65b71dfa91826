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
    """How a layer is used.

    Attributes:
        make: Returns layers, or a functional model.
        x: Inputs.
        is_random: Whether it draws random numbers, or takes moments of rows.
        mixes: Whether it mixes rows otherwise.
        dtype: For which Keras has it.
    """

    make: Callable[[], Any]
    x: Any
    is_random: bool = False
    mixes: bool = False
    dtype: str = "float64"


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


def named(name, *args, **options):
    return lambda: getattr(kl, name)(*args, **options)


def add(name, make, x, before=(), after=(), **options):
    """Notes the use of a layer that has others around it.

    Args:
        name: Of its class; what follows a slash tells uses apart.
        make: Returns it.
        x: Inputs.
        before: What makes the layers before it.
        after: The same of those after it.
        **options: See `Use`.
    """
    if not hasattr(kl, name.split("/")[0]):
        return  # in another version of Keras

    def layers():
        return [
            *(one() for one in before),
            make(),
            *(one() for one in after),
            kl.Flatten(),
            kl.Dense(1),
        ]

    USES[name] = Use(layers, x, **options)


def add_model(name, call, **options):
    """Notes the use of a layer by a functional model."""

    def model():
        x = keras.Input(SEQUENCE)
        h = call(kl.Dense(4)(x))
        return keras.Model(x, kl.Dense(1)(kl.Flatten()(h)))

    USES[name] = Use(model, normal(*SEQUENCE), **options)


def slopes():
    """Weights before a layer, which see its gradient."""
    return kl.PReLU("ones")


# --------------------------------------------------------------------- of axes
for d, shape in SPATIAL.items():
    x = normal(*shape)
    wanting = {"dtype": "float32"} if d == 3 else {}  # float64 on CPUs
    for kind in ("Average", "Max"):
        for name, arguments, options in (
            (f"{kind}Pooling{d}D", (3, 2, "same"), wanting),
            (f"Adaptive{kind}Pooling{d}D", (3,), wanting),
            (f"Global{kind}Pooling{d}D", (), {}),
        ):
            add(name, named(name, *arguments), x, [slopes], **options)
    for name, arguments in (
        ("Conv{}D", (4, 3)),
        ("Conv{}DTranspose", (4, 3, 2)),
        ("Cropping{}D", (1,)),
        ("ZeroPadding{}D", (1,)),
        ("UpSampling{}D", (2,)),
        ("DepthwiseConv{}D", (3,)),
        ("SeparableConv{}D", (4, 3)),
    ):
        name = name.format(d)
        add(name, named(name, *arguments), x, [slopes])
    name = f"SpatialDropout{d}D"
    add(name, named(name, 0.4), x, [slopes], is_random=True)
    name = f"ConvLSTM{d}D"
    frames = normal(3, *(4,) * d, 2)
    add(name, named(name, 3, 3, padding="same"), frames, [slopes])

# ------------------------------------------------------------ of one, of others
for name in ("AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise"):
    add(name, named(name, 0.3), normal(*SEQUENCE), [slopes], is_random=True)
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
    add(name, named(name, *arguments), normal(*SEQUENCE), [slopes])
add(
    "BatchNormalization",
    kl.BatchNormalization,
    normal(*SEQUENCE),
    [slopes],
    is_random=True,
)
for name in (
    "Add",
    "AdditiveAttention",
    "Attention",
    "Average",
    "Concatenate",
    "Maximum",
    "Minimum",
    "Multiply",
    "Subtract",
):
    add(name, named(name), normal(*SEQUENCE), [slopes, Twice])
add("Dot", lambda: kl.Dot(2), normal(*SEQUENCE), [slopes, Twice])
add("Masking", kl.Masking, normal(*SEQUENCE), [slopes], [lambda: kl.LSTM(2)])
add("RepeatVector", lambda: kl.RepeatVector(3), normal(4), [slopes])
for name in ("SpectralNormalization", "TimeDistributed"):
    make = lambda name=name: getattr(kl, name)(kl.Dense(3))  # noqa: E731
    add(name, make, normal(*SEQUENCE), [slopes])
for name in ("Embedding", "ReversibleEmbedding"):
    add(name, named(name, 9, 4), integers(9, 6))
add_model(
    "MultiHeadAttention",
    lambda h: kl.MultiHeadAttention(2, 3, name="own")(h, h),
)
add_model(
    "GroupedQueryAttention",
    lambda h: kl.GroupQueryAttention(3, 4, 2, name="own")(h, h),
)

# ------------------------------------------------------------------- recurrent
for name in ("GRU", "LSTM", "SimpleRNN"):
    cell = f"{name}Cell"
    make = lambda cell=cell: kl.RNN(getattr(kl, cell)(3))  # noqa: E731
    add(name, named(name, 3), normal(*SEQUENCE), [slopes])
    add(cell, make, normal(*SEQUENCE), [slopes])
    add(
        f"{name}/dropout",
        named(name, 3, dropout=0.3, recurrent_dropout=0.2),
        normal(*SEQUENCE),
        [slopes],
        is_random=True,
    )
    add(
        f"{name}/unrolled",
        named(name, 3, unroll=True, return_sequences=True),
        normal(*SEQUENCE),
        [slopes],
    )
for name, make in {
    "Bidirectional": lambda: kl.Bidirectional(kl.LSTM(3)),
    "RNN": lambda: kl.RNN(kl.GRUCell(3)),
    "StackedRNNCells": lambda: kl.RNN([kl.LSTMCell(3), kl.GRUCell(2)]),
}.items():
    add(name, make, normal(*SEQUENCE), [slopes])


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
WORDS = tf.constant([[word] for word in "abccdab"])
for name, make, x, after in (
    (
        "CategoryEncoding/multi",
        named("CategoryEncoding", 9),
        integers(9, 6),
        [],
    ),
    (
        "CategoryEncoding",
        named("CategoryEncoding", 9, output_mode="count"),
        integers(9, 6),
        [],
    ),
    (
        "Discretization",
        named("Discretization", [-1, 0, 1]),
        normal(6),
        [embedding],
    ),
    ("Hashing", named("Hashing", 5), integers(90, 6), [embedding]),
    (
        "IntegerLookup",
        named("IntegerLookup", vocabulary=[1, 3, 5]),
        integers(7, 6),
        [embedding],
    ),
    (
        "StringLookup",
        named("StringLookup", vocabulary=LETTERS),
        WORDS,
        [embedding],
    ),
    (
        "StringLookup/multi",
        named("StringLookup", vocabulary=LETTERS, output_mode="multi_hot"),
        WORDS,
        [],
    ),
    (
        "TextVectorization",
        named(
            "TextVectorization", vocabulary=LETTERS, output_sequence_length=3
        ),
        TEXTS,
        [embedding],
    ),
    (
        "TextVectorization/weights",
        named(
            "TextVectorization",
            vocabulary=LETTERS,
            idf_weights=[0.1, 0.2, 0.3],
            output_mode="tf_idf",
        ),
        TEXTS,
        [],
    ),
    ("Normalization", adapted, normal(4), []),
    (
        "STFTSpectrogram",
        named("STFTSpectrogram", frame_length=16, frame_step=8, fft_length=16),
        normal(64, 1),
        [],
    ),
):
    add(name, make, x, after=after)
add(
    "TextVectorization/longest",
    named("TextVectorization", vocabulary=LETTERS),
    TEXTS,
    after=[embedding, kl.GlobalAveragePooling1D],
    mixes=True,
)
add(
    "MelSpectrogram",
    named(
        "MelSpectrogram",
        fft_length=64,
        sequence_stride=16,
        num_mel_bins=8,
        sampling_rate=100,
    ),
    normal(128).astype("float32"),
    mixes=True,  # by the largest value of the batch
    dtype="float32",
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
def add_image(name, make, after=(), **options):
    """Notes the use of a layer of images, whose numbers are scaled."""
    add(name, make, images(), after=[*after, scaled], **options)


def scaled():
    return kl.Rescaling(1 / 255)


for name, options in {
    "AutoContrast": {},
    "CenterCrop": {"height": 5, "width": 5},
    "ContrastLimitedAdaptiveHistogramEqualization": {},
    "Resizing": {"height": 5, "width": 5},
}.items():
    add_image(name, named(name, **options))
FACTOR = {"factor": 0.3}
SINGLE = {"dtype": "float32"}  # computed so, or for float32 alone
for name, options, more in (
    ("CutMix", {}, {"mixes": True}),
    ("MixUp", {}, {"mixes": True}),
    ("RandAugment", {}, {**SINGLE, "mixes": True}),
    ("RandomBrightness", FACTOR, {}),
    ("RandomColorDegeneration", FACTOR, {}),
    (
        "RandomColorJitter",
        {
            f"{kind}_factor": 0.3
            for kind in ("brightness", "contrast", "saturation", "hue")
        },
        SINGLE,
    ),
    ("RandomContrast", FACTOR, {}),
    ("RandomErasing", {}, {}),
    ("RandomFlip", {}, {}),
    ("RandomGaussianBlur", {}, {}),
    ("RandomGrayscale", {}, {}),
    ("RandomHue", FACTOR, SINGLE),
    ("RandomInvert", {}, {}),
    ("RandomPerspective", {}, {}),
    ("RandomPosterization", {"factor": 3}, {}),
    ("RandomRotation", FACTOR, SINGLE),
    ("RandomSaturation", FACTOR, {}),
    ("RandomSharpness", FACTOR, {}),
    ("RandomShear", {"x_factor": 0.2}, {}),
    ("RandomTranslation", {"height_factor": 0.2, "width_factor": 0.2}, {}),
    ("RandomZoom", {"height_factor": 0.2}, {}),
    ("Solarization", {"addition_factor": 0.3, "threshold_factor": 0.3}, {}),
):
    add_image(name, named(name, **options), is_random=True, **more)
add_image(
    "RandomCrop",  # in inference, of another size
    named("RandomCrop", 5, 5),
    [kl.GlobalAveragePooling2D],
    is_random=True,
)
add_image(
    "Pipeline",
    lambda: kl.Pipeline([kl.Rescaling(0.1), kl.RandomFlip()]),
    is_random=True,
)
