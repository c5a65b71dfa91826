"""A device that runs nothing but what XLA compiles, as a TPU does.

What a TPU would refuse, such as variants, strings and numbers of slices that
are known only at run time, this one refuses, too.
"""

import json
import os
import subprocess
import sys

import compiled_device
import pytest
from processes import ROOT

QUICK = ["last cell", "embedding"]


@pytest.mark.parametrize(
    "names",
    [
        QUICK,
        pytest.param(
            [n for n in compiled_device.CASES if n not in QUICK],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["quick", "others"],
)
def test_numbers_are_those_of_keras(names):
    program = str(ROOT / "tests" / "compiled_device.py")
    run = subprocess.run(
        [sys.executable, program, *names],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [name for name, *_ in found] == names
    for name, size, devices in found:
        assert size < 1e-5, name
        assert "XLA_CPU:0" in devices
