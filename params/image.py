"""Image classification experiments."""

import dataclasses

import keras

from models import amoebanet
from params.experiment import Experiment
from params.optimizer import Optimizer
from params.registry import register


@dataclasses.dataclass(frozen=True)
class AmoebaNetD:
    """Parameters of `models.amoebanet.amoebanet_d`, described there."""

    num_layers: int = 18
    num_filters: int = 256
    num_classes: int = 1000
    stem_strides: int = 2
    stem_reductions: int = 2
    bn_momentum: float = 0.99

    def layers(self) -> list[keras.layers.Layer]:
        """Makes the layers."""
        return amoebanet.amoebanet_d(**dataclasses.asdict(self))


register(
    Experiment(
        name="image.amoebanet_d_demo",
        description="a small AmoebaNet-D on 12,000 images of clothing",
        model=AmoebaNetD(3, 32, 10, stem_reductions=0, bn_momentum=0.9),
        data="fashion_mnist_12k",
        optimizer=Optimizer("sgd", learning_rate=0.2),
        batch_size=80,
        epochs=2,
        num_partitions=2,
        num_micro_batches=4,
        expected_result="a test accuracy of 85% or more (measured: 86%)",
    )
)
