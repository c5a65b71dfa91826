"""Reads what `tools.train` left in a --train_dir: experiment and model."""

import dataclasses
import json
import pathlib
from typing import Any, NamedTuple

from absl import flags

import params
import tfgpipe
from params import Experiment
from params.source import Source
from tfgpipe.commands.command_line import doing
from tfgpipe.devices import local
from tools.train.trainer import make_ready

_FORWARD: dict[str, Any] = {
    "num_micro_batches": 1,
    "schedule": "gpipe",
    "remat": "never",
}
_CURE = "Train one: python -m tools.train --params=NAME --train_dir=FOLDER"


class TrainedRun(NamedTuple):
    """A trained model and what it was trained on.

    Attributes:
        experiment: With what the flags of the training changed; its number of
            partitions is the registered one.
        source: Its data.
        model: The `tfgpipe.GPipe`, compiled as it was.
        path: The file that the model is from.
        step: Updates that it has had.
    """

    experiment: Experiment
    source: Source
    model: tfgpipe.GPipe
    path: pathlib.Path
    step: int


def load(
    train_dir: str | None,
    num_partitions: int = 1,
    kind: type | None = None,
    what: str = "",
) -> TrainedRun:
    """Loads the trained model of a run, or what it has reached so far."""
    if train_dir is None:
        raise ValueError(f"--train_dir must name a folder. {_CURE}")
    folder = pathlib.Path(train_dir)
    experiment = read_experiment(folder)
    if num_partitions > 1 and not local.has_accelerator():
        local.split_cpu(num_partitions)
    source = experiment.data.source()
    if kind is not None and not isinstance(source, kind):
        raise ValueError(
            f"--train_dir must hold {what}, on real text. Received: "
            f"--train_dir={train_dir}, which holds {experiment.name}, on "
            f"{experiment.data}. See tools.train --list for others."
        )
    path = folder / "final.keras"
    with doing("loading the model"):
        if path.is_file():
            model = tfgpipe.load_model(
                str(path), num_partitions=num_partitions, **_FORWARD
            )
        else:
            model, path = _from_checkpoint(
                experiment, source, folder, num_partitions
            )
    step = int(model.optimizer.iterations)
    return TrainedRun(experiment, source, model, path, step)


def _from_checkpoint(
    experiment: Experiment,
    source: Source,
    folder: pathlib.Path,
    num_partitions: int,
) -> tuple[tfgpipe.GPipe, pathlib.Path]:
    """The model as the last checkpoint has it, and where that is."""
    model = tfgpipe.GPipe(experiment.model.layers(), num_partitions, **_FORWARD)
    make_ready(model, experiment, source, num_steps=1)
    restored = tfgpipe.restore(model, folder / "checkpoints")
    if restored is None:
        raise FileNotFoundError(
            "--train_dir must hold final.keras or checkpoints. Received: "
            f"--train_dir={folder}, which has neither yet: the first "
            "checkpoint comes after an epoch. Go on training with the command "
            "of that run."
        )
    return model, pathlib.Path(restored.path)


def read_experiment(folder: pathlib.Path) -> Experiment:
    """The experiment of a run, from its experiment.json."""
    path = folder / "experiment.json"
    if not path.is_file():
        raise ValueError(
            "--train_dir must be the folder of a training run. Received: "
            f"--train_dir={folder}, which has no experiment.json. {_CURE}"
        )
    try:
        saved = json.loads(path.read_text("utf-8"))
        base = params.get(saved["name"])
        for name in ("num_steps", "num_partitions"):  # no part of it
            del saved[name]
        saved.pop("num_replicas", None)  # where there are several
        saved.pop("earlier_num_steps", None)  # where there were fewer
        for name in ("num_partitions", "description", "expected_result"):
            saved[name] = getattr(base, name)
        return _restored(base, saved)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            "--train_dir must hold a run of this version. Received: "
            f"{path}, which gives: {error}. Train again in a new folder."
        ) from error


def _restored(base: Any, saved: dict[str, Any]) -> Any:
    """A copy of a dataclass with values that were saved as JSON."""
    known = {field.name for field in dataclasses.fields(base)}
    if known != set(saved):
        odd = sorted(known.symmetric_difference(saved))
        raise ValueError(f"{type(base).__name__} has other fields: {odd}")
    changes = {
        name: _value(getattr(base, name), value)
        for name, value in saved.items()
    }
    return dataclasses.replace(base, **changes)


def _value(base: Any, saved: Any) -> Any:
    if dataclasses.is_dataclass(base):
        return _restored(base, saved)
    return tuple(saved) if isinstance(saved, list) else saved


def define_trained(values: flags.FlagValues) -> None:
    """Defines --train_dir, a run of `tools.train`, and --num_partitions."""
    flags.DEFINE_string(
        "train_dir",
        None,
        "Folder of a training run: its final.keras is taken, or else its "
        "checkpoint.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_partitions",
        1,
        "K, the number of cells, a device each, into which the model is "
        "loaded. Where there is no accelerator, the CPU is split into as many.",
        1,
        flag_values=values,
    )
