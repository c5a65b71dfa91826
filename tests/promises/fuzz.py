"""Random cases against plain Keras; failures are made small.

make fuzz FUZZ_FLAGS="--count=2000 --seed=0 --jobs=2"

Case I of seed S is always the same: `--case=S:I` runs and shrinks it alone;
`--case` with what a failure prints, a case as JSON, runs that. Leave out cases
with some tags to look behind what is known: `--without="layer branch,K 1"`; run
those alone that have one of some tags to look at them: `--only="layer router"`.
`--trial` draws layers for `trial_fuzz.py` instead.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import os
import pathlib
import re
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
# Processes that are started here find the same modules.
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import conftest  # noqa: F401 (eight logical devices)
import workers
from case import Case
from generate import generate
from outcome import KINDS, Outcome
from shrink import shrink

Found = tuple[int, Case, Outcome]


def main() -> int:
    flags = _flags()
    if flags.trial:
        import trial_fuzz  # starts TensorFlow

        return trial_fuzz.main(flags)
    if flags.case:
        return _one(flags)
    start, found, seconds = time.monotonic(), [], 0.0
    cases = _cases(flags)
    with contextlib.suppress(KeyboardInterrupt):  # tables of what there is
        for job, outcome, cpu in workers.run_all(cases, flags.jobs):
            index, case = job
            seconds += cpu
            found.append((index, case, outcome))
            _progress(found, flags, outcome, index, time.monotonic() - start)
    _table(found)
    print(f"\n{seconds / max(1, len(found)):.1f} CPU seconds a case")
    return _failures(found, flags)


def _flags() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--wide", action=argparse.BooleanOptionalAction, default=True
    )
    parser.add_argument(
        "--odd", action=argparse.BooleanOptionalAction, default=True
    )
    parser.add_argument("--trial", action="store_true")
    parser.add_argument("--case", help="SEED:INDEX, or JSON")
    parser.add_argument("--without", default="", help="tags, with commas")
    parser.add_argument("--only", default="", help="tags, with commas")
    parser.add_argument("--shrink", type=int, default=60, help="at most")
    return parser.parse_args()


def _cases(flags: Any) -> Any:
    without, only = _tags(flags.without), _tags(flags.only)
    for index in range(flags.first, flags.first + flags.count):
        case = generate(flags.seed, index, flags.wide, flags.odd)
        tags = set(case.tags())
        if not without & tags and (only & tags or not only):
            yield index, case


def _tags(text: str) -> set[str]:
    return {tag.strip() for tag in text.split(",") if tag.strip()}


def _one(flags: Any) -> int:
    """Runs one case, here, and shrinks it if it was drawn and fails."""
    import compare

    is_drawn = not flags.case.startswith("{")
    if is_drawn:
        flags.seed, index = map(int, flags.case.split(":"))
        case = generate(flags.seed, index, flags.wide, flags.odd)
    else:
        index, case = 0, Case.parse(flags.case)
    print(case)
    outcome = compare.run(case)
    print(outcome.kind, outcome.reason)
    print(outcome.detail, flush=True)
    if is_drawn:
        return _failures([(index, case, outcome)], flags)
    return int(outcome.kind == "failed")


# ---------------------------------------------------------------------- output
def _progress(
    found: list[Found], flags: Any, outcome: Outcome, index: int, passed: float
) -> None:
    if outcome.kind == "failed":
        print(f"{flags.seed}:{index} failed: {outcome.reason}", flush=True)
    if len(found) % 20 == 0:
        counts = collections.Counter(o.kind for _, _, o in found)
        text = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
        print(f"{len(found)} cases, {passed:.0f} s: {text}", flush=True)


def _table(found: list[Found]) -> None:
    """How many cases had what, and what became of them."""
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


def _failures(found: list[Found], flags: Any) -> int:
    """Small cases that fail, and which others they may explain."""
    failed = [f for f in found if f[2].kind == "failed"]
    failed.sort(key=lambda f: len(str(f[1])))
    run = workers.Runner() if failed and flags.shrink else None
    while failed and run:
        index, case, outcome = failed[0]
        reason = kind_of(outcome)
        fails = functools.partial(_fails, run, reason)
        small, tried = shrink(case, fails, flags.shrink)
        alike = [f for f in failed if explains(small, reason, f)]
        failed = [f for f in failed if f not in alike and f[0] != index]
        print(f"\n{flags.seed}:{index} failed: {outcome.reason}")
        print(f"  after {tried} simpler ones: --case='{small}'")
        others = [f"{flags.seed}:{f[0]}" for f in alike if f[0] != index]
        print("  perhaps the same:", *others or ["none"], flush=True)
    if run:
        run.worker.stop()
    return int(any(o.kind == "failed" for _, _, o in found))


def explains(small: Case, reason: str, other: Found) -> bool:
    """Whether a case has all that a small one needs to fail."""
    _, case, outcome = other
    usual = {tag for tag in small.tags() if tag.startswith("K ")}
    usual.update(Case(layers=()).tags(), ["layer dense"])
    needed = set(small.tags()) - usual
    return kind_of(outcome) == reason and needed <= set(case.tags())


def kind_of(outcome: Outcome) -> str:
    """What failed, without which numbers, and by how much."""
    return re.sub(": [^:]* differ by .*", "", outcome.reason)


def _fails(run: workers.Runner, reason: str, case: Case) -> bool:
    outcome = run(case)
    return outcome.kind == "failed" and kind_of(outcome) == reason


if __name__ == "__main__":
    sys.exit(main())
