"""Tokens a second of groups of prompts."""

import numpy as np
import pytest

from tools.bench import generate


def test_waiting_task_generates_as_it_is(tables):
    task = generate.WaitingTask(2, 1e-4)
    x = generate._prompts(2, 3)
    found = task.generate(x, stop_token_ids=None)["token_ids"]
    assert found.shape == (2, 7)
    np.testing.assert_array_equal(found[:, :4], 1)
    rows = tables(
        "generate",
        "--part=timed",
        "--k=2",
        "--groups=1,2",
        "--rows=1",
        "--tokens=4",
        "--cell_ms=1",
        "--rounds=1",
    )["timed"]
    assert [row["bound"] for row in rows] == [1, pytest.approx(16 / 9, 1e-4)]
    assert all(row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.slow
def test_generation_is_measured_beside_keras(tables):
    (one, two) = tables(
        "generate",
        "--part=keras",
        "--units=16",
        "--sampler=greedy",
        "--rows=2",
        "--tokens=4",
        "--rounds=1",
    )["keras"]
    assert (one["prompts"], two["prompts"]) == (2, 4)
    assert one["ratio"] > 0 and two["ratio"] > 0
