"""The fuzzer finds faults again whose cures are taken out."""

import dataclasses

import compare
import keras
import pytest
from test_fuzz import TOLD

import tfgpipe
from tfgpipe.loss import row_wise
from tfgpipe.sequence.layer_list import LayerList
from tfgpipe.state import RandomState
from tfgpipe.state import scope as state_scope

pytestmark = pytest.mark.slow


def leave_training_to_layers(monkeypatch):
    def untold(self, x, training):
        for layer in self.layers:
            x = layer(x)
        return x

    monkeypatch.setattr(LayerList, "call", untold)


def bind_no_variables_that_are_read(monkeypatch):
    monkeypatch.setattr(
        state_scope.ModelScope,
        "get_current_value",
        keras.StatelessScope.get_current_value,
    )


def add_up_hinge_losses(monkeypatch):
    losses = keras.losses.Hinge, keras.losses.SquaredHinge
    functions = {"hinge", "squared_hinge"}
    monkeypatch.setattr(row_wise, "_LOSSES", (*row_wise._LOSSES, *losses))
    monkeypatch.setattr(row_wise, "_SQUEEZING", row_wise._SQUEEZING | functions)


def add_up_all_metrics(monkeypatch):
    monkeypatch.setattr(row_wise, "_is_rowwise_metric", lambda *_: True)


def save_seeds_by_cell(monkeypatch):
    build = tfgpipe.GPipe.build

    def building(self, input_shape):
        build(self, input_shape)
        seeds = [seed for cell in self._built.cells for seed in cell.seeds]
        self._built = dataclasses.replace(
            self._built, random_state=RandomState(self.name, lambda: seeds)
        )

    monkeypatch.setattr(tfgpipe.GPipe, "build", building)


CURES = {
    "training leaks out of a layer": leave_training_to_layers,
    "a closure reads a weight of another cell": bind_no_variables_that_are_read,
    "a closure reads a weight of a later layer": (
        bind_no_variables_that_are_read
    ),
    "hinge looks at all labels": add_up_hinge_losses,
    "squared hinge looks at all labels": add_up_hinge_losses,
    "hinge as a metric": add_up_hinge_losses,
    "a loss object is a metric": add_up_all_metrics,
    "a dropout of two cells in a file": save_seeds_by_cell,
    "seeds of two cells in a file of weights": save_seeds_by_cell,
}


@pytest.mark.parametrize("story", TOLD)
def test_fault_is_found_without_its_cure(story, monkeypatch):
    CURES[story](monkeypatch)
    found = compare.run(TOLD[story])
    if "closure" in story:  # an invariant of traces names it
        assert found.kind == "refused"
        assert "must use a weight of the model by its" in found.reason
        return
    assert found.kind == "failed"
    assert found.reason.startswith(("against Keras", "over K", "after loading"))
