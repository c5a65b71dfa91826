r"""Runs all trials of faults, and prints a table.

    python -m tools.fault_trials
    python -m tools.fault_trials --quick
    python -m tools.fault_trials --only=signals,disks --format=json

Each is a test, those that take long are marked slow: `make test` runs the quick
ones, `make test-slow` the rest. Exit code 1 if one fails.
"""

import contextlib
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.etree import ElementTree

from absl import flags

from tfgpipe.commands import command_line
from tfgpipe.commands.command_line import BadFlags
from tools.flags import define
from tools.report import Report, Table, columns, define_format, progress

FLAGS = command_line.new_flags()
define_format(FLAGS)
define(
    FLAGS,
    quick=(False, "Leave out those that take long."),
)
flags.DEFINE_list(
    "only", None, "Names of trials. Default: all.", flag_values=FLAGS
)


class Trial(NamedTuple):
    """A kind of fault.

    Attributes:
        what: What is done, and what has to come out.
        tests: Files of tests, or parts of them.
        having: Which of these, as for `pytest -k`; all by default.
    """

    what: str
    tests: tuple[str, ...]
    having: str = ""


_CLUSTER = "tests/tfgpipe/hosts"
_SAVED = "tests/tfgpipe/checkpoints"
TRIALS = {
    "kills": Trial(
        "SIGKILL while it starts, traces, trains, saves: the same bits",
        ("tests/tools/train/test_kills.py",),
    ),
    "signals": Trial(
        "signals in every phase, once and twice: the code of the table",
        (
            "tests/tools/train/test_ends.py",
            "tests/tfgpipe/callbacks/test_checkpoint.py",
        ),
        "signal or code or interruption or table",
    ),
    "two": Trial(
        "two trainings in one folder: the second is refused",
        (
            "tests/tfgpipe/test_files.py",
            f"{_SAVED}/test_folder.py",
            "tests/tfgpipe/callbacks/test_checkpoint.py",
        ),
        "lock or in_use or that_runs or is_free",
    ),
    "disks": Trial(
        "disks that are full or gone: what was there is whole",
        (
            "tests/tfgpipe/test_files.py",
            "tests/tools/train/test_trainer.py",
            "tests/tools/train/test_ends.py",
        ),
        "full or disk or written or vanishes",
    ),
    "damages": Trial(
        "files damaged at random: named, and healed by the one before",
        ("tests/promises/test_damage.py",),
    ),
    "forgeries": Trial(
        "manifests of others, links, pipes, other names: told",
        (f"{_SAVED}/test_restore.py",),
        "manifest or link",
    ),
    "nonfinite": Trial(
        "rows that are not finite, overflow, or are absurd: as never seen",
        (
            "tests/tfgpipe/model/test_nonfinite.py",
            "tests/tfgpipe/callbacks/test_stop_on_nonfinite.py",
        ),
    ),
    "workers": Trial(
        "workers and controllers killed or stopped: the same bits",
        (f"{_CLUSTER}/test_workers.py", f"{_CLUSTER}/test_progress.py"),
    ),
    "attacks": Trial(
        "strangers on the control port: hung up at",
        (
            f"{_CLUSTER}/test_controller.py",
            f"{_CLUSTER}/test_secret.py",
            f"{_CLUSTER}/test_port_filter.py",
        ),
    ),
    "network": Trial(
        "hosts that vanish, strangers at TensorFlow's ports: 25 s, and none",
        (f"{_CLUSTER}/test_namespaces.py",),
    ),
    "length": Trial(
        "very many steps: memory stays",
        ("tests/promises/test_long.py",),
    ),
}
_COLUMNS = columns(
    "trial | what | passed: passed: ,d | failed: failed: ,d | "
    "skipped: skipped: ,d | seconds: seconds: .0f"
)


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run`."""
    failed: list[str] = []

    def body(values: flags.FlagValues) -> None:
        failed.extend(_run(values))

    code = command_line.run("tools.fault_trials", FLAGS, __doc__, body, argv)
    return code or bool(failed)


def _run(values: flags.FlagValues) -> list[str]:
    """Runs trials; returns the names of those that failed."""
    names = values.only or [*TRIALS]
    if unknown := sorted({*names} - {*TRIALS}):
        raise BadFlags(
            f"--only must name trials, of {[*TRIALS]}. Received: {unknown}."
        )
    root = pathlib.Path(__file__).parent.parent
    if not (root / "tests").is_dir():
        raise BadFlags(
            "The trials are tests, which are not installed. Expected: a folder "
            f"{root / 'tests'}. Run this from a copy of the repository."
        )
    rows = [
        tried(name, root, values.quick) for name in progress(names, "trials")
    ]
    report = Report("fault_trials", values.format)
    report.add(Table("trials", "What a run was put through", _COLUMNS, rows))
    report.print()
    return [row["trial"] for row in rows if row["failed"]]


def tried(name: str, root: pathlib.Path, quick: bool) -> dict[str, Any]:
    """Runs a trial; returns a row of the table."""
    trial = TRIALS[name]
    start = time.monotonic()
    with _results() as path:
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={path}"]
        command += ["-m", "not slow" if quick else "slow or not slow"]
        command += ["-k", trial.having] if trial.having else []
        done = subprocess.run(
            [*command, *trial.tests],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        counts = _counts(path)
    counts = counts or {"passed": 0, "failed": 0, "skipped": 0}
    if done.returncode not in (0, 5):  # 5: no test is left
        counts["failed"] = max(1, counts["failed"])
        print(done.stdout, file=sys.stderr)
    seconds = time.monotonic() - start
    return {"trial": name, "what": trial.what, **counts, "seconds": seconds}


@contextlib.contextmanager
def _results() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder, "results.xml")


def _counts(path: pathlib.Path) -> dict[str, int] | None:
    """How many tests passed and so on; None if pytest has not said."""
    if not path.exists():
        return None
    suite = next(ElementTree.parse(path).iter("testsuite"))
    total, bad, skipped = (
        sum(int(suite.get(key, 0)) for key in keys)
        for keys in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return {
        "passed": total - bad - skipped,
        "failed": bad,
        "skipped": skipped,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv))
