"""Numbers of a pipeline while it trains."""

import csv
import sys

import keras
import numpy as np
import pytest
from keras import layers as kl
from scalars import read_log
from tiny import (
    Interrupt,
    assert_same,
    compiled,
    data,
    fit,
    pipeline,
    random_layers,
    state,
)

import tfgpipe
from tfgpipe import callbacks, monitor, timeline
from tfgpipe.callbacks import pipeline_monitor
from tfgpipe.schedules import Task
from tfgpipe.timeline import Event

MEASURED = {
    "bubble",
    "busiest_device",
    "busiest_share",
    "slowest_cell",
    "slowest_ratio",
    "step_seconds",
    "boundary_mib",
}


SHOWN = {"bubble", "examples_per_second"}


def quiet(*args, **kwargs):
    return callbacks.PipelineMonitor(*args, say=lambda line: None, **kwargs)


def dense(k=2, m=2, width=4, **kwargs):
    keras.utils.set_random_seed(5)
    layers = [kl.Dense(width, "tanh", name=f"dense_{i}") for i in range(k)]
    model = tfgpipe.GPipe([keras.Input((width,)), *layers], k, m, **kwargs)
    model.compile("sgd", "mse")
    return model


def ones(rows=16, width=4):
    return np.ones((rows, width), "float32")


def looped():
    """Several steps a call, of layers with seeds and moving statistics."""
    model = pipeline(random_layers, m=2)
    return compiled(model, steps_per_execution=2)


def functional():
    keras.utils.set_random_seed(5)
    x = keras.Input((4,))
    h = kl.Dense(3, "tanh")(x)
    model = keras.Model(x, kl.Dense(2)(kl.Add()([h, kl.Dense(3)(h)])))
    options = {"schedule": "1f1b", "remat": "always", "remat_groups": 2}
    return compiled(
        tfgpipe.GPipe(model, 2, 2, layers_per_cell=[2, 2], **options)
    )


def interleaved():
    options = {"schedule": "interleaved", "devices": ["CPU:2", "CPU:3"]}
    return compiled(pipeline(random_layers, k=4, **options), metrics=["mae"])


def replicated():
    with tfgpipe.PipelineStrategy(2, 2).scope():
        model = pipeline(random_layers, k=None, schedule="zero_bubble")
        return compiled(model)


def xla():
    return compiled(pipeline(random_layers), jit_compile=True)


@pytest.mark.parametrize(
    "make",
    [
        functional,
        *(
            pytest.param(make, marks=pytest.mark.slow)
            for make in (looped, interleaved, replicated, xla)
        ),
    ],
)
def test_training_has_the_bits_that_it_has_without_the_monitor(make):
    x, y = data(10)  # 4, 4 and 2 rows
    validated = {"validation_data": (x[:2], y[:2])}

    def run(*monitors):
        model = make()
        options = {} if make is looped else validated
        history = fit(model, x, y, callbacks=[*monitors], **options)
        return history, state(model)

    watch = quiet()
    (found, values), (expected, plain) = run(watch), run()
    assert_same(values, plain)
    assert {name: found[name] for name in expected} == expected
    assert set(found) - set(expected) == SHOWN
    assert set(watch.history) == MEASURED | SHOWN
    assert {name: watch.history[name] for name in SHOWN} == {
        name: found[name] for name in SHOWN
    }
    assert len(found["bubble"]) == 2
    # Two steps a call are two measurements an epoch: too few for advice.
    assert (watch.advice is None) == (make is looped)


def test_numbers_are_those_of_a_step_of_fit():
    watch = quiet()
    model = dense(m=4)
    fit(model, ones(32), ones(32), callbacks=[watch], batch_size=16)
    found = watch.history
    assert model.optimizer.iterations == 4  # two epochs of two steps, no more
    ran = sorted(e.task for e in watch.events if e.task.kind == "forward")
    assert ran == [("forward", k, m) for k in range(2) for m in range(4)]
    for name in MEASURED | {"examples_per_second"}:
        own = found[name]
        assert len(own) == 2 and min(own) >= 0
    # 16 rows of 4 floats go forward, and their gradients back
    assert found["boundary_mib"] == [2 * 16 * 4 * 4 / 2**20] * 2
    summary = timeline.summary(watch.events, range(2))
    assert {name: found[name][-1] for name in summary} == summary
    assert 0 < summary["bubble"] < 1 <= summary["slowest_ratio"] <= 2


