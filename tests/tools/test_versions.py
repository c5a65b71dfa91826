"""Which corners are tested, with which Python, and what is told of them."""

import pathlib

import pytest

from tfgpipe.versions import KERAS, TENSORFLOW
from tools import versions
from tools.versions import CORNERS, Result, Unavailable

ROOT = pathlib.Path(versions.__file__).parent.parent
RESULT = Result(
    {"python": "3.10.13", "tensorflow": "2.18.1", "keras": "3.10.0"},
    {"passed": 12, "skipped": 3},
    61.4,
    [],
)


def test_corners_reach_both_ends_of_what_is_supported():
    asked = {p for corner in CORNERS.values() for p in corner.packages}
    for name, supported in (("tensorflow", TENSORFLOW), ("keras", KERAS)):
        for end in (supported.oldest, supported.newest):
            assert f"{name}=={'.'.join(map(str, end))}.*" in asked
    pythons = {corner.python for corner in CORNERS.values()}
    setup = (ROOT / "setup.py").read_text()
    assert all(f"Python :: {version}" in setup for version in pythons)


def run(monkeypatch, result, *words):
    """Runs the command where nothing is installed or tested."""
    made = []

    def make(corner, folder):
        if corner is CORNERS["nightly"]:
            raise Unavailable("ERROR: no tf-nightly")
        made.append(corner)
        return "python"

    monkeypatch.setattr(versions, "make_environment", make)
    monkeypatch.setattr(versions, "run_tests", lambda *_: result)
    return versions.main(["versions", *words]), made


def test_corner_that_cannot_be_made_is_left_out(monkeypatch, capsys):
    code, made = run(monkeypatch, RESULT, "--corners=oldest,nightly")
    assert (code, made) == (0, [CORNERS["oldest"]])
    shown = capsys.readouterr().out
    assert "| oldest | 3.10.13 |" in shown
    assert "nightly was left out: ERROR: no tf-nightly" in shown


def test_failures_are_listed_and_exit_with_1(monkeypatch, capsys):
    bad = RESULT._replace(counts={"failed": 1}, failures=["FAILED a.py::b"])
    with pytest.raises(SystemExit, match="1"):
        run(monkeypatch, bad, "--corners=oldest")
    assert capsys.readouterr().out.endswith("oldest\nFAILED a.py::b\n")
