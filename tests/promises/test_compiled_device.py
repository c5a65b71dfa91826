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

QUICK = ["last cell", "embedding", "table on the host"]


CASES = list(compiled_device.CASES)


@pytest.mark.parametrize(
    "names",
    [
        QUICK,
        pytest.param(
            [name for name in CASES if name not in QUICK],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["quick", "others"],
)
def test_numbers_are_those_of_keras(names):
    found = differences(names)
    assert [name for name, *_ in found] == names
    for name, size, devices in found:
        assert size < 1e-5, name
        assert any("XLA_CPU:0" in device for device in devices)


@pytest.mark.slow
def test_numbers_are_those_of_keras_with_such_devices_in_workers():
    """A process of their own for each, and replicas on four of them."""
    names = compiled_device.IN_WORKERS
    found = differences(["--workers", *names])
    assert [name for name, *_ in found] == names
    for name, size, devices in found:
        assert size < 1e-5, name
        tasks = {device.split("/")[3] for device in devices}
        assert len(tasks) == 1 if name == "one cell" else len(tasks) >= 2, name
        assert all("XLA_CPU" in device for device in devices)


def differences(arguments):
    """What the program prints."""
    program = str(ROOT / "tests" / "compiled_device.py")
    run = subprocess.run(
        [sys.executable, program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return [json.loads(line) for line in run.stdout.splitlines()]