def test_only_every_so_many_epochs_are_measured(tmp_path, capsys):
    watch = callbacks.PipelineMonitor(2)
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    model = dense()
    model.fit(
        ones(),
        ones(),
        4,
        epochs=4,
        verbose=0,
        callbacks=[watch, log],
    )
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["bubble"] != "NA" for row in rows] == [True, False] * 2
    assert all(float(row["examples_per_second"]) > 0 for row in rows)
    seen = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in seen] == ["Epoch 1", "Epoch 3"]
    assert seen[-1].endswith(watch.advice)


@pytest.mark.parametrize("verbose", ["auto", 1, 2])
def test_advice_stands_in_a_line_of_its_own(verbose, capsys):
    model = dense()
    model.fit(
        ones(),
        ones(),
        4,
        epochs=2,
        verbose=verbose,
        callbacks=[callbacks.PipelineMonitor()],
    )
    lines = capsys.readouterr().out.splitlines()
    advised = [i for i, line in enumerate(lines) if "Epoch 1: " in line]
    (i,) = advised
    assert lines[i].startswith("Epoch 1: ")
    assert "examples_per_second" in lines[i - 1]  # of the epoch itself
    assert "busiest" not in lines[i - 1]
    assert lines[i + 1] == "Epoch 2/2"


def test_advice_waits_for_enough_steps(monkeypatch):
    said = []
    watch, model = callbacks.PipelineMonitor(say=said.append), dense()
    for expected in (0, 0, 0, 1, 2):  # the first one traces
        fit(model, ones(), ones(), batch_size=16, epochs=1, callbacks=[watch])
        assert len(said) == expected
        assert (watch.advice is None) == (expected == 0)


def test_numbers_are_of_the_step_of_median_length():
    def measured(seconds, rows=4):
        task = Task("forward", 0, 0)
        return monitor.Measured([Event(task, 0, 0, seconds)], rows, 0, None)

    steps = [measured(s) for s in (9, 1, 3, 2, 8)]
    assert monitor.typical(steps) == (steps[2], 5)
    assert monitor.typical(steps[:4]) == (steps[3], 4)
    last = measured(5, rows=2)  # of an epoch
    assert monitor.typical([*steps, last]) == (steps[2], 5)
    assert monitor.typical([last, steps[0]]) == (steps[0], 1)


def test_first_mini_batch_that_is_traced_is_not_measured(monkeypatch):
    """With one in an epoch, the second epoch's is the first."""
    traced = []
    train_step = tfgpipe.GPipe.train_step
    monkeypatch.setattr(
        tfgpipe.GPipe,
        "train_step",
        lambda self, data: traced.append(0) or train_step(self, data),
    )
    watch, model = quiet(), dense()
    found = fit(
        model, ones(), ones(), batch_size=16, epochs=3, callbacks=[watch]
    )
    assert len(found["bubble"]) == 2
    assert len(found["examples_per_second"]) == 2
    assert len(traced) == 1  # fit's own function was not needed yet
    found = fit(
        model, ones(), ones(), batch_size=16, epochs=1, callbacks=[watch]
    )
    assert len(found["bubble"]) == 1 and len(traced) == 1
    model.compile("sgd", "mae")
    found = fit(
        model, ones(), ones(), batch_size=2, epochs=1, callbacks=[watch]
    )
    assert len(found["bubble"]) == 1 and len(traced) == 3
    own = model.train_function
    fit(model, ones(), ones(), batch_size=2, epochs=1, callbacks=[watch])
    assert model.train_function is own and len(traced) == 3


def test_fit_that_was_interrupted_goes_on():
    watch, model = quiet(), dense()
    model.evaluate(ones(), ones(), verbose=0, callbacks=[watch])
    with pytest.raises(KeyboardInterrupt):
        fit(model, ones(), ones(), callbacks=[watch, Interrupt(0)])
    found = fit(model, ones(), ones(), epochs=1, callbacks=[watch])
    assert len(found["bubble"]) == 1
    assert model.train_function is not watch._step


