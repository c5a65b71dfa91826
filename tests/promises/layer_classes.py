"""Layers that are made of options alone."""

from __future__ import annotations

import mixing_layers
import own_layers as own
import sharing_layers as sharing
import special_layers
import state_layers
import storage_layers
import weight_layers
from keras import layers as kl

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
