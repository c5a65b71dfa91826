"""Cases on a GPU: what is run, what is kept, and the tables."""

import copy
import dataclasses
import json

import pytest

from tools.bench import __main__ as bench
from tools.bench import gpu, table1
from tools.bench.case_worker import Case
from tools.bench.cases import Results, run_cases

SMALL = Case("lm.transformer_3_small", rows=8, is_small=True, rounds=1, steps=1)
CASES = [
    dataclasses.replace(SMALL, library="keras"),
    dataclasses.replace(SMALL, k=2, m=4),
]


def test_cases_are_trained_once_and_alike(tmp_path):
    path = tmp_path / "results.jsonl"
    run_cases(CASES[1:], Results(path), num_processes=1)
    with path.open("a") as file:
        file.write('{"case": {"model"')  # the machine was taken away
    results = Results(path)
    (before,) = results.lines
    run_cases(CASES, results, num_processes=2)
    assert results.lines[0] == before and len(results.lines) == 2
    plain, pipeline = map(results.result_of, CASES)
    for result in (plain, pipeline):
        assert result["step_s"] > 0 and result["first_s"] > result["step_s"]
        assert result["operations"] > 100 and result["mib"] == []
    assert pipeline["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert len(pipeline["plan_mib"]) == 2


def result(step_s, **others):
    return {"step_s": step_s, "mib": [2048], "plan_mib": [1024], **others}


def test_steps_are_beside_keras_and_beside_one_cell(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    measured = [
        (Case(library="keras"), result(0.1)),
        (Case(), result(0.12)),
        (Case(library="keras", rows=8), result(0.03)),
        (Case(m=4), result(0.15)),
        (Case(m=4, k=4, limit_mib=16384), result(0.18)),
        (Case(m=8), {"error": "does not fit", "why": ""}),
    ]
    for case, found in measured:
        results.add(case, found)
    rows = gpu.rows_of([*(c for c, _ in measured), Case(m=16)], results)
    ratios = [(row.get("of_keras"), row.get("of_k_1")) for row in rows]
    assert ratios == [
        (pytest.approx(1.0), None),
        (pytest.approx(1.2), None),
        (pytest.approx(1.0), None),
        (pytest.approx(1.25), None),
        (pytest.approx(1.25 * 1.2), pytest.approx(1.2)),
        (None, None),
    ]
    assert rows[0]["gib"] == "2" and rows[0]["plan_gib"] == "1"
    assert rows[-1]["name"] == "GPipe: does not fit"


@pytest.mark.parametrize(
    ("command", "flag", "count"),
    [
        ("gpu", "--part=whole", 8),
        ("gpu", "--part=split", 9),
        ("table1", "--gpu", 8),
    ],
)
def test_table_is_printed_from_the_file_alone(
    command, flag, count, tmp_path, capsys
):
    path = tmp_path / "results.jsonl"
    module = {"gpu": gpu, "table1": table1}[command]
    words = ["bench", command, flag, f"--output={path}", "--table"]
    values = copy.deepcopy(module.FLAGS)
    values(words[1:])
    cases = module.list_cases(values)
    results = Results(path)
    for case in cases:
        results.add(case, result(0.5, card="H200"))
    assert bench.main(words) == 0
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("H200") and len(lines) == 2 + count
    assert json.loads(path.read_text().splitlines()[0])["step_s"] == 0.5


def test_most_important_cases_come_first():
    values = copy.deepcopy(gpu.FLAGS)
    values(["gpu", "--small"])
    first, second, *rest = gpu.list_cases(values)
    assert (first.library, second.library) == ("keras", "gpipe")
    assert first.jit_compile == second.jit_compile == "auto"
    assert all(case.is_small for case in rest) and len(rest) > 25
    keys = [json.dumps(dataclasses.asdict(c), sort_keys=True) for c in rest]
    assert len(set(keys)) == len(keys)
