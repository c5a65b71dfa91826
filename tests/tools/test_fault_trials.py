"""All trials in one command."""

import json

import pytest
from processes import ROOT

from tools import fault_trials
from tools.fault_trials import TRIALS, Trial


@pytest.mark.parametrize("name", TRIALS)
def test_trial_is_of_tests_that_there_are(name):
    for path in TRIALS[name].tests:
        assert (ROOT / path).is_file()
    words = TRIALS[name].having.split(" or ")
    texts = [(ROOT / path).read_text() for path in TRIALS[name].tests]
    for text in texts:
        names = [n for n in text.split("\n") if n.startswith("def test_")]
        assert any(word in n for n in names for word in words)


def test_table_has_what_came_out(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_two.py").write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert not 'wrong'\n"
        "def test_other(): pytest.skip('no')\n"
    )
    path = str(tmp_path / "test_two.py")
    found = {
        "right": Trial("it is", (path,), "right"),
        "wrong": Trial("it is not", (path,)),
        "none": Trial("there is none", (path,), "nothing"),
        "broken": Trial("no file", (str(tmp_path / "test_no.py"),)),
    }
    monkeypatch.setattr(fault_trials, "TRIALS", found)
    words = "fault_trials", "--format=json", "--quick"
    assert fault_trials.main([*words, "--only=right,none"]) == 0
    capsys.readouterr()
    assert fault_trials.main([*words]) == 1
    told = capsys.readouterr()
    [table] = json.loads(told.out)["tables"]
    rows = table["rows"]
    counts = [(r["passed"], r["failed"], r["skipped"]) for r in rows]
    assert counts[:3] == [(1, 0, 0), (1, 1, 1), (0, 0, 0)]
    assert counts[3][1] > 0
    assert "assert not 'wrong'" in told.err
    assert fault_trials.main([*words, "--only=others"]) == 2
    assert "Received: ['others']" in capsys.readouterr().err
