"""Which tests `make test-slow` runs because of what they take.

    python -m pytest --durations=0 --durations-min=1 -n 2 > times.txt
    python tests/slow_tests.py times.txt [seconds]

writes `slow_tests.txt` anew: tests that took so many seconds, 3 by default, by
their ids; one without parameters is all of a test. Those that it has are not in
a quick run, so they stay. `KEPT` are quick tests whatever they take.
"""

import pathlib
import re
import sys

LIST = pathlib.Path(__file__).with_suffix(".txt")
KEPT = (
    "tests/test_docs.py",  # rules, as in the next one
    "tests/promises/test_architecture.py",
    "tests/journeys/test_distillation.py",
    # A case for each kind of what they promise.
    "tests/promises/test_functional.py",
    "tests/promises/test_own_call.py",
    "tests/promises/test_transparency.py",
)
_LINE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(tests/\S.*)")


def slow_tests():
    """The ids of the list."""
    return LIST.read_text().split("\n")[:-1]


def measured(text, seconds):
    """The ids of tests that took so long, by pytest's durations."""
    took = {}
    for line in text.splitlines():
        if match := _LINE.fullmatch(line.rstrip()):
            took[match[2]] = took.get(match[2], 0.0) + float(match[1])
    return {
        name
        for name, total in took.items()
        if total >= seconds and not name.startswith(KEPT)
    }


if __name__ == "__main__":
    limit = float(sys.argv[2]) if len(sys.argv) > 2 else 3.0
    found = measured(pathlib.Path(sys.argv[1]).read_text(), limit)
    found |= {*slow_tests()} if LIST.exists() else set()
    LIST.write_text("".join(f"{name}\n" for name in sorted(found)))
