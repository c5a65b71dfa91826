"""A trained model for a new data set: all of it but the classifier."""

from collections.abc import Sequence

from keras import layers


def replace_classifier(
    trained: Sequence[layers.Layer], classifier: layers.Layer
) -> list[layers.Layer]:
    """Copies a trained model, with another last layer.

    Every layer but the last keeps its weights, the moving statistics of batch
    normalizations among them. They are copies: the trained model can still be
    used, and training the new one does not change it.

    Args:
        trained: The layers of a model, all built, at least two; such as
            `model.layers` of a `keras.Sequential`. The last of them is left
            out.
        classifier: What comes in its place, for example
            `models.amoebanet_layers.Classifier(num_classes)`. A new layer: it
            is built when the new model is, with initial weights.

    Returns:
        As many layers as `trained` has, the last of them `classifier`.

    Raises:
        ValueError: If a layer of `trained` is not built, or `classifier` is.

    Example:

    >>> import keras
    >>> trained = [layers.Dense(3), layers.Dense(10)]
    >>> model = keras.Sequential([keras.Input((4,)), *trained])
    >>> new = replace_classifier(trained, layers.Dense(2))
    >>> keras.Sequential([keras.Input((4,)), *new]).output_shape
    (None, 2)

    Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965),
    section 4
    """
    if len(trained) < 2:
        raise ValueError(
            "`trained` must be at least two layers: what is kept and the "
            f"classifier. Received: trained={list(trained)}."
        )
    unbuilt = [layer.name for layer in trained if not layer.built]
    if unbuilt:
        raise ValueError(
            "`trained` must be layers that are built, as trained ones are. "
            f"Received: layers without weights yet: {unbuilt}. "
            "Call the model on data first, or load its weights."
        )
    if classifier.built:
        raise ValueError(
            "`classifier` must be a new layer. Received: layer "
            f"'{classifier.name}', which has weights already. "
            "Make another one."
        )
    return [*(_copy(layer) for layer in trained[:-1]), classifier]


def _copy(layer: layers.Layer) -> layers.Layer:
    """Makes an equal layer, with equal weights of its own."""
    copy = type(layer).from_config(layer.get_config())
    copy.build_from_config(layer.get_build_config())
    copy.set_weights(layer.get_weights())
    return copy
