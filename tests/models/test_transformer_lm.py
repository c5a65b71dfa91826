"""Transformer language models: sizes, what a position sees, training."""

import numpy as np
import pytest
from stacks import (
    VOCABULARY,
    build,
    call,
    count,
    no_weights_allocated,
    tiny,
    tokens,
)

from models import transformer_lm

TABLE_1 = {"model_dim": 2048, "hidden_dim": 8192, "num_heads": 32}


# --------------------------------------------------------------------- sizes
@pytest.fixture(scope="module")
def table_1_sizes():
    """Parameters of each layer of the three-layer model; none allocated."""
    with no_weights_allocated():
        layers = transformer_lm.transformer_lm(
            3, vocab_size=32_000, max_length=1024, **TABLE_1
        )
        shapes = build(layers, (None, 1024))
    assert shapes[-1] == (None, 1024, 32_000)
    assert all(w._value is None for la in layers for w in la.weights)
    return [count(layer.trainable_weights) for layer in layers]


@pytest.mark.parametrize(
    ("num_layers", "paper"),
    [
        (3, "282.2M"),
        (13, "785.8M"),
        (103, "5.3B"),
        (415, "21.0B"),
        (1663, "83.9B"),
    ],
)
def test_parameters_of_table_1_are_the_papers_to_its_last_digit(
    table_1_sizes, num_layers, paper
):
    embedding, block, *_, logits = table_1_sizes
    assert table_1_sizes[1:4] == [block] * 3
    found = embedding + num_layers * block + logits
    unit = 1e6 if paper.endswith("M") else 1e9
    assert f"{found / unit:.1f}" == paper[:-1]


# ------------------------------------------------------------- what it does
def test_position_sees_nothing_that_comes_later():
    layers = tiny()
    ids = tokens()
    logits = call(layers, ids)
    ids[:, 4] = (ids[:, 4] + 1) % VOCABULARY
    changed = call(layers, ids)
    np.testing.assert_array_equal(changed[:, :4], logits[:, :4])
    assert (np.abs(changed - logits)[:, 4:] > 1e-6).any(axis=-1).all()
