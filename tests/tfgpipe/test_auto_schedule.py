"""`schedule="auto"`: for what the cells take."""

import keras
import numpy as np
import pytest
from fabricated_profile import layer, profile, tasks
from keras import layers as kl

import tfgpipe
from tfgpipe import arguments as arguments_lib
from tfgpipe.plans import sized
from tfgpipe.schedules import SCHEDULES
from tfgpipe.sequence import source_of

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
SECONDS = (1.0, 1.0, 1.0, 2.0, (1.0, 1.0))
LAST = (1.0, 1.0, 1.0, 5.0, (2.0, 3.0))


def measured(*seconds):
    return profile(
        *(
            layer(f"dense_{i}", tasks(4, *own), key=f"dense_{i}")
            for i, own in enumerate(seconds)
        )
    )


def model(costs, **options):
    keras.utils.set_random_seed(1)
    layers = [kl.Dense(3, "tanh", name=f"dense_{i}") for i in range(3)]
    made = tfgpipe.GPipe(layers, 3, 6, devices=DEVICES, costs=costs, **options)
    made.compile("sgd", "mse")
    return made


def length(schedule):
    def duration(task):
        forward, *_, backward, (half, rest) = [SECONDS, SECONDS, LAST][
            task.cell
        ]
        if task.cell == 0:  # nobody asks for the gradient of its inputs
            half, backward = 0.0, rest
        by_kind = {
            "forward": forward,
            "backward": backward,
            "input_gradient": half,
            "weight_gradient": rest,
        }
        return by_kind[task.kind]

    return schedule.length(duration)


def test_schedule_is_for_what_was_measured_and_saved_with_the_model(tmp_path):
    costs = measured(SECONDS, SECONDS, LAST)
    made = model(costs, schedule="auto", remat="never")
    found = made.schedule
    names = ("gpipe", "1f1b", "zero_bubble")
    assert length(found) <= min(length(SCHEDULES[n](3, 6)) for n in names)
    assert max(found.held()) <= 3
    config = made.get_config()
    assert config["layers_per_cell"] == [1, 1, 1]
    assert tfgpipe.GPipe.from_config(config).schedule == found


@pytest.fixture
def asked(monkeypatch):
    """The durations for which a schedule is searched."""
    asked = []

    def search(durations, *arguments, **options):
        asked.append(durations)
        return SCHEDULES["1f1b"](3, 6)

    monkeypatch.setattr(arguments_lib, "search", search)
    return asked


def test_halves_are_those_that_run(asked):
    """Nothing is trained before cell 1, and cell 2 cannot be cut."""
    frozen = layer("dense_0", tasks(4, 1.0), weights=0)
    trained = layer("dense_1", tasks(4, *SECONDS))
    whole = layer("dense_2", tasks(4, 1.0, None, None, 2.0))
    model(profile(frozen, trained, whole), schedule="auto", remat="never")
    assert asked == [[(1, 0, 0), (1, 0, 1), (1, 2, 0)]]


def test_seconds_are_those_of_a_plan(asked):
    """Of the operations that run, with a loss whose seconds are known."""
    whole = tasks(4, 1.0, None, None, 2.0)
    loss = layer("loss", tasks(4, 0.5, 0.25, 0.125, 0.5), weights=0)
    measured_layers = [
        layer("dense_0", tasks(4, *SECONDS)),
        layer("dense_1", whole),
        layer("dense_2", tasks(4, *LAST)),
    ]
    costs = profile(*measured_layers, loss=loss, call_seconds=0.0625)
    model(costs, schedule="auto", remat="always")
    layers = [kl.Dense(3, "tanh") for _ in range(3)]
    source = source_of([keras.Input((3,)), *layers])
    work = sized(source, None, "sgd").by_profile(costs, 4)
    [one], [two], [three] = work.cells((1, 1, 1))
    assert not two.facts.has_halves and three.facts.has_halves
    for own, group in zip(asked[0], (one, two, three)):
        forward, half, rest = own
        seconds = group.seconds
        assert forward == seconds["forward"]
        parts = ("input_gradient", "weight_gradient")
        if not group.facts.has_halves:
            parts = ("backward",)
        assert half + rest == seconds["recompute"] + sum(
            seconds[name] for name in parts
        )


@pytest.mark.usefixtures("float64")
def test_training_is_that_by_a_name():
    x = np.random.default_rng(0).normal(size=(12, 3))
    costs = [1.0, 1.0, 2.0]
    weights = []
    for options in (
        {"costs": costs, "schedule": "1f1b"},
        {"costs": measured(SECONDS, SECONDS, LAST), "schedule": "auto"},
    ):
        made = model(**options)
        layers = made.layers
        if "profile" in str(type(options["costs"])).lower():
            made._arguments.costs.profile = None  # of no real layers
        made.fit(x, x, batch_size=12, epochs=2, verbose=0)
        weights.append([w.numpy() for la in layers for w in la.weights])
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, 1e-12)


def test_cut_must_be_of_what_was_measured():
    inner = keras.Sequential([keras.Input((3,)), *[kl.Dense(3)] * 4])
    layers = [keras.Input((3,)), kl.Dense(3), inner, kl.Dense(3)]
    how = {"schedule": "auto", "costs": measured(SECONDS, SECONDS, LAST)}
    with pytest.raises(ValueError, match="Expected a sum of 3, the lines of"):
        tfgpipe.GPipe(layers, 2, 2, layers_per_cell=[3, 3], **how)


def test_cells_may_begin_inside_of_a_layer():
    def layers():
        inner = keras.Sequential(
            [keras.Input((256,)), *map(kl.Dense, [256] * 4)], name="inner"
        )
        return [keras.Input((256,)), inner, kl.Dense(256, name="last")]

    # Layers that take some time, beside that of a call of nothing.
    x = np.zeros((64, 256), "float32")
    profile = tfgpipe.profile(layers(), x, seconds=0.01)
    assert len(profile.layers) == 5
    made = tfgpipe.GPipe(layers(), 3, 2, schedule="auto", costs=profile)
    assert sum(len(cell.layers) for cell in made.cells()) == 5
    assert all(cell.cost > 0 for cell in made.cells())
