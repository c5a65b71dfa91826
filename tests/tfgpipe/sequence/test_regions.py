"""Regions: what a model repeats, compiled once."""

import collections

import keras
import pytest
from device_names import names
from keras import layers as kl

import tfgpipe
from tfgpipe.sequence import regions


class Block(kl.Layer):
    """A residual block."""

    def __init__(self, units=4, **kwargs):
        super().__init__(**kwargs)
        self.norm = kl.LayerNormalization()
        self.wide = kl.Dense(2 * units, "gelu")
        self.narrow = kl.Dense(units)

    def call(self, x):
        return x + self.narrow(self.wide(self.norm(x)))


def layers(count=6, units=4):
    blocks = [Block(units) for _ in range(count)]
    return [keras.Input((units,)), kl.Dense(units), *blocks, kl.Dense(3)]


def pipeline(count=6, units=4, k=1, m=2, **kwargs):
    kwargs.setdefault("devices", names(k))
    return tfgpipe.GPipe(layers(count, units), k, m, **kwargs)


def sizes(model):
    """How many blocks the groups of each cell have."""
    found = collections.defaultdict(list)
    for cell in model.built_for("a test").cells:
        blocks = {
            around.name
            for step in cell.steps
            for around in step.section.around
            if isinstance(around, Block)
        }
        found[cell.number].append(len(blocks))
    return [*found.values()]


def compiled(model, jit_compile=True):
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(sgd, "mse", jit_compile=jit_compile)
    return model


@pytest.fixture
def no_least(monkeypatch):
    """A block is worth a call, however little it computes."""
    monkeypatch.setattr(regions, "_LEAST_FLOPS", 0)


def test_groups_follow_from_compile_after_build(no_least):
    model = pipeline()
    assert sizes(model) == [[6]]
    kernels = [id(v) for v in model.weights]
    assert sizes(compiled(model)) == [[0, 1, 1, 1, 1, 1, 1, 0]]
    assert [id(v) for v in model.weights] == kernels
    assert sizes(compiled(model, False)) == [[6]]
    assert sizes(compiled(model, "auto")) == [[6]]


def test_small_blocks_are_a_region_together():
    assert sizes(compiled(pipeline(8))) == [[0, 2, 2, 2, 2, 0]]
    assert sizes(compiled(pipeline(9))) == [[0, 2, 2, 2, 2, 1, 0]]
    assert sizes(compiled(pipeline(3))) == [[3]]


def test_more_micro_batches_leave_less_work_for_a_call(monkeypatch):
    flops = 6 * 64**2 * 32 / 2
    monkeypatch.setattr(regions, "_LEAST_FLOPS", flops)
    assert sizes(compiled(pipeline(8, 64, m=2)))[0][1] == 1
    assert sizes(compiled(pipeline(8, 64, m=4)))[0][1] == 2


def test_cells_begin_at_regions(no_least):
    found = [sizes(compiled(pipeline(k=k, units=16))) for k in (2, 3)]
    assert found == [
        [[0, 1, 1, 1], [1, 1, 1, 0]],
        [[0, 1, 1], [1, 1], [1, 1, 0]],
    ]


def test_groups_that_are_asked_for_begin_at_regions(no_least):
    assert sizes(compiled(pipeline(remat_groups=3))) == [[2, 2, 2]]
    assert sizes(compiled(pipeline(remat_groups=1))) == [[6]]


def test_weights_on_the_host_are_sent_once_a_cell(no_least):
    assert sizes(compiled(pipeline(weights_on="host"))) == [[6]]


def test_no_micro_batch_is_an_exception(no_least):
    """But the only one."""
    always = compiled(pipeline(3)).built_for("a test").remat.rules
    assert {*always} == {"always"}
    only = compiled(pipeline(3, m=1)).built_for("a test").remat.rules
    assert {*only} == {"except_last"}
