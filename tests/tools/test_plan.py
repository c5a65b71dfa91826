"""The program that plans prints commands that train so."""

import shlex

import pytest

import params
from tools import plan
from tools.sizes.model_size import predicted


def run(*args):
    return plan.main(["tools.plan", *args])


SMALL = ("--params=lm.transformer_13_small", "--num_devices=4")


def test_last_line_trains_as_planned(capsys):
    assert run(*SMALL, "--machine=v100", "--memory_gib=0.01") == 0
    out = capsys.readouterr().out
    command = shlex.split(out.splitlines()[-1])
    assert command[:3] == ["python", "-m", "tools.train"]
    given = dict(a.removeprefix("--").split("=", 1) for a in command[3:6])
    assert out.splitlines()[2].split()[1] == given["num_partitions"]


def test_experiment_is_predicted_as_planned():
    """The settings that train are those that were planned."""
    experiment = params.get("lm.transformer_13_small")
    found = plan.plan_of(experiment, "v100", 4, 8 * 2**20)
    _, prediction = predicted(plan.with_plan(experiment, found))
    planned = found.best.setting._replace(remat_groups=1)  # XLA has regions
    assert prediction.setting == planned
    for ours, theirs in zip(prediction.memory, found.best.memory, strict=True):
        assert ours[:-1] == theirs[:-1]
        assert ours.working == pytest.approx(theirs.working, rel=0.2)


def test_bad_flags_are_named(capsys):
    assert run() == 2
    assert "--params must name an experiment" in capsys.readouterr().err
    assert run(*SMALL, "--machine=abacus") == 2
    assert "`machine` must be one of" in capsys.readouterr().err
    assert run(*SMALL, "--machine=v100", "--memory_gib=0.0001") == 2
    assert "Use more devices" in capsys.readouterr().err
