"""The images and texts of the results are tiny."""

import dataclasses

import pytest
import runs

from params import registry


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path_factory):
    """The images of the results, and the text, are tiny ones."""
    runs.use(monkeypatch, tmp_path_factory)
    for name, experiment in {
        "image.amoebanet_d_fashion": runs.IMAGE,
        "lm.austen": runs.LM,
    }.items():
        registered = dataclasses.replace(experiment, name=name)
        monkeypatch.setitem(registry._EXPERIMENTS, name, registered)
