"""How worker processes answer, see `tools.bench.step_worker`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


def respond(
    ready: Mapping[str, Any], answers: Mapping[str, Callable[[], Any]]
) -> None:
    """Says that it is ready, and answers each line that it reads.

    A line that is no question, such as "quit", ends it.
    """
    print("READY", json.dumps(ready), flush=True)
    for line in sys.stdin:
        if line.strip() not in answers:
            break
        print("T", json.dumps(answers[line.strip()]()), flush=True)
