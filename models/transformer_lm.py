"""Transformer language models of the GPipe paper, as a list of Keras layers.

Every item of the list is one layer; the layers know nothing of pipelines and
can be called one after the other:

>>> import keras
>>> from models import transformer_lm
>>> x = keras.ops.array([[5, 3, 8, 1]])
>>> for layer in transformer_lm.transformer_lm(2, 8, 16, 2, 10, max_length=4):
...     x = layer(x)
>>> x.shape
TensorShape([1, 4, 10])

The logits at a position predict the token at the next one, from the tokens up
to the position. Between the layers goes one tensor, (batch, length,
`model_dim`). The blocks are pre-norm; input embedding and softmax are separate
matrices; positions are sinusoids, without weights.

Parameters, with d = `model_dim`, f = `hidden_dim`, a = heads times the units of
each, V = `vocab_size`:

    num_layers (4 d a + 3 a + d + 2 d f + f + d + 4 d) + 2 V d + V + 2 d

References:

- [Huang et al., 2019](https://arxiv.org/abs/1811.06965), table 1 and section 5
- [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), the decoder
"""

from keras import layers

from models import transformer_arguments
from models.transformer_block import TransformerBlock
from models.transformer_layers import Logits, TokenEmbedding


def transformer_lm(
    num_layers: int,
    model_dim: int,
    hidden_dim: int,
    num_heads: int,
    vocab_size: int,
    *,
    max_length: int,
    head_dim: int | None = None,
    dropout: float = 0.0,
    logit_limit: float | None = None,
    feed_forward_scale: float | None = None,
) -> list[layers.Layer]:
    """Makes a causal Transformer language model.

    Args:
        num_layers: L, the number of blocks. Positive.
        model_dim: Units of what goes from layer to layer. Positive and even.
        hidden_dim: Units between the dense layers of a block. Positive.
        num_heads: Heads of the attention. Positive.
        vocab_size: Number of token ids. Positive.
        max_length: Tokens of the longest sequence; a longer one is an error.
            Positive.
        head_dim: Units of each head. Positive. By default `model_dim` /
            `num_heads`, which then must be a whole number.
        dropout: Share that is dropped while training, of the embeddings and of
            what attention and dense layers add to them; from 0 to below 1.
        logit_limit: Logits beyond +limit or -limit are clipped to it, and pass
            no gradient. Positive; `None` for no limit.
        feed_forward_scale: Factor of the initial kernels of the blocks' dense
            layers. Positive. By default 1 / `num_layers`.

    Returns:
        `num_layers` + 2 layers, in order. The first takes token ids, integers
        (batch, length); the last returns logits (batch, length, `vocab_size`).

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
    if head_dim is None:
        head_dim = model_dim // num_heads
    if feed_forward_scale is None:
        feed_forward_scale = 1 / num_layers
    blocks = [
        TransformerBlock(
            model_dim,
            num_heads,
            head_dim,
            hidden_dim,
            feed_forward_scale,
            dropout,
            name=f"block_{i + 1}",
        )
        for i in range(num_layers)
    ]
    return [
        TokenEmbedding(
            vocab_size, model_dim, max_length, dropout, name="embedding"
        ),
        *blocks,
        Logits(vocab_size, logit_limit, name="logits"),
    ]
