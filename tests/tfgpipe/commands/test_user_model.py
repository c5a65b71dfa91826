"""The function that --model names: how it is found, and what it may return."""

import sys

import keras
import numpy as np
import pytest

from tfgpipe.commands import command_line

SOURCE = """
import keras
from beside import UNITS

class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)

def layers():
    return [keras.Input((UNITS,)), keras.layers.Dense(2)]

def functional():
    x = keras.Input((None,), dtype="int32")
    return keras.Model(x, keras.layers.Embedding(9, 2)(x))

def own():
    return Own()

def pair():
    return [keras.layers.Dense(2)], keras.Input((7,))

def odd_pair():
    return [keras.layers.Dense(2)], 7

def tuple_of_layers():
    return keras.layers.Dense(2), keras.layers.Dense(3)

def three():
    return 3

def with_argument(units):
    return []

def broken():
    raise ZeroDivisionError

made = own()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working directory with the user's code."""
    (tmp_path / "users_own.py").write_text(SOURCE)
    (tmp_path / "beside.py").write_text("UNITS = 5\n")
    (tmp_path / "needing.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("users_own", "beside", "needing"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("place", ["users_own", "users_own.py", "absolute"])
def test_function_is_found_by_module_and_by_file(place, folder, monkeypatch):
    if place == "absolute":
        monkeypatch.chdir("/")
        place = folder / "users_own.py"
    layers, inputs = command_line.load_model(f"{place}:layers")
    assert [type(layer).__name__ for layer in layers][1:] == ["Dense"]
    assert inputs.shape == (None, 5)


def test_inputs_come_from_the_function():
    _, inputs = command_line.load_model("users_own:pair")
    assert inputs.shape == (None, 7)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("users_own", "must be my_module:make_model or"),
        (":layers", "must be my_module:make_model or"),
        ("users_own:three", "what goes into the model.*Received: None"),
        ("users_own:odd_pair", "what goes into the model.*Received: 7"),
        ("users_own:functional", r"goes into the model.*\(None, None\)"),
        ("users_own:own", "goes into the model.*Received: None"),
        ("users_own:tuple_of_layers", "goes into the model.*Received: None"),
    ],
)
def test_what_is_wrong_is_told(model, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        command_line.load_model(model)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("users_own:broken", ZeroDivisionError, "^$"),
        ("users_own:with_argument", TypeError, "'units'"),
        ("needing:anything", ModuleNotFoundError, "no_such_package"),
        ("no_such:layers", ModuleNotFoundError, "no_such"),
        ("no_such.py:layers", ModuleNotFoundError, "no_such"),
        ("users_own:layer", AttributeError, "no attribute 'layer'"),
    ],
)
def test_what_python_says_of_the_users_code_is_not_hidden(
    model, error, message
):
    with pytest.raises(error, match=message):
        command_line.load_model(model)


def test_rows_are_of_the_kinds_of_the_inputs_and_the_same_again():
    specs = {
        "a": keras.Input((2, 3)),
        "b": keras.Input((4,), dtype="int32"),
        "c": keras.Input((), dtype="bool"),
        "d": keras.Input((2,), dtype="bfloat16"),
    }
    rows, again = (command_line.random_rows(specs, 50) for _ in range(2))
    assert rows["a"].shape == (50, 2, 3)
    assert {*np.unique(rows["b"])} == {0, 1}
    assert rows["c"].dtype == bool and 0 < rows["c"].sum() < 50
    assert keras.backend.standardize_dtype(rows["d"].dtype) == "bfloat16"
    assert all(np.array_equal(rows[name], again[name]) for name in specs)
