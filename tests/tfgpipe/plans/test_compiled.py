"""Plans for accelerators, where XLA compiles cells by default."""

import functools

import keras
import pytest
from device_names import names as some_names
from keras import layers as kl

import tfgpipe
from tfgpipe.devices import names
from tfgpipe.plans import MACHINES, Setting, predict, sized
from tfgpipe.sequence import regions, source_of

RULES = ("except_last", "always")
CPUS = tuple(some_names(2))


class Block(kl.Layer):
    """A residual block; several small layers are no region."""

    def __init__(self, units=4, supports_jit=True, **kwargs):
        super().__init__(**kwargs)
        self.norm = kl.LayerNormalization()
        self.wide, self.narrow = kl.Dense(2 * units, "gelu"), kl.Dense(units)
        self.supports_jit = supports_jit

    def call(self, x):
        return x + self.narrow(self.wide(self.norm(x)))


def blocks(**options):
    return [keras.Input((4,)), *(Block(**options) for _ in range(6))]


@pytest.fixture
def on_accelerators(monkeypatch):
    """CPUs are taken for accelerators, on which a block is worth a call."""
    monkeypatch.setattr(names, "has_accelerator", bool)
    monkeypatch.setattr(regions, "_LEAST_FLOPS", 0)


@functools.cache
def model(**options):
    return sized(source_of(blocks(**options)), None, "sgd", CPUS)


def setting(remat, m=4, groups=None):
    half = len(model().sizes) // 2
    return Setting(1, 2, (half, half), m, "1f1b", (remat,) * 2, groups)


@pytest.mark.parametrize(
    ("remat", "m", "groups"),
    [
        ("except_last", 1, None),
        ("except_last", 4, None),
        ("never", 4, None),
        ("always", 4, 1),
    ],
)
def test_planned_program_is_that_of_compiled_cells(
    remat, m, groups, on_accelerators
):
    """Groups are regions, and no micro-batch is an exception."""
    arguments = setting(remat, m, groups).arguments
    made = tfgpipe.GPipe(blocks(), devices=CPUS, **arguments)
    made.compile("sgd", "mse")
    work = model().by_flops(MACHINES["v100"], 2)
    planned = setting(remat, m, groups).program(work)
    assert planned.ops == made.program(8).ops


def test_predictions_follow_what_is_compiled(on_accelerators, monkeypatch):
    def found(remat, **options):
        work = model(**options).by_flops(MACHINES["v100"], 512)
        return predict(work, setting(remat), None)

    last, always = map(found, RULES)
    assert last.step_seconds == always.step_seconds
    assert last.memory == always.memory
    refused = found("always", supports_jit=False)  # as Keras does
    assert refused.memory[0].total > always.memory[0].total
    monkeypatch.setattr(names, "has_accelerator", lambda devices: False)
    last, always = map(found, RULES)
    assert last.step_seconds < always.step_seconds


def test_plan_for_accelerators_leaves_groups_to_regions(on_accelerators):
    found = tfgpipe.plan(blocks(), 32, machine="v100", devices=[*CPUS])
    assert found.arguments["remat_groups"] is None
    assert str(found).splitlines()[2].split()[5] == "regions"
    made = tfgpipe.GPipe(blocks(), **found.arguments)
    made.compile("sgd", "mse")
    x = keras.random.normal((32, 4))
    made.fit(x, x, 32, verbose=0)
