"""Language model experiments.

Those of the paper at full size have random tokens, which do for speed and
memory; their small twins have Jane Austen's novels.
"""

import dataclasses

import keras

from models import transformer_lm
from params.experiment import Experiment
from params.optimizer import Optimizer
from params.random_data import RandomTokens
from params.registry import register
from params.task import LanguageModel
from params.text import Text


@dataclasses.dataclass(frozen=True)
class TransformerLM:
    """Parameters of `models.transformer_lm.transformer_lm`, described there."""

    num_layers: int
    model_dim: int = 2048
    hidden_dim: int = 8192
    num_heads: int = 32
    vocab_size: int = 32000
    max_length: int = 1024
    head_dim: int | None = None
    dropout: float = 0.0
    logit_limit: float | None = None
    feed_forward_scale: float | None = None

    def layers(self) -> list[keras.layers.Layer]:
        """Makes the layers."""
        return transformer_lm.transformer_lm(**dataclasses.asdict(self))


_AUSTEN = Experiment(
    name="lm.austen",
    description="a Transformer on Jane Austen's six novels",
    model=TransformerLM(
        num_layers=4,
        model_dim=256,
        hidden_dim=1024,
        num_heads=4,
        vocab_size=4000,
        max_length=128,
        dropout=0.2,
    ),
    data=Text("austen", vocab_size=4000, length=128),
    task=LanguageModel(),
    optimizer=Optimizer("adam", learning_rate=1e-3, beta_2=0.98, clip_norm=1.0),
    batch_size=32,
    epochs=6,
    num_partitions=2,
    num_micro_batches=4,
    expected_result="a perplexity of 227 a word, where a 5-gram "
    "Kneser-Ney model has 262",
)
register(_AUSTEN)
register(
    dataclasses.replace(
        _AUSTEN,
        name="lm.austen_demo",
        description="a smaller one, trained for a minute",
        model=TransformerLM(
            num_layers=4,
            model_dim=256,
            hidden_dim=1024,
            num_heads=4,
            vocab_size=1000,
            max_length=64,
        ),
        data=Text("austen", vocab_size=1000, length=64),
        optimizer=Optimizer("adam", learning_rate=3e-3, clip_norm=1.0),
        batch_size=64,
        num_micro_batches=8,
        remat="never",
        expected_result="a loss of about 5.6 after 30 steps",
    )
)

# ------------------------------------------- the paper's tables and their twins
_ADAM = Optimizer("adam", learning_rate=3e-4, clip_norm=1.0)


def _register_paper(
    num_layers: int,
    small_layers: int,
    num_partitions: int,
    where: str,
    *,
    num_micro_batches: int = 32,
    remat: str = "except_last",
) -> None:
    """Registers a Transformer-L of the paper, and its small twin."""
    name = f"lm.transformer_{num_layers}"
    full = Experiment(
        name=name,
        description=f"Transformer-{num_layers} of {where.split(':')[0]}",
        model=TransformerLM(num_layers),
        data=RandomTokens(length=1024, vocab_size=32000),
        task=LanguageModel(),
        optimizer=_ADAM,
        batch_size=32,
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
            description=f"a small twin of Transformer-{num_layers}",
            model=TransformerLM(
                small_layers, 64, 256, 4, vocab_size=1000, max_length=64
            ),
            data=Text("austen", vocab_size=1000, length=64),
            optimizer=dataclasses.replace(_ADAM, learning_rate=2e-3),
            num_partitions=min(num_partitions, 8),
            num_micro_batches=min(num_micro_batches, 4),
            expected_result="a perplexity far below 1000 a token (chance)",
        )
    )


_register_paper(
    3,
    1,
    1,
    "table 1: 282.2M parameters, the largest without a pipeline",
    num_micro_batches=1,
    remat="never",
)
_register_paper(13, 2, 1, "table 1: 785.8M parameters on 1 accelerator")
_register_paper(103, 8, 8, "table 1: 5.3B parameters on 8")
_register_paper(415, 10, 32, "table 1: 21.0B parameters on 32")
_register_paper(1663, 12, 128, "table 1: 83.9B parameters on 128")
_register_paper(
    48, 6, 8, "table 2: 6.3 times the throughput of K=2, M=1 with K=8, M=32"
)
_register_paper(
    24, 6, 8, "table 3: 3.3 times the throughput of K=2, without fast links"
)
