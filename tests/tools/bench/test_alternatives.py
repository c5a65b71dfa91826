"""The same models by tfgpipe and by what else there is."""

import copy
import json

import numpy as np
import pytest

from tools.bench import __main__ as bench
from tools.bench import alternatives
from tools.bench.cases import Results, run_cases


def cases_of(path, model="decoder"):
    values = copy.deepcopy(alternatives.FLAGS)
    values(["alternatives", "--small", "--rounds=1", f"--output={path}"])
    return alternatives._cases(model, values)


def test_ways_are_beside_plain_keras(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    results = Results(path)
    for index, case in enumerate(cases_of(path)):
        np.savez(case.keep, np.full(3, 1.0), np.full(2, 2 + 0.1 * index))
        result = {
            "step_s": 0.1 * (1 + index),
            "cpu_s": 0.2,
            "losses": [2.0, 1.0 + 0.01 * index],
            "held_mib": 10 / case.k,
        }
        results.add(case, result)
        results.add(alternatives._exact(case), {"mib": [100]})
    words = ["--small", "--rounds=1", "--table", "--format=json"]
    assert (
        bench.main(["bench", "alternatives", *words, f"--output={path}"]) == 0
    )
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    rows = table["rows"]
    assert [row["way"] for row in rows] == [
        "Keras on TensorFlow",
        "tfgpipe, K = 2, M = 4",
        "Keras on TensorFlow, `RematScope`, 4 accumulated gradients",
        "Keras on JAX",
        "Keras on JAX, `ModelParallel`",
    ]
    assert [row["ratio"] for row in rows] == pytest.approx([1, 2, 3, 4, 5])
    assert rows[1]["held_mib"] == rows[4]["held_mib"] == 5
    assert rows[3]["loss_difference"] == pytest.approx(0.03)
    assert rows[3]["difference"] == pytest.approx(0.3)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["decoder", "small_unet"])
def test_ways_on_tensorflow_train_alike(model, tmp_path):
    path = tmp_path / "results.jsonl"
    cases, results = cases_of(path, model)[:3], Results(path)
    cases.append(alternatives._exact(cases[1]))
    run_cases(cases, results, num_processes=1)
    plain, *others, exact = map(results.result_of, cases)
    for result in others:
        # A micro-batch of the U-Net is normalised by its own moments.
        tolerance = 1e-3 if model == "decoder" else 0.3
        assert result["losses"] == pytest.approx(plain["losses"], rel=tolerance)
    assert others[0]["held_mib"] < plain["held_mib"]
    assert exact["mib"][0] > 0
