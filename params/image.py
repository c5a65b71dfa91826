"""Image classification experiments.

Those of the paper at full size have random images of ImageNet's size, which do
for speed and memory; their small twins have images of clothing.
"""

import dataclasses

import keras

from models import amoebanet
from params.experiment import Experiment
from params.images import Images
from params.optimizer import Optimizer
from params.random_data import RandomImages
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
        data=Images("fashion_mnist_12k"),
        optimizer=Optimizer("sgd", learning_rate=0.2),
        batch_size=80,
        epochs=2,
        num_partitions=2,
        num_micro_batches=4,
        evaluation_batch_size=500,
        expected_result="a test accuracy of 85% or more (measured: 86%)",
    )
)
register(
    Experiment(
        name="image.amoebanet_d_fashion",
        description="AmoebaNet-D on 12,000 images of clothing, to a good end",
        model=AmoebaNetD(3, 32, 10, stem_reductions=0, bn_momentum=0.9),
        data=Images("fashion_mnist_12k", flip=True, cutout=8),
        optimizer=Optimizer("sgd", learning_rate=0.2, weight_decay=1e-4),
        batch_size=80,
        epochs=40,
        num_partitions=2,
        num_micro_batches=2,
        evaluation_batch_size=500,
        expected_result="a test accuracy of 90.7%; plain Keras, 89.9%",
    )
)

# ------------------------------------------- the paper's tables and their twins
_RMSPROP = Optimizer("rmsprop", learning_rate=0.045, epsilon=1.0)
_SMALL_RMSPROP = Optimizer("rmsprop", learning_rate=1e-3, epsilon=1e-3)


def _register_paper(
    model: AmoebaNetD,
    small: tuple[int, int],
    num_partitions: int,
    where: str,
    *,
    num_micro_batches: int = 32,
    remat: str = "except_last",
    size: int = 224,
) -> None:
    """Registers a model of the paper, and its small twin."""
    label = f"({model.num_layers}, {model.num_filters})"
    name = f"image.amoebanet_d_{model.num_layers}_{model.num_filters}"
    full = Experiment(
        name=name,
        description=f"AmoebaNet-D {label} of {where.split(':')[0]}",
        model=model,
        data=RandomImages(size, model.num_classes),
        optimizer=_RMSPROP,
        batch_size=128,
        epochs=1,
        num_partitions=num_partitions,
        num_micro_batches=num_micro_batches,
        remat=remat,
        expected_result=f"in the paper, {where}",
    )
    register(full)
    register(
        dataclasses.replace(
            full,
            name=f"{name}_small",
            description=f"a small twin of AmoebaNet-D {label}",
            model=AmoebaNetD(*small, 10, stem_reductions=0, bn_momentum=0.9),
            data=Images("fashion_mnist_12k"),
            optimizer=_SMALL_RMSPROP,
            batch_size=80,
            num_micro_batches=min(num_micro_batches, 4),
            evaluation_batch_size=500,
            expected_result="far more than 10% of the test images (chance)",
        )
    )


_register_paper(
    AmoebaNetD(18, 208),
    (3, 16),
    1,
    "table 1: 82M parameters, the largest without a pipeline",
    num_micro_batches=1,
    remat="never",
)
_register_paper(
    AmoebaNetD(18, 416), (3, 32), 1, "table 1: 318M parameters on 1 accelerator"
)
_register_paper(
    AmoebaNetD(18, 544), (3, 48), 2, "table 1: 542M parameters on 2"
)
_register_paper(
    AmoebaNetD(36, 544), (6, 48), 4, "table 1: 1.05B parameters on 4"
)
_register_paper(
    AmoebaNetD(72, 512), (12, 32), 8, "table 1: 1.8B parameters on 8"
)
_register_paper(
    AmoebaNetD(18, 256),
    (6, 16),
    8,
    "table 2: 3.48 times the throughput of K=2, M=1",
)
_register_paper(
    AmoebaNetD(18, 128),
    (6, 32),
    8,
    "table 3: 2.7 times the throughput of K=2, without fast links",
)
_register_paper(
    AmoebaNetD(18, 512),
    (3, 64),
    4,
    "table 4: 84.4% top-1 accuracy on ImageNet at 480 x 480",
    size=480,
)

# ------------------------------------------------------------------- transfer
_KNOWN = (0, 1, 2, 3, 5, 7, 8, 9)
_NEW = (4, 6)  # coat and shirt, which are hard to tell apart

register(
    Experiment(
        name="image.transfer_pretrain",
        description="AmoebaNet-D on eight of ten classes of clothing",
        model=AmoebaNetD(
            3, 32, len(_KNOWN), stem_reductions=0, bn_momentum=0.9
        ),
        data=Images("fashion_mnist_12k", classes=_KNOWN, flip=True),
        optimizer=Optimizer("sgd", learning_rate=0.2),
        batch_size=80,
        epochs=6,
        num_partitions=2,
        num_micro_batches=2,
        evaluation_batch_size=500,
    )
)
_few = Experiment(
    name="image.transfer_scratch",
    description="the other two classes from 20 examples each, from scratch",
    model=AmoebaNetD(3, 32, len(_NEW), stem_reductions=0, bn_momentum=0.9),
    data=Images("fashion_mnist_12k", classes=_NEW, per_class=20, flip=True),
    optimizer=Optimizer("sgd", learning_rate=0.02),
    batch_size=20,
    epochs=50,
    num_partitions=2,
    num_micro_batches=1,
    evaluation_batch_size=500,
    expected_result="a mean accuracy of 65%, where image.transfer_finetune has "
    "76%; five runs with --seed and --set=data.subset_seed from 0 to 4",
)
register(_few)
register(
    dataclasses.replace(
        _few,
        name="image.transfer_finetune",
        description="the other two classes from 20 examples each, fine-tuned",
        starts_from="image.transfer_pretrain",
        expected_result="a mean accuracy of 76%, where image.transfer_scratch "
        "has 65%; five runs with --seed and --set=data.subset_seed from 0 to 4",
    )
)
