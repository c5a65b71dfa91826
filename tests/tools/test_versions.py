"""Which corners are tested, with which Python, and what is told of them."""

import pathlib

from tfgpipe.versions import KERAS, TENSORFLOW
from tools import versions
from tools.versions import CORNERS, Result, Unavailable

SETUP = pathlib.Path(versions.__file__).parents[1] / "setup.py"


def test_corners_reach_both_ends_of_what_is_supported():
    asked = {
        package for _, packages in CORNERS.values() for package in packages
    }
    for name, supported in (("tensorflow", TENSORFLOW), ("keras", KERAS)):
        for end in (supported.oldest, supported.newest):
            assert f"{name}=={'.'.join(map(str, end))}.*" in asked
    setup = SETUP.read_text()
    assert all(f"Python :: {python}" in setup for python, _ in CORNERS.values())


def test_corners_are_told_and_failures_exit_with_1(monkeypatch, capsys):
    def make(corner, folder):
        if corner == "nightly":
            raise Unavailable("ERROR: no tf-nightly")
        return "python"

    result = Result("Python 3.10.13, keras==3.10.0", "12 passed", [], True)
    monkeypatch.setattr(versions, "make_environment", make)
    monkeypatch.setattr(versions, "run_tests", lambda *_: result)
    words = ["versions", "--corners=oldest,nightly"]
    assert versions.main(words) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "oldest: Python 3.10.13, keras==3.10.0: 12 passed"
    assert shown[1] == "nightly was left out: ERROR: no tf-nightly"
    result = result._replace(failures=["FAILED a.py::b"], is_good=False)
    assert versions.main(words) == 1
    assert "FAILED a.py::b" in capsys.readouterr().out
