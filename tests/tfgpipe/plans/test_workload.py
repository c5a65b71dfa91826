"""Machines, of which workloads are told, and what is no machine."""

import math

import pytest

from tfgpipe.plans.workload import MACHINES, Machine, machine_named

FIGURES = {
    "flops": 1e12,
    "memory": 1e9,
    "memory_bandwidth": 1e9,
    "bandwidth": 1e9,
}


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "1", True])
def test_figures_are_positive_numbers(name, value):
    with pytest.raises(ValueError, match=f"`{name}` of a machine must be"):
        Machine(**{**FIGURES, name: value})


def test_seconds_are_those_of_the_dtype_in_which_layers_compute():
    machine = MACHINES["h100"]
    seconds = {
        dtype: machine.seconds(1e15, dtype)
        for dtype in ("float32", "bfloat16", "float64")
    }
    assert seconds["bfloat16"] == 1e15 / (989e12 * machine.efficiency)
    assert seconds["float32"] == 1e15 / (494e12 * machine.efficiency)
    assert seconds["float64"] == seconds["float32"]  # nothing else is known
    with pytest.raises(ValueError, match="`float16` of a machine must be"):
        Machine(**FIGURES, flops_by_dtype={"float16": 0})


@pytest.mark.parametrize(
    ("name", "kind", "gib"),
    [
        ("Tesla P100-PCIE-16GB", "p100", 16),
        ("Tesla V100-SXM2-16GB", "v100", 16),
        ("Tesla T4", "t4", 16),
        ("NVIDIA A100-SXM4-40GB", "a100", 40),
        ("NVIDIA H100 80GB HBM3", "h100", 80),
        ("NVIDIA L4", "l4", 24),
        ("NVIDIA L40S", "l40s", 48),
        ("NVIDIA GeForce RTX 4090", "rtx_4090", 24),
        ("NVIDIA H200", "h200", 141),
    ],
)
def test_machine_is_known_by_its_makers_name(name, kind, gib):
    found = machine_named(name)
    assert found.name == kind and found.memory == gib * 2**30
    assert found.flops == MACHINES[kind].flops


MIG = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"


LAPTOP = "NVIDIA GeForce RTX 4090 Laptop GPU"


@pytest.mark.parametrize("name", ["", "NVIDIA RTX 3090", LAPTOP, MIG])
def test_other_names_are_no_machine(name):
    assert machine_named(name) is None
