"""The peers' script for torch's pipelining, with its layers in torch.compile.

Runs in torch's interpreter, with the folder of the peers' scripts on its path:
each cell's layers are compiled as one graph, and all else stays theirs.
"""

from __future__ import annotations

import pathlib
import runpy
from typing import Any

import torch  # type: ignore[import-not-found]
import torch_models  # type: ignore[import-not-found]

_plain = torch_models.layers


def _compiled(*arguments: Any) -> list[Any]:
    """What the script calls for the layers of a stage."""
    stage = torch.nn.Sequential(*_plain(*arguments))
    return [torch.compile(stage, dynamic=False)]


if __name__ == "__main__":
    torch_models.layers = _compiled
    script = pathlib.Path(torch_models.__file__).with_name("peer_torchpp.py")
    runpy.run_path(str(script), run_name="__main__")
