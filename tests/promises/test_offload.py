"""Activations on the host: the bits of a pipeline that keeps them."""

import keras
import numpy as np
import pytest
from device_names import names
from graphs import is_task, step_graph
from keras import layers as kl

import tfgpipe
from tfgpipe.devices.names import same_device
from tfgpipe.schedules import CHUNKS, SCHEDULES, Schedule

HOST = "CPU:0"


def compiled(remat="offload", m=4, **kwargs):
    """Two devices, of which none is the host."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,))]
    layers += [kl.Dense(8, "tanh", name=f"d{i}") for i in range(6)]
    model = tfgpipe.GPipe(
        [*layers, kl.BatchNormalization()],
        2,
        m,
        devices=names(3)[1:],
        remat=remat,
        **kwargs,
    )
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), "mse")
    return model


def data(rows=12):
    x = np.random.default_rng(0).standard_normal((rows, 8)).astype("float32")
    return x, x[:, ::-1].copy()


def test_what_is_kept_goes_to_the_host_and_comes_back():
    """Of 4 micro-batches the first two are away, in each cell."""
    counts = {}
    for remat in ("never", "offload"):
        graph = step_graph(compiled(remat), *data())
        calls = [op for op in graph.get_operations() if is_task(op)]
        made = {t.ref() for op in calls for t in op.outputs}
        copies = [
            op
            for op in graph.get_operations()
            if op.type == "Identity"
            and op.inputs[0].ref() in made
            and same_device(op.device, HOST)
        ]
        counts[remat] = {op.inputs[0].op.name for op in copies}
    assert len(counts["offload"] - counts["never"]) == 2 * 2


@pytest.mark.parametrize("name", [*SCHEDULES])
def test_less_is_held_in_the_same_time(name):
    """Where a transfer takes half the time of a forward pass."""
    chunks = CHUNKS[name] or 2
    schedule = SCHEDULES[name](4, 8, chunks)
    kept, sent = schedule.program("never"), schedule.program("offload")
    assert sent.length() == kept.length()
    assert sent.bubble() == kept.bubble()
    assert sent.held()[0] < kept.held()[0]
    assert all(a <= b for a, b in zip(sent.held(), kept.held(), strict=True))
    assert sent.is_forward_first == kept.is_forward_first


def test_program_says_what_is_away():
    text = str(SCHEDULES["gpipe"](2, 4).program("offload")).splitlines()
    assert text[:3] == [
        "device 0  F0+ F1+ F2+ F3+             B3----- B2----- B1----- B0-----",
        "  to host     O0  O1",
        "  from host                                   T1      T0",
    ]


def test_a_device_that_would_hold_no_less_sends_nothing():
    program = Schedule("F0 F1 B0 B1\nF0 B0 F1 B1").program("offload")
    assert {op.kind for op in program.ops} == {"forward", "backward"}


def test_it_is_a_rule_of_a_cell(tmp_path):
    model = compiled({0: "offload", 1: 0.5})
    model.fit(*data(), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = tfgpipe.load_model(tmp_path / "model.keras")
    assert loaded.remat == {0: "offload", 1: 0.5}
    assert "to host" in str(loaded.program(12))
