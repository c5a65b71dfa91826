r"""Runs tests at the corners of the range of versions that tfgpipe supports.

    python -m tools.versions
    python -m tools.versions --corners=oldest,nightly --tests=tests/promises

Each corner, a version of Python, TensorFlow and Keras, gets a virtual
environment of its own, into which tfgpipe is installed as a user installs it,
and which is deleted afterwards. Prints what was installed, and how many tests
passed. The Pythons must be there already, on the path or in pyenv's folder; a
corner whose Python is not, or whose packages cannot be installed, is left out,
with the reason.
"""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

from absl import flags

from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import doing
from tools.flags import define

ROOT = pathlib.Path(__file__).parent.parent
NIGHTLY = ["--pre", "tf-nightly", "keras-nightly"]


def _released(tensorflow: str, keras: str) -> list[str]:
    return [f"tensorflow=={tensorflow}.*", f"keras=={keras}.*"]


# Of each, the Python, and what is asked of pip beside tfgpipe.
CORNERS = {
    "oldest": ("3.10", _released("2.18", "3.10")),
    "newest_keras": ("3.11", _released("2.18", "3.15")),
    # TensorFlow 2.21 refuses an older Keras, Python 3.10 a newer one.
    "newest_tensorflow": ("3.10", _released("2.21", "3.12")),
    "middle": ("3.12", _released("2.20", "3.13")),
    "newest": ("3.13", _released("2.21", "3.15")),
    "nightly": ("3.12", NIGHTLY),
}
# What the library promises, where versions could make a difference, in minutes.
TESTS = [
    "tests/tfgpipe/test_internals.py",
    "tests/tfgpipe/test_versions.py",
    "tests/tfgpipe/graphs/test_same_graph.py",
    "tests/tfgpipe/sequence/test_steps.py",
    "tests/promises/test_adapters.py",
    "tests/promises/test_between_layers.py",
    "tests/promises/test_bugs.py",
    "tests/promises/test_functional.py",
    "tests/promises/test_optimizers.py",
    "tests/promises/test_placement.py",
    "tests/promises/test_saving.py",
    "tests/promises/test_state.py",
    "tests/promises/test_storage.py",
]

FLAGS = command_line.new_flags()
define(
    FLAGS,
    corners=(list(CORNERS), "Which ones.", CORNERS),
    tests=(TESTS, "Files and folders of tests."),
    jobs=(os.cpu_count(), "Tests at a time."),
)


class Unavailable(Exception):
    """A corner cannot be tested here; the message says why."""


class Result(NamedTuple):
    """What came out at a corner.

    Attributes:
        versions: What was installed.
        counts: The last line of pytest.
        failures: Lines of pytest's summary.
        is_good: Whether tests were run, and none failed.
    """

    versions: str
    counts: str
    failures: list[str]
    is_good: bool


def _run(*command: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )


def find_python(version: str) -> str:
    """Returns the path of a Python."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python"))),
    ]
    for path in filter(None, candidates):
        # A shim of pyenv is there for versions that are not.
        if _run(path, "--version").stdout.startswith(f"Python {version}."):
            return path
    raise Unavailable(f"there is no Python {version}")


def make_environment(corner: str, folder: pathlib.Path) -> str:
    """Installs tfgpipe and a corner's packages; returns its Python."""
    version, packages = CORNERS[corner]
    _run(find_python(version), "-m", "venv", folder)
    python = str(folder / "bin" / "python")
    tools = [
        f"{name}=={importlib.metadata.version(name)}"
        for name in ("pytest", "pytest-xdist")
    ]
    library = ["--editable", str(ROOT)]
    if packages is NIGHTLY:  # Keras itself would be written over what is new
        orders = [[*packages, *tools], ["--no-deps", *library]]
    else:
        orders = [[*library, *packages, *tools]]
    for order in orders:
        done = _run(python, "-m", "pip", "install", "--quiet", *order)
        if done.returncode:
            raise Unavailable(" ".join(done.stderr.splitlines()[-1:]))
    return python


def run_tests(python: str, tests: list[str], jobs: int) -> Result:
    """Runs tests in an environment."""
    listed = _run(python, "-m", "pip", "list", "--format=freeze").stdout
    shown = r"^(?:tensorflow|tf.nightly|keras|keras.nightly|numpy)==\S+$"
    versions = [_run(python, "--version").stdout.strip()]
    versions += re.findall(shown, listed, re.MULTILINE)
    output = _run(
        python,
        "-m",
        "pytest",
        "--quiet",
        "-p",
        "no:cacheprovider",
        # Another environment's: warnings are not.
        "-W",
        "ignore:tfgpipe has been tested with:UserWarning",
        f"--numprocesses={jobs if jobs > 1 else 0}",
        "--dist=loadgroup",
        *tests,
    ).stdout
    counts = output.rstrip().rpartition("\n")[2]
    return Result(
        ", ".join(versions),
        counts,
        re.findall(r"^(?:FAILED|ERROR) .*$", output, re.MULTILINE),
        " passed" in counts and not re.search("failed|error", counts),
    )


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit code."""
    return command_line.run("tools.versions", FLAGS, __doc__, _test, argv)


def _test(values: flags.FlagValues) -> int:
    code = 0
    for name in values.corners:
        with tempfile.TemporaryDirectory(prefix="tfgpipe-") as folder:
            try:
                with doing(f"installing {name}"):
                    python = make_environment(name, pathlib.Path(folder))
            except Unavailable as error:
                print(f"{name} was left out: {error}")
                continue
            with doing(f"testing with {name}"):
                result = run_tests(python, values.tests, values.jobs)
        line = f"{name}: {result.versions}: {result.counts}"
        print(line, *result.failures, sep="\n")
        code = code if result.is_good else 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
