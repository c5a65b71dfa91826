"""T(L, H, A), the encoder-decoder Transformers of the GPipe paper, as a list.

Every item of the list is one Keras layer; the layers know nothing of pipelines
and can be called one after the other:

>>> import keras
>>> from models import translation
>>> source = keras.ops.array([[5, 3, 8, 0]])
>>> target = keras.ops.array([[1, 7, 2]])  # begins with the id of "begin"
>>> x = source, target
>>> for layer in translation.translation(
...     2, 8, 16, 2, 10, max_length=4, head_dim=4
... ):
...     x = layer(x)
>>> x.shape
TensorShape([1, 3, 10])

The logits at a target position predict the token that comes next, from the
source and the target up to the position. Token id 0 is padding: it is not
attended to.

What goes from one layer to the next is the tuple

    encoder   float (batch, source length, model_dim), the encoder's output
    visible   bool  (batch, source length), where the source is no padding
    decoder   float (batch, target length, model_dim), the embedded target, and
              from the first decoder layer on the decoder's output
    visible   bool  (batch, target length), where the target is no padding

Source and target are embedded by one table, in the first layer, so that the
table is on one device of a pipeline; the softmax has a matrix of its own. That
is the choice whose number of parameters is nearest to the paper's, which does
not say what is shared:

| model | the paper | here |
| --- | --- | --- |
| T(6, 8192, 16) | 400M | 408.2M |
| T(24, 8192, 16) | 1.3B | 1.239B |
| T(12, 16384, 32) | 1.3B | 1.239B |
| T(32, 16384, 32) | 3B | 3.086B |
| T(64, 16384, 32) | 6B | 6.041B |

with a model dimension of 1024 and a vocabulary of 64,000. All layers are
pre-norm, positions are sinusoids.

References:

- [Huang et al., 2019](https://arxiv.org/abs/1811.06965), section 5
- [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
"""

from keras import layers

from models import transformer_arguments
from models.translation_layers import (
    DecoderLayer,
    EncoderLayer,
    EncoderNorm,
    PairEmbedding,
    TargetLogits,
)


def translation(
    num_layers: int,
    model_dim: int,
    hidden_dim: int,
    num_heads: int,
    vocab_size: int,
    *,
    max_length: int,
    head_dim: int = 64,
    dropout: float = 0.0,
    logit_limit: float | None = None,
    feed_forward_scale: float | None = None,
) -> list[layers.Layer]:
    """Makes T(`num_layers`, `hidden_dim`, `num_heads`).

    Args:
        num_layers: L, the number of encoder layers, and of decoder layers.
            Positive.
        model_dim: Units of what goes from layer to layer. Positive and even;
            1024 in the paper.
        hidden_dim: H, units between the dense layers of a layer. Positive.
        num_heads: A, heads of every attention. Positive.
        vocab_size: Number of token ids, of all languages. Positive.
        max_length: Tokens of the longest source or target; a longer one is an
            error. Positive.
        head_dim: Units of each head. Positive.
        dropout: Share that is dropped while training, of the embeddings and of
            what attention and dense layers add to them; from 0 to below 1.
        logit_limit: Logits beyond +limit or -limit are clipped to it, and pass
            no gradient. Positive; `None` for no limit.
        feed_forward_scale: Factor of the initial kernels of the layers' dense
            layers. Positive. By default 1 / `num_layers`.

    Returns:
        2 `num_layers` + 3 layers, in order. The first takes a pair of token
        ids, integers (batch, source length) and (batch, target length); the
        last returns logits (batch, target length, `vocab_size`).

    Raises:
        ValueError: If an argument is outside of its range; all of them are
            named at once.
    """
    transformer_arguments.check(
        num_layers=num_layers,
        model_dim=model_dim,
        hidden_dim=hidden_dim,
        num_heads=num_heads,
        vocab_size=vocab_size,
        max_length=max_length,
        head_dim=head_dim,
        dropout=dropout,
        logit_limit=logit_limit,
        feed_forward_scale=feed_forward_scale,
    )
    if feed_forward_scale is None:
        feed_forward_scale = 1 / num_layers
    sizes = (
        model_dim,
        num_heads,
        head_dim,
        hidden_dim,
        feed_forward_scale,
        dropout,
    )
    indices = range(1, num_layers + 1)
    return [
        PairEmbedding(
            vocab_size, model_dim, max_length, dropout, name="embedding"
        ),
        *(EncoderLayer(*sizes, name=f"encoder_{i}") for i in indices),
        EncoderNorm(name="encoder_norm"),
        *(DecoderLayer(*sizes, name=f"decoder_{i}") for i in indices),
        TargetLogits(vocab_size, logit_limit, name="logits"),
    ]
