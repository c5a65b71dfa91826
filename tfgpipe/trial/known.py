"""Keras's layers of which it is known what a trial would say.

Both tables are checked by trying each layer, for every version of TensorFlow
and Keras that is supported.
"""

from __future__ import annotations

from typing import Any

import keras

from tfgpipe import internals

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


def _is_of(layer: keras.layers.Layer, names: frozenset[str]) -> bool:
    cls = type(layer)
    in_layers = getattr(keras.layers, cls.__name__, None) is cls
    return cls.__name__ in names and (in_layers or cls is keras.Sequential)


def _is_plain(layer: keras.layers.Layer) -> bool:
    """Whether nothing in its arguments is a user's, or takes the rows' axis."""
    own = vars(layer)
    # What a batch normalisation finds by itself are all but its channels'.
    names = [name for name in own if name.endswith(("axis", "axes"))]
    axes = [own[name] for name in names if name != "_reduction_axes"]
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
    cells = [own[name] for name in ("cell", "cells") if name in own]
    if not all(
        isinstance(cell, keras.layers.Layer)
        for cell in keras.tree.flatten(cells)
    ):
        return False  # a plain object, of which nothing is known
    return all(
        _is_known(name, value)
        for name, value in own.items()
        if callable(value) and not isinstance(value, keras.layers.Layer)
        if "activation" in name
        or "regularizer" in name
        or hasattr(type(layer), name)
    )


def _is_known(name: str, function: Any) -> bool:
    """Whether what a layer calls is one of Keras's that treat rows alike."""
    if name == "activity_regularizer":
        return type(function) in _SUMS
    if name.endswith("regularizer"):  # of weights
        return True
    if "activation" not in name:  # a method
        return internals.is_keras(function)
    own = getattr(keras.activations, getattr(function, "__name__", ""), None)
    return own is function


def _keeps_rows(equation: str) -> bool:
    """Whether the first axis that goes in comes out first alone."""
    given, made = equation.replace(" ", "").split("->")
    taken, weights = given.split(",")
    if made[:1] != taken[:1]:
        return False
    row = taken[0]
    return row == "." or (taken.count(row) == 1 and row not in weights)
