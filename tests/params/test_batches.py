"""Mini-batches: every example once an epoch, in an order of its own."""

import itertools

import numpy as np

from params.batches import batches


def taken(first_step, num_steps=8, seed=0):
    x = np.arange(10)
    made = batches(
        x, -x, 4, seed=seed, first_step=first_step, num_steps=num_steps
    )
    return [(x.numpy().tolist(), y.numpy().tolist()) for x, y in made]


def test_batches_take_every_example_once_an_epoch():
    epochs = [taken(0)[:3], taken(0)[3:6]]
    for epoch in epochs:
        assert [len(x) for x, _ in epoch] == [4, 4, 2]
        rows = itertools.chain.from_iterable(x for x, _ in epoch)
        assert sorted(rows) == list(range(10))
        assert all(y == [-i for i in x] for x, y in epoch)
    assert epochs[0] != epochs[1]
