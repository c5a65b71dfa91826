"""Translation experiments.

Those of the paper at full size have random tokens, which do for speed and
memory; the small ones have interface strings in 102 languages and English.
"""

import dataclasses

import keras

from models import translation
from params.experiment import Experiment
from params.optimizer import Optimizer
from params.pairs import Pairs
from params.random_data import RandomPairs
from params.registry import register
from params.task import Translation as TranslationTask


@dataclasses.dataclass(frozen=True)
class Translation:
    """Parameters of `models.translation.translation`, described there."""

    num_layers: int
    model_dim: int = 1024
    hidden_dim: int = 8192
    num_heads: int = 16
    vocab_size: int = 64000
    head_dim: int = 64
    max_length: int = 64
    dropout: float = 0.0
    logit_limit: float | None = None
    feed_forward_scale: float | None = None

    def layers(self) -> list[keras.layers.Layer]:
        """Makes the layers."""
        return translation.translation(**dataclasses.asdict(self))


_ADAFACTOR = Optimizer(
    "adafactor", learning_rate=0.03, decay="inverse_sqrt", clip_norm=1.0
)
_ADAM = Optimizer("adam", learning_rate=2e-3, beta_2=0.98, clip_norm=1.0)
_LOGIT_LIMIT = 30.0

# ------------------------------------------------ 102 languages, three shapes
_SHAPES = {
    # name: (layers of each stack, feed-forward dimension, heads)
    "shallow": (2, 512, 4),
    "deep": (8, 512, 4),
    "wide": (4, 1024, 8),  # as many parameters as the deep one
}
_CHRF = {"shallow": 19.8, "deep": 15.7, "wide": 16.2}  # see docs/results.md
_VOCAB_SIZE = 8000
_NUM_PAIRS = 200_000  # of 687,000: what two cores get through in 45 minutes
# In this vocabulary, English takes half of the tokens of other languages.
_WIDTHS = (8, 16, 32, 64, 64)
_TARGET_WIDTHS = (8, 8, 16, 32, 64)


def _register_real(
    name: str,
    description: str,
    shape: tuple[int, int, int],
    data: Pairs,
    epochs: int,
    dropout: float,
    expected_result: str,
) -> None:
    """Registers a model on real strings, for two cells."""
    num_layers, hidden_dim, num_heads = shape
    register(
        Experiment(
            name=name,
            description=description,
            model=Translation(
                num_layers,
                model_dim=128,
                hidden_dim=hidden_dim,
                num_heads=num_heads,
                vocab_size=data.vocab_size,
                head_dim=32,
                dropout=dropout,
                logit_limit=_LOGIT_LIMIT,
            ),
            data=data,
            task=TranslationTask(label_smoothing=0.1),
            optimizer=_ADAM,
            batch_size=2048,
            epochs=epochs,
            num_partitions=2,
            num_micro_batches=4,
            remat="never",  # two cores have the memory, and not the time
            expected_result=expected_result,
        )
    )


for _name, _shape in _SHAPES.items():
    _register_real(
        f"mt.multilingual_{_name}",
        f"102 languages to English, a {_name} model",
        _shape,
        Pairs(
            "nmt102",
            vocab_size=_VOCAB_SIZE,
            widths=_WIDTHS,
            target_widths=_TARGET_WIDTHS,
            temperature=5.0,
            epoch_size=_NUM_PAIRS,
        ),
        1,
        0.0,  # most pairs come once, or not at all
        f"chrF {_CHRF[_name]} over all languages, after {_NUM_PAIRS:,} pairs",
    )
for _language, _epochs, _chrf in (  # from many pairs to few
    ("es", 4, 34.4),
    ("de", 4, 31.4),
    ("vi", 8, 27.4),
    ("hi", 16, 29.4),
    ("so", 30, 55.9),
):
    _register_real(
        f"mt.bilingual_{_language}",
        f"{_language} to English alone, the baseline of its language",
        _SHAPES["shallow"],
        Pairs("nmt102", languages=(_language,), vocab_size=2000),
        _epochs,
        0.1,
        f"chrF {_chrf}; what mt.multilingual_* is compared with",
    )


# ---------------------------------------- the paper's section 5 and its twins
def _register_paper(
    sizes: tuple[int, int, int],
    small_sizes: tuple[int, int, int],
    num_partitions: int,
    where: str,
    *,
    batch_size: int = 2**18,
    num_micro_batches: int = 32,
    suffix: str = "",
) -> None:
    """Registers a T(L, H, A) of the paper, and its small twin."""
    label = f"T({', '.join(map(str, sizes))})"
    name = f"mt.t_{'_'.join(map(str, sizes))}{suffix}"
    num_layers, hidden_dim, num_heads = sizes
    full = Experiment(
        name=name,
        description=f"{label} of {where.split(':')[0]}",
        model=Translation(
            num_layers,
            hidden_dim=hidden_dim,
            num_heads=num_heads,
            dropout=0.1,
            logit_limit=_LOGIT_LIMIT,
        ),
        data=RandomPairs(length=64, vocab_size=64000),
        task=TranslationTask(label_smoothing=0.1),
        optimizer=_ADAFACTOR,
        batch_size=batch_size,
        epochs=1,
        num_partitions=num_partitions,
        num_micro_batches=num_micro_batches,
        expected_result=f"in the paper, {where}",
    )
    register(full)
    num_layers, hidden_dim, num_heads = small_sizes
    register(
        dataclasses.replace(
            full,
            name=f"{name}_small",
            description=f"a small twin of {label}",
            model=Translation(
                num_layers,
                model_dim=64,
                hidden_dim=hidden_dim,
                num_heads=num_heads,
                vocab_size=2000,
                head_dim=16,
                dropout=0.1,
                logit_limit=_LOGIT_LIMIT,
            ),
            data=Pairs("nmt102", languages=("de",), vocab_size=2000),
            batch_size=batch_size // 64,
            num_partitions=min(num_partitions, 4),
            num_micro_batches=max(1, num_micro_batches // 8),
            expected_result="a perplexity far below 2000 a token (chance)",
        )
    )


_register_paper((6, 8192, 16), (1, 128, 2), 1, "figure 3: 400M parameters")
_register_paper((24, 8192, 16), (4, 128, 2), 4, "figure 3: 1.3B parameters")
_register_paper((12, 16384, 32), (2, 256, 4), 2, "figure 3: 1.3B parameters")
_register_paper((32, 16384, 32), (5, 256, 4), 8, "figure 3: 3B parameters")
_register_paper((64, 16384, 32), (10, 256, 4), 16, "figure 3: 6B parameters")
# The micro-batches stay as they are; a larger batch has more of them.
for _name, _batch_size, _m, _result in (
    ("260k", 2**18, 8, "BLEU 30.92, NLL 2.58"),
    ("1m", 2**20, 32, "BLEU 31.86, NLL 2.51"),
    ("4m", 2**22, 128, "BLEU 32.71, NLL 2.46"),
):
    _register_paper(
        (6, 8192, 16),
        (1, 128, 2),
        1,
        f"table 5: {_result} with {_name} tokens a batch",
        batch_size=_batch_size,
        num_micro_batches=_m,
        suffix=f"_batch_{_name}",
    )