def test_numbers_pictures_and_advice_are_written(tmp_path):
    folder = tmp_path / "log"
    watch = quiet(log_dir=folder, pictures=tmp_path / "made" / "pictures")
    model = dense()
    fit(model, ones(), ones(), epochs=2, callbacks=[watch])
    found = watch.history
    drawn = sorted((tmp_path / "made" / "pictures").iterdir())
    assert [path.name for path in drawn] == ["epoch_0001.png", "epoch_0002.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in drawn)
    scalars = read_log(folder / "pipeline")
    for name, values in found.items():
        if name != "loss":
            assert scalars[f"pipeline/{name}"] == [
                (epoch, np.float32(value)) for epoch, value in enumerate(values)
            ]
    # a resumed run goes on
    fit(model, ones(), ones(), epochs=3, initial_epoch=2, callbacks=[watch])
    steps = read_log(folder / "pipeline")["pipeline/bubble"]
    assert [step for step, _ in steps] == [0, 1, 2]


def test_utilisation_is_three_forward_passes_by_what_devices_could_do():
    model, watch = dense(), quiet(peak_flops=1e6)
    found = fit(model, ones(), ones(), callbacks=[watch])
    flops = 3 * sum(cell.cost for cell in model.cells())
    np.testing.assert_allclose(
        found["model_flops_utilisation"],
        np.array(found["examples_per_second"]) * flops / 2e6,
    )


def test_tokens_and_memory_are_told_where_they_are_known(monkeypatch):
    monkeypatch.setattr(
        pipeline_monitor, "accelerator_mib", lambda devices: {"GPU:0_peak": 2.0}
    )
    layers = [
        keras.Input((None,), dtype="int32"),
        kl.Embedding(9, 4),
        kl.Dense(1),
    ]
    model = tfgpipe.GPipe(layers, 2, 2)
    model.compile("sgd", "mse")
    x = np.ones((8, 5), "int32")
    watch = quiet(peak_flops=1e6, flops_of_example=1e3)
    found = fit(model, x, x[..., None], callbacks=[watch])
    assert watch.history["memory_mib/GPU:0_peak"] == [2.0, 2.0]
    assert "memory_mib/GPU:0_peak" not in found
    np.testing.assert_allclose(
        found["tokens_per_second"], 5 * np.array(found["examples_per_second"])
    )
    np.testing.assert_allclose(
        found["model_flops_utilisation"],
        3e3 / 2e6 * np.array(found["examples_per_second"]),
    )


def test_how_far_the_plan_was_off_is_told(monkeypatch):
    said = []
    model = dense()
    plan = tfgpipe.plan(
        model.layers,
        16,
        machine="v100",
        devices=model.devices,
        optimizer="sgd",
        inputs=keras.Input((4,)),
        setting={"num_partitions": 2, "num_micro_batches": 2},
    )
    held = {"GPU:0_current": 0.0, "GPU:0_peak": 2 * max(plan.device_bytes)}
    mib = {name: count / 2**20 for name, count in held.items()}
    monkeypatch.setattr(pipeline_monitor, "accelerator_mib", lambda _: mib)
    watching = callbacks.PipelineMonitor(say=said.append, plan=plan)
    model.fit(ones(64), ones(64), 16, epochs=2, verbose=0, callbacks=[watching])
    assert " s planned (+" in said[-1]
    assert said[-1].endswith(" planned (+100%).")
    # A step of other mini-batches is another step.
    model.fit(ones(64), ones(64), 8, verbose=0, callbacks=[watching])
    assert "a step takes" not in said[-1]


def test_pictures_need_matplotlib_from_the_beginning(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="matplotlib"):
        quiet(pictures=tmp_path)


def test_models_of_plain_keras_are_refused():
    plain = keras.Sequential([kl.Dense(4)])
    plain.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"must watch a `GPipe`.*Sequential"):
        fit(plain, ones(), ones(), callbacks=[quiet()])


def test_steps_of_models_that_run_eagerly_are_measured():
    model = dense()
    model.compile("sgd", "mse", run_eagerly=True)
    monitor = quiet()
    fit(model, ones(), ones(), callbacks=[monitor])
    assert monitor.events


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "`every` must be an integer of at least 1.*every=0"),
        ({"peak_flops": 0}, "`peak_flops` must be .* above 0.*peak_flops=0"),
        ({"peak_flops": True}, "peak_flops=True"),
        ({"flops_of_example": float("inf")}, "flops_of_example=inf"),
        ({"flops_of_example": "many"}, "flops_of_example='many'"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        quiet(**arguments)
