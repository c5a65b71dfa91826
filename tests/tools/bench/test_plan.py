"""What the planner's benchmark compares, without what takes minutes."""

import json

import pytest

from tools.bench import __main__ as bench
from tools.bench import plan, plan_paper
from tools.bench.memory_trial import Job, Outcome, Size, Use

SMALL = Job(Size(8, 2, 4, 16), 2, 2, 4, "1f1b", "never")


def run(capsys, *args):
    code = bench.main(["tools.bench", "plan", "--format=json", *args])
    return code, capsys.readouterr()


def test_cuts_are_the_best_of_all(capsys):
    code, printed = run(capsys, "--table=partition", "--cases=50")
    assert code == 0
    [table] = json.loads(printed.out)["tables"]
    ours, rule = table["rows"][:2]
    assert ours["worst"] == ours["best_share"] == 1
    assert rule["worst"] > 1


def test_histogram_rule_by_hand():
    assert plan._by_histogram([1, 1, 1, 1], 2) == [[1], [1, 1, 1]]


def test_memory_is_compared_device_by_device(monkeypatch, capsys):
    prediction = plan.predicted(SMALL)
    mib = [own.total / 2**20 for own in prediction.memory]
    uses = (Use(mib[0], 0, 0, 0), Use(mib[1] / 2, 0, mib[1] / 2, 0))
    monkeypatch.setattr(plan, "JOBS", [SMALL])
    monkeypatch.setattr(plan.memory_trial, "run", lambda job: Outcome(1, uses))
    code, printed = run(capsys, "--table=memory")
    assert code == 0
    [table] = json.loads(printed.out)["tables"]
    assert [row["error"] for row in table["rows"]] == pytest.approx([0, 0])
    errors = "Errors: median 0.0%, worst 0.0%, of 2 accelerators"
    assert table["notes"][-1] == errors


def test_what_fits_depends_on_the_size_and_on_remat():
    naive, pipeline = (
        next(
            row for row in plan_paper.TABLE_1 if row.k == k and "T" in row.model
        )
        for k in (0, 1)
    )
    naive, pipeline = (r._replace(limit_gib=64) for r in (naive, pipeline))
    fits = [
        plan_paper._fits(row, plan_paper._transformer(size))
        for row, size in ((naive, 1), (naive, 12), (pipeline, 12))
    ]
    assert fits == [True, False, True]


def test_steps_and_waiting_need_runs_of_their_own(capsys):
    code, printed = run(capsys, "--table=steps,waiting")
    assert code == 2
    assert "the CPU can be split once" in printed.err
