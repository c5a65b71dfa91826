"""How the programs get their orders, and how they answer.

The order is on the command line. A program does some steps, says `READY {json}`
with their losses, and then answers questions as `tools.bench.step_worker` says.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tools.bench.memory_worker import peak_of

_FIRST_STEPS = 3


class Order(NamedTuple):
    """What a program is to do.

    Attributes:
        work: "A", "B" or "C".
        k: Cells, and devices: one thread each.
        m: Micro-batches.
        remat: Whether to recompute in the backward pass.
        variant: A schedule, and options after commas: "1f1b,compile=yes".
    """

    work: str
    k: int
    m: int
    remat: bool
    variant: str

    @property
    def schedule(self) -> str:
        """The schedule."""
        return self.variant.partition(",")[0]

    @property
    def options(self) -> dict[str, str]:
        """The options by their names."""
        return dict(each.split("=") for each in self.variant.split(",")[1:])

    def words(self) -> list[str]:
        """The order as the words of a command line."""
        return [
            f"--work={self.work}",
            f"--k={self.k}",
            f"--m={self.m}",
            f"--remat={'on' if self.remat else 'off'}",
            f"--variant={self.variant}",
        ]


def order(words: Sequence[str] | None = None) -> Order:
    """Reads an order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", default="A", choices="ABC")
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--m", type=int, default=8)
    parser.add_argument("--remat", default="on", choices=["on", "off"])
    parser.add_argument("--variant", default="gpipe")
    found = vars(parser.parse_args(words))
    return Order(**{**found, "remat": found["remat"] == "on"})


def serve(
    step: Callable[[], float],
    peaks: Callable[[], Sequence[float]] | None = None,
    **facts: Any,
) -> None:
    """Does the first steps, and then what it is asked for, until "quit"."""

    def timed() -> dict[str, float]:
        start = time.perf_counter()
        loss = step()
        return {"s": time.perf_counter() - start, "loss": loss}

    def memory() -> dict[str, float]:
        return {"mib": sum(peaks() if peaks else [peak_of(step)])}

    losses = [step() for _ in range(_FIRST_STEPS)]
    respond({"losses": losses, **facts}, {"step": timed, "mem": memory})


def respond(
    ready: Mapping[str, Any], answers: Mapping[str, Callable[[], Any]]
) -> None:
    """Says that it is ready, and answers each line that it reads.

    A line that is no question, such as "quit", ends it. See
    `tools.bench.step_worker.Worker`, which asks.
    """
    print("READY", json.dumps(ready), flush=True)
    for line in sys.stdin:
        if line.strip() not in answers:
            break
        print("T", json.dumps(answers[line.strip()]()), flush=True)
