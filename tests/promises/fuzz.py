"""Random cases against plain Keras.

make fuzz FUZZ_FLAGS="--count=2000 --seed=0 --jobs=2"

Case I of seed S is always the same: `--case=S:I` runs it alone; `--case` with
what a failure prints, a case as JSON, runs that, or what is made of it by hand.
Leave out cases with some tags to look behind what is known:
`--without="layer branch,num_partitions 1"`; run those alone that have one of
some tags to look at them: `--only="layer router"`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
# Processes that are started here find the same modules.
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import conftest  # noqa: F401 (eight logical devices)
from case import Case
from compare import KINDS, Outcome, run
from generate import generate

CASES_EACH = 40  # of a process, which keeps every graph
LIMIT = 300.0  # seconds for a case
HANGS = Outcome("failed", f"hangs over {LIMIT:.0f} s, or its process died")
Found = tuple[int, Case, Outcome]


def run_all(cases: list[tuple[int, Case]], jobs: int) -> Iterator[Found]:
    """Runs cases in processes: one that crashes or hangs is found, too."""
    context = multiprocessing.get_context("spawn")
    while cases:
        with context.Pool(jobs, maxtasksperchild=CASES_EACH) as pool:
            results = [pool.apply_async(run, (case,)) for _, case in cases]
            for result in results:
                index, case = cases.pop(0)
                try:
                    yield index, case, result.get(LIMIT)
                except multiprocessing.TimeoutError:
                    yield index, case, HANGS
                    break


def main() -> int:
    flags = _flags()
    if flags.case:
        return _one(flags)
    start, found = time.monotonic(), []
    with contextlib.suppress(KeyboardInterrupt):  # tables of what there is
        for one in run_all(_cases(flags), flags.jobs):
            found.append(one)
            _progress(found, flags, time.monotonic() - start)
    _table(found)
    failed = [(i, case) for i, case, o in found if o.kind == "failed"]
    for index, case in failed:
        print(f"{flags.seed}:{index} failed: --case='{case}'")
    return int(bool(failed))


def _flags() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--case", help="SEED:INDEX, or JSON")
    parser.add_argument("--without", default="", help="tags, with commas")
    parser.add_argument("--only", default="", help="tags, with commas")
    return parser.parse_args()


def _cases(flags: Any) -> list[tuple[int, Case]]:
    without, only = _tags(flags.without), _tags(flags.only)
    found = []
    for index in range(flags.first, flags.first + flags.count):
        case = generate(flags.seed, index)
        tags = set(case.tags())
        if not without & tags and (only & tags or not only):
            found.append((index, case))
    return found


def _tags(text: str) -> set[str]:
    return {tag.strip() for tag in text.split(",") if tag.strip()}


def _one(flags: Any) -> int:
    """Runs one case, here."""
    if flags.case.startswith("{"):
        case = Case.parse(flags.case)
    else:
        case = generate(*map(int, flags.case.split(":")))
    outcome = run(case)
    print(case, outcome.kind, outcome.reason, outcome.detail, sep="\n")
    return int(outcome.kind == "failed")


# ---------------------------------------------------------------------- output
def _progress(found: list[Found], flags: Any, passed: float) -> None:
    index, _, outcome = found[-1]
    if outcome.kind == "failed":
        print(f"{flags.seed}:{index} failed: {outcome.reason}", flush=True)
    if len(found) % 20 == 0:
        counts = collections.Counter(o.kind for _, _, o in found)
        text = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
        print(f"{len(found)} cases, {passed:.0f} s: {text}", flush=True)


def _table(found: list[Found]) -> None:
    """Prints how many cases had what, and what became of them."""
    rows: dict[str, Any] = collections.defaultdict(collections.Counter)
    reasons: Any = collections.Counter()
    for _, case, outcome in found:
        for tag in ["all", *case.tags()]:
            rows[tag][outcome.kind] += 1
        if outcome.kind in ("refused", "skipped", "unstable"):
            reasons[outcome.kind, outcome.reason] += 1
    width = max(map(len, rows), default=0)
    print("\n" + " " * width, *(f"{kind:>9}" for kind in KINDS))
    for tag in sorted(rows, key=lambda tag: (tag != "all", tag)):
        counts = (f"{rows[tag][kind] or '':>9}" for kind in KINDS)
        print(f"{tag:{width}}", *counts)
    print()
    for (kind, reason), count in reasons.most_common():
        print(f"{count:4} {kind}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
