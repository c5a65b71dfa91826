"""Every family of `keras.applications`, without weights, on small images."""

from __future__ import annotations

import functools

import keras

from tools.zoo.sample import Sample, images

# The smallest of each family, and the least size that it takes, at least 32.
_SIZES = {
    "ConvNeXtTiny": 32,
    "DenseNet121": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "InceptionResNetV2": 75,
    "InceptionV3": 75,
    "MobileNet": 32,
    "MobileNetV2": 32,
    "MobileNetV3Small": 32,
    "NASNetMobile": 32,
    "ResNet50": 32,
    "ResNet50V2": 32,
    "VGG16": 32,
    "Xception": 71,
}
_WITHOUT_BATCH_NORM = {"ConvNeXtTiny", "VGG16"}


def _make(name: str, size: int) -> keras.Model:
    function = getattr(keras.applications, name)
    return function(weights=None, input_shape=(size, size, 3), classes=5)


SAMPLES = {
    name: Sample(
        functools.partial(_make, name, size),
        functools.partial(images, size),
        is_whole=name not in _WITHOUT_BATCH_NORM,
    )
    for name, size in _SIZES.items()
}
