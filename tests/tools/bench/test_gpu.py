"""GPT-2 beside plain Keras, on a device and on parts of it."""

import pytest
import tensorflow as tf

from tools.bench import gpu

SMALL = (
    "--blocks=1",
    "--units=16",
    "--vocabulary=20",
    "--rows=16",
    "--tokens=4",
    "--devices=2",
    "--steps=1",
    "--rounds=1",
)


@pytest.mark.slow
@pytest.mark.parametrize(("part", "cases"), [("whole", 7), ("split", 8)])
def test_keras_and_pipelines_are_measured(tables, monkeypatch, part, cases):
    monkeypatch.setattr(gpu, "_devices", lambda n, _: ["CPU:0", "CPU:1"][:n])
    (keras, *pipelines) = tables("gpu", f"--part={part}", *SMALL)[part]
    assert keras["name"] == "Keras" and len(pipelines) == cases
    assert all(float(row["step_s"]) >= 0 for row in [keras, *pipelines])


def test_what_does_not_fit_is_a_row(tables, monkeypatch):
    def full(values):
        raise tf.errors.ResourceExhaustedError(None, None, "full")

    monkeypatch.setattr(gpu, "_devices", lambda n, _: ["CPU:0"])
    monkeypatch.setattr(gpu, "_model", full)
    rows = tables("gpu", *SMALL)["whole"]
    assert [row["step_s"] for row in rows] == ["OOM"] * 8
