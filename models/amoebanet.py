"""AmoebaNet-D (L, F), the image classifier of the GPipe paper, as a list.

Every item of the list is one Keras layer; the layers know nothing of
pipelines and can be called one after the other:

>>> import keras
>>> from models import amoebanet
>>> x = keras.ops.zeros((2, 64, 64, 3))
>>> for layer in amoebanet.amoebanet_d(3, 16, num_classes=5):
...     x = layer(x)
>>> x.shape
TensorShape([2, 5])

What goes from one layer to the next is a pair of tensors `(h, h_prev)`: the
output of the previous cell and that of the one before. "Cell" here is the
paper's word for a block of the architecture, not a partition of a pipeline.

Images are channels-last. Wherever a stride does not divide the image, "same"
padding rounds the size up. All convolutions are without bias, and each stands
between a ReLU and a batch normalization.

References:

- [Real et al., 2019](https://arxiv.org/abs/1802.01548), figure 2 (the cells)
- [Huang et al., 2019](https://arxiv.org/abs/1811.06965), section 4 and table 1
"""

from keras import layers

from models.amoebanet_layers import AmoebaNetCell, Classifier, StemConv


def amoebanet_d(
    num_layers: int = 18,
    num_filters: int = 256,
    num_classes: int = 1000,
    *,
    stem_strides: int = 2,
    stem_reductions: int = 2,
    bn_momentum: float = 0.99,
    classifier_activation: str | None = "softmax",
) -> list[layers.Layer]:
    """Makes AmoebaNet-D (`num_layers`, `num_filters`).

    The channels inside a cell start at `num_filters / 4`; every reduction
    cell doubles them and halves the image's height and width.

    Args:
        num_layers: L, the number of normal cells. A positive multiple of 3:
            two reduction cells part them into three equal runs.
        num_filters: F. A positive multiple of 8, or of 16 without
            `stem_reductions` (a bottleneck has a quarter of the channels).
        num_classes: Classes to tell apart. Positive.
        stem_strides: Stride of the first convolution, 1 or 2.
        stem_reductions: Reduction cells before the first normal cell; 0 or
            more. The defaults are the ImageNet stem, which makes height and
            width 8 times smaller. For images of about 32 x 32, NASNet's
            CIFAR stem has stride 1 and no reduction cells; stride 2 without
            reduction cells needs a quarter of its work.
        bn_momentum: Share of the old value in a batch normalization's moving
            statistics after one step, from 0 to 1. Runs of a few hundred
            steps need less than Keras's 0.99.
        classifier_activation: Activation of the last layer; `None` for
            logits.

    Returns:
        The layers, in order. The first takes images of shape
        (batch, height, width, channels), any number of channels; the last
        returns (batch, num_classes).

    Raises:
        ValueError: If an argument is outside of its range; all of them are
            named at once.
    """
    _check_arguments(
        num_layers,
        num_filters,
        num_classes,
        stem_strides,
        stem_reductions,
        bn_momentum,
    )
    channels = num_filters // 4
    model: list[layers.Layer] = [
        StemConv(channels, stem_strides, bn_momentum, name="stem_conv")
    ]
    after_reduction = False

    def add_cell(name: str, reduction: bool) -> None:
        nonlocal channels, after_reduction
        channels *= 2 if reduction else 1
        model.append(
            AmoebaNetCell(
                channels, reduction, after_reduction, bn_momentum, name=name
            )
        )
        after_reduction = reduction

    for i in range(stem_reductions):
        add_cell(f"stem_reduction_{i + 1}", reduction=True)
    for i in range(num_layers):
        if i and i % (num_layers // 3) == 0:
            add_cell(f"reduction_{3 * i // num_layers}", reduction=True)
        add_cell(f"normal_{i + 1}", reduction=False)
    model.append(
        Classifier(num_classes, classifier_activation, name="classifier")
    )
    return model


def _check_arguments(
    num_layers: int,
    num_filters: int,
    num_classes: int,
    stem_strides: int,
    stem_reductions: int,
    bn_momentum: float,
) -> None:
    problems = []
    if num_layers < 3 or num_layers % 3:
        problems.append(
            "`num_layers` must be a positive multiple of 3. "
            f"Received: {num_layers=}."
        )
    if stem_strides not in (1, 2):
        problems.append(
            f"`stem_strides` must be 1 or 2. Received: {stem_strides=}."
        )
    if stem_reductions < 0:
        problems.append(
            "`stem_reductions` must not be negative. "
            f"Received: {stem_reductions=}."
        )
    multiple = 8 if stem_reductions else 16
    if num_filters < multiple or num_filters % multiple:
        problems.append(
            f"`num_filters` must be a positive multiple of {multiple} with "
            f"{stem_reductions=}. Received: {num_filters=}."
        )
    if num_classes < 1:
        problems.append(
            f"`num_classes` must be positive. Received: {num_classes=}."
        )
    if not 0 <= bn_momentum <= 1:
        problems.append(
            f"`bn_momentum` must be from 0 to 1. Received: {bn_momentum=}."
        )
    if problems:
        raise ValueError("\n".join(problems))
