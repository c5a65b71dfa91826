"""Goals beside what was reached, without what takes minutes."""

import json
import pathlib
import re
import subprocess

import pytest

from tools.bench import __main__ as bench
from tools.bench import all as every

ROOT = pathlib.Path(__file__).parents[3]


def goal(limit, **options):
    return every.Goal("it", "t", {"k": 2}, "x", limit, 1.0, **options)


def rows(*values):
    return {"t": [{"k": 1, "x": 99.0}, *({"k": 2, "x": v} for v in values)]}


def test_worst_row_that_counts_is_compared_with_the_goal():
    most, least = goal(1.5), goal(1.5, is_least=True)
    assert most.reached(rows(1.0, -2.0, None)) == 2.0
    assert least.reached(rows(1.0, 2.0)) == 1.0
    assert most.is_met(1.5) and not most.is_met(1.51)
    assert least.is_met(1.5) and not least.is_met(1.49)


def test_what_was_not_measured_is_missed():
    found = goal(1.5).reached({})
    assert not goal(1.5).is_met(found) and not goal(0, is_least=True).is_met(
        found
    )


def test_table_has_goals_numbers_and_what_failed(monkeypatch, capsys):
    asked = []

    def ran(words, **options):
        asked.append(words[3:])
        if words[3] == "bad":
            return subprocess.CompletedProcess(words, 2, "", "x\nno such flag")
        tables = [{"name": "t", "rows": rows(1.25)["t"]}]
        printed = json.dumps({"tables": tables})
        return subprocess.CompletedProcess(words, 0, printed, "")

    monkeypatch.setattr(every.subprocess, "run", ran)
    monkeypatch.setattr(
        every,
        "RUNS",
        [
            every.Run("good", "--part=x", "--rounds=2", [goal(1.5), goal(1.0)]),
            every.Run("bad", "", "", [goal(1.0)]),
        ],
    )
    words = ["tools.bench", "all", "--format=json"]
    assert bench.main([*words, "--quick"]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    assert [row["met"] for row in table["rows"]] == ["", "missed", "missed"]
    assert [row["reached"] for row in table["rows"]] == [1.25, 1.25, None]
    assert table["notes"] == ["bad: no such flag"]
    assert asked[0] == ["good", "--format=json", "--part=x", "--rounds=2"]
    assert bench.main(words) == 0
    assert asked[2] == ["good", "--format=json", "--part=x"]


@pytest.mark.parametrize("run", every.RUNS, ids=lambda run: run.command)
def test_flags_are_known_and_what_was_reported_is_in_the_docs(run):
    words = f"{run.part} {run.quick}".split()
    module = bench.command_line.importlib.import_module(
        f"tools.bench.{run.command}"
    )
    known = set(module.FLAGS)
    assert {re.match(r"--(\w+)", word)[1] for word in words} <= known
    pages = [*(ROOT / "docs").glob("measurements*.md")]
    page = "".join(page.read_text() for page in pages)
    for one in run.goals:
        if one.reported is not None:
            forms = [f"{one.reported:.{n}f}" for n in range(4)]
            right = [form for form in forms if float(form) == one.reported]
            right.append(f"{100 * one.reported:g}%")
            told = "|".join(map(re.escape, right))
            assert re.search(rf"(?<![\d.,])({told})(?![\d.,]\d)", page), one
