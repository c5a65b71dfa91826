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
import time
from typing import Any, NamedTuple

from absl import flags

from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import doing
from tools.flags import define
from tools.report import Table, columns

ROOT = pathlib.Path(__file__).parent.parent


class Corner(NamedTuple):
    """Versions that are tested together.

    Attributes:
        python: Such as "3.10".
        packages: What is asked of pip beside tfgpipe.
        what: Why it is a corner.
        is_nightly: Whether the packages have other names than those that
            tfgpipe requires, and stand for them.
    """

    python: str
    packages: list[str]
    what: str
    is_nightly: bool = False


def _released(python: str, tensorflow: str, keras: str, what: str) -> Corner:
    packages = [f"tensorflow=={tensorflow}.*", f"keras=={keras}.*"]
    return Corner(python, packages, what)


CORNERS = {
    "oldest": _released("3.10", "2.18", "3.10", "the oldest of all three"),
    "newest_keras": _released(
        "3.11", "2.18", "3.15", "the oldest TensorFlow, the newest Keras"
    ),
    "newest_tensorflow": _released(
        # TensorFlow 2.21 refuses an older Keras, Python 3.10 a newer one.
        "3.10",
        "2.21",
        "3.12",
        "the newest TensorFlow, the oldest Keras that it takes",
    ),
    "middle": _released("3.12", "2.20", "3.13", "between the others"),
    "newest": _released("3.13", "2.21", "3.15", "the newest of all three"),
    "nightly": Corner(
        "3.12",
        ["--pre", "tf-nightly", "keras-nightly"],
        "what comes next",
        is_nightly=True,
    ),
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
# What pytest is run with here, that the tests need.
TEST_TOOLS = ["pytest", "pytest-xdist"]
SHOWN = ["tensorflow", "tf-nightly", "keras", "keras-nightly", "numpy"]

FLAGS = command_line.new_flags()
define(
    FLAGS,
    corners=(
        list(CORNERS),
        "Which ones. "
        + "; ".join(
            f"{name}: {corner.what}" for name, corner in CORNERS.items()
        )
        + ".",
    ),
    tests=(TESTS, "Files and folders of tests."),
    jobs=(os.cpu_count(), "Tests at a time."),
)


class Unavailable(Exception):
    """A corner cannot be tested here; the message says why."""


class Result(NamedTuple):
    """What came out at a corner.

    Attributes:
        versions: Of Python and of the packages that are shown.
        counts: Of tests, by what became of them: "passed", "failed" and so on.
        seconds: That the tests took.
        failures: Lines of pytest's summary.
    """

    versions: dict[str, str]
    counts: dict[str, int]
    seconds: float
    failures: list[str]

    @property
    def is_good(self) -> bool:
        """Whether tests were run, and none failed."""
        bad = self.counts.get("failed", 0) + self.counts.get("errors", 0)
        return self.counts.get("passed", 0) > 0 and not bad


def _output(*command: str | pathlib.Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout


def find_python(version: str) -> str:
    """Returns the path of a Python."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python"))),
    ]
    for path in filter(None, candidates):
        # A shim of pyenv is there for versions that are not.
        if _output(path, "--version").startswith(f"Python {version}."):
            return path
    raise Unavailable(f"there is no Python {version}")


def make_environment(corner: Corner, folder: pathlib.Path) -> str:
    """Installs tfgpipe and a corner's packages; returns its Python."""
    subprocess.run(
        [find_python(corner.python), "-m", "venv", folder], check=True
    )
    python = str(folder / "bin" / "python")
    tools = [f"{t}=={importlib.metadata.version(t)}" for t in TEST_TOOLS]
    library = ["--editable", str(ROOT)]
    if corner.is_nightly:
        # Keras itself would be written over what stands for it.
        _install(python, [*corner.packages, *tools])
        _install(python, ["--no-deps", *library])
    else:
        _install(python, [*library, *corner.packages, *tools])
    return python


def _install(python: str, arguments: list[str]) -> None:
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if installed.returncode:
        lines = installed.stderr.splitlines()
        errors = [line for line in lines if line.startswith("ERROR")]
        raise Unavailable(" ".join(errors or lines[-1:]))


def versions_of(python: str) -> dict[str, str]:
    """Returns the versions of Python, and of the packages that are shown."""
    listed = _output(python, "-m", "pip", "list", "--format=freeze")
    found = dict(re.findall(r"^(\S+)==(\S+)$", listed, re.MULTILINE))
    found = {name.replace("_", "-"): found[name] for name in found}
    version = _output(python, "--version").split()[1]
    return {"python": version, **{k: found[k] for k in SHOWN if k in found}}


def run_tests(python: str, tests: list[str], jobs: int) -> Result:
    """Runs tests in an environment."""
    started = time.monotonic()
    output = subprocess.run(
        [
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
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout
    return Result(
        versions_of(python),
        counts_in(output),
        time.monotonic() - started,
        re.findall(r"^(?:FAILED|ERROR) .*$", output, re.MULTILINE),
    )


def counts_in(output: str) -> dict[str, int]:
    r"""What the last line of pytest counts.

    Example:

    >>> counts_in("...\n1 failed, 12 passed, 3 skipped in 4.50s\n")
    {'failed': 1, 'passed': 12, 'skipped': 3}
    """
    last = output.rstrip().rpartition("\n")[2]
    return {
        what if what != "error" else "errors": int(number)
        for number, what in re.findall(r"(\d+) ([a-z]+)", last)
    }


def row(name: str, result: Result) -> dict[str, Any]:
    """Returns a row of the table."""
    versions = result.versions
    return {
        "corner": name,
        **versions,
        "tensorflow": versions.get("tensorflow", versions.get("tf-nightly")),
        "keras": versions.get("keras-nightly", versions.get("keras")),
        **dict.fromkeys(("passed", "failed", "skipped"), 0),
        **result.counts,
        "seconds": result.seconds,
    }


_COLUMNS = columns(
    "corner | python: Python | tensorflow: TensorFlow | keras: Keras | "
    "numpy: NumPy | passed | failed | skipped | seconds: tests took s: .0f"
)


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit code."""
    return command_line.run("tools.versions", FLAGS, __doc__, _run, argv)


def _run(values: flags.FlagValues) -> None:
    unknown = [name for name in values.corners if name not in CORNERS]
    if unknown:
        raise ValueError(
            f"--corners must be some of {', '.join(CORNERS)}. Received: "
            f"{', '.join(unknown)}."
        )
    bad, left_out = [], []
    table = Table("versions", "", _COLUMNS)
    for name in values.corners:
        with tempfile.TemporaryDirectory(prefix="tfgpipe-") as folder:
            try:
                with doing(f"installing {name}"):
                    python = make_environment(
                        CORNERS[name], pathlib.Path(folder)
                    )
            except Unavailable as error:
                left_out.append(f"{name} was left out: {error}")
                continue
            with doing(f"testing with {name}"):
                result = run_tests(python, values.tests, values.jobs)
        table.rows.append(row(name, result))
        bad += [] if result.is_good else [name, *result.failures]
    print(table.markdown(), "", *left_out, *bad, sep="\n")
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
