"""The plan beside a grid: of a small model, on the devices of the tests."""

import json

import pytest
from keras import layers as kl

from tools.bench import __main__ as bench
from tools.bench import plan_grid
from tools.bench.models import BenchModel

SMALL = BenchModel(
    "four dense layers",
    lambda: [kl.Dense(8, "relu") for _ in range(4)],
    (8,),
    (8,),
    "mse",
    32,
)


@pytest.mark.slow
def test_plan_is_beside_the_best_of_all_settings(monkeypatch, capsys):
    monkeypatch.setattr(plan_grid, "MODELS", {"small": SMALL})
    monkeypatch.setattr(plan_grid, "MICRO_BATCHES", (1, 2))
    monkeypatch.setattr(plan_grid.local, "split_cpu", lambda count: None)
    words = "plan --table=grid --format=json --rounds=1 --seconds=0.2"
    assert bench.main(["tools.bench", *words.split()]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    plan, best = table["rows"]
    assert (plan["chosen_by"], best["chosen_by"]) == ("plan", "grid")
    assert best["ratio"] == 1.0 <= plan["ratio"]
    assert plan["step_ms"] == pytest.approx(
        plan["ratio"] * best["step_ms"], rel=1e-3
    )
    settings = [(s[4], s[1], s[3]) for s in plan["grid"]]
    assert len(settings) == len(set(settings)) == 2 * 5
    assert sum(len(row["layers_per_cell"]) for row in table["rows"]) == (
        plan["k"] + best["k"]
    )
    assert f"{plan['ratio']:.3f} of the best" in table["notes"][-1]
