"""What the planner's benchmark compares, without what takes minutes."""

import json

import pytest

from tools.bench import __main__ as bench
from tools.bench import plan
from tools.bench.memory_trial import Job, Outcome, Size, Use

SMALL = Job(Size(8, 2, 4, 16), 2, 2, 4, "1f1b", "never")


def run(capsys, *args):
    code = bench.main(["tools.bench", "plan", "--format=json", *args])
    return code, capsys.readouterr()


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
