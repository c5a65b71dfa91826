"""The function that --model names: how it is found, and what it may return."""

import sys

import keras
import numpy as np
import pytest

from tfgpipe.commands import command_line, user_model
from tfgpipe.commands.command_line import BadFlags

FLAGS = command_line.new_flags()
user_model.define_model(FLAGS)

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
number = 3
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


def load(model, *flags):
    values = command_line.copy.deepcopy(FLAGS)
    values(["program", f"--model={model}", *flags])
    return user_model.load(values)


@pytest.mark.parametrize("place", ["users_own", "users_own.py", "absolute"])
def test_function_is_found_by_module_and_by_file(place, folder, monkeypatch):
    if place == "absolute":
        monkeypatch.chdir("/")
        place = folder / "users_own.py"
    found = load(f"{place}:layers")
    assert [type(layer).__name__ for layer in found.layers][1:] == ["Dense"]
    assert found.known_inputs().shape == (None, 5)


def test_model_that_is_there_already_is_taken():
    assert load("users_own:made").layers.name == "own"


def test_inputs_come_from_the_function_or_the_flag():
    assert load("users_own:pair").known_inputs().shape == (None, 7)
    flag = "--inputs=float32[8]"
    assert load("users_own:own", flag).known_inputs().shape == (None, 8)
    flag = "--inputs=int32[12]"
    found = load("users_own:functional", flag).known_inputs()
    assert found.shape == (None, 12) and found.dtype == "int32"


def test_tuple_of_layers_is_no_pair():
    assert len(load("users_own:tuple_of_layers").layers) == 2


@pytest.mark.parametrize(
    ("name", "received"),
    [
        ("functional", r"an input of shape \(None, None\)"),
        ("own", "no inputs"),
        ("tuple_of_layers", "no inputs"),
    ],
)
def test_unknown_inputs_are_asked_for(name, received):
    with pytest.raises(BadFlags, match=f"--inputs must tell.*{received}"):
        load(f"users_own:{name}").known_inputs()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("users_own", "such as --model=my_module:make_model"),
        (":layers", "such as --model=my_module:make_model"),
        ("no_such:layers", "name a module that Python finds.*'no_such'"),
        ("users_own.no:layers", "name a module that Python finds"),
        ("no_such.py:layers", "name a file that there is"),
        ("users_own:layer", "Received: 'layer'.*Did you mean 'layers'"),
        ("users_own:with_argument", "without arguments.*'units'"),
        ("users_own:three", "must return a Keras model.*Received: 3"),
        ("users_own:number", "must return a Keras model.*Received: 3"),
        ("users_own:odd_pair", r"a nest of `keras.Input`s. Received: 7"),
    ],
)
def test_what_is_wrong_is_told(model, message):
    with pytest.raises(BadFlags, match=f"(?s){message}"):
        load(model)


def test_what_the_users_code_raises_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        load("users_own:broken")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load("needing:anything")


@pytest.mark.parametrize(
    "text",
    ["", "float32", "float33[3]", "float32[a]", "a=int32[1],int32[2]", "[3]"]
    + ["a=int32[1],a=int32[2]"],
)
def test_malformed_inputs_are_told(text):
    with pytest.raises(BadFlags, match="--inputs must be dtypes and shapes"):
        user_model.parsed_inputs(text)


def test_named_inputs_are_a_dict():
    found = user_model.parsed_inputs("ids=int32[4], mask=bool[4]")
    assert {name: one.dtype for name, one in found.items()} == {
        "ids": "int32",
        "mask": "bool",
    }


def test_rows_are_of_the_kinds_of_the_inputs_and_the_same_again():
    specs = user_model.parsed_inputs(
        "a=float32[2,3],b=int32[4],c=bool[],d=bfloat16[2]"
    )
    rows, again = (user_model.random_rows(specs, 50, 9) for _ in range(2))
    assert rows["a"].shape == (50, 2, 3)
    assert {*np.unique(rows["b"])} == {*range(9)}
    assert rows["c"].dtype == bool and 0 < rows["c"].sum() < 50
    assert keras.backend.standardize_dtype(rows["d"].dtype) == "bfloat16"
    assert all(np.array_equal(rows[name], again[name]) for name in specs)


def test_texts_cannot_be_drawn():
    spec = keras.Input((), dtype="string")
    with pytest.raises(BadFlags, match="Received: an input of dtype 'string'"):
        user_model.random_rows(spec, 2, 2)
