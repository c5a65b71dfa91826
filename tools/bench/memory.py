"""The largest model that fits, with more and more accelerators.

The paper's table 1 in miniature. An accelerator is a process that is refused
more than --limit_mib of memory above what it uses without a model; the cells of
the pipeline are on the processes' devices. Naive is plain Keras on one of them,
without micro-batches. Every trial has new processes, and trains two steps, then
--rounds more, whose peak is measured.

An accelerator holds `held`: weights and the optimizer's slots; for a step a
gradient for each weight; and at the peak of a step activations. By the paper
these are N + L/K N/M, with the mini-batch N and L layers: the inputs of a cell
for the mini-batch, and for a micro-batch what its layers keep, which naive
keeps for the mini-batch. `other` is TensorFlow's own: the graph of a large
model, the buffers of a connection. It counts against the limit too, although
it would be in the memory of the host, beside real accelerators.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any

from absl import flags

from tfgpipe.commands.command_line import BadFlags
from tfgpipe.schedules import CHUNKS, REMAT, SCHEDULES
from tools.bench import loading_trial, memory_trial
from tools.bench.flags import define_choices, define_numbers, new_flags
from tools.bench.memory_rows import (
    largest,
    name_of,
    row_of,
    sent_by_shards,
)
from tools.bench.memory_trial import Job, Outcome, Size
from tools.report import Column, Report, Table, progress

FLAGS = new_flags(rounds=1)
define_choices(
    FLAGS,
    "table",
    ["ways", "largest", "layers", "schedules", "loading", "host", "shards"],
    ["ways", "largest", "layers", "schedules", "loading", "host", "shards"],
    "What each way to hold less takes; the largest model; activations of one "
    "model; those of schedules; a preset of KerasHub that is loaded; weights "
    "on the host; a layer on several accelerators.",
)
define_numbers(FLAGS, "k", [1, 2, 4, 8], "Accelerators of the pipelines.")
define_numbers(
    FLAGS, "shards", [1, 2], "Accelerators of the layer of table `shards`."
)
define_choices(
    FLAGS,
    "schedule",
    ["gpipe", "1f1b"],
    SCHEDULES,
    "For table `schedules`; the others are for the first of them.",
)
define_choices(
    FLAGS,
    "remat",
    ["except_last", "never"],
    REMAT,
    "For table `schedules`; the first is for the others.",
)
for _name, _default, _meaning in (
    ("m", 8, "Micro-batches."),
    ("limit_mib", 300, "What an accelerator may use."),
    ("layers", 8, "Of the model of table `layers`."),
    ("schedule_k", 4, "Accelerators for table `schedules`."),
    ("schedule_m", 32, "Micro-batches for it."),
    ("schedule_layers", 4, "Layers for it."),
    ("width", Size().width, "Units of a layer; 4 times as many inside."),
    ("heads", Size().num_heads, "Of the attention."),
    ("sequence", Size().sequence, "Positions in an example."),
    ("batch_size", Size().batch_size, "Examples in a mini-batch."),
    ("host_k", 2, "Accelerators for table `host`."),
    ("host_layers", 38, "Layers for it, each a cell: a multiple of --host_k."),
    ("host_width", 768, "Units of a layer of it, a multiple of 8."),
    ("ways_layers", 8, "Layers for table `ways`."),
    ("ways_words", 8000, "Outputs of a position for it."),
    ("shards_width", 2048, "Units that the layer of table `shards` takes."),
    ("shards_words", 8192, "Units that it makes."),
    ("preset_units", 1024, "Of the preset of table `loading`."),
    ("preset_layers", 8, "Of it."),
):
    flags.DEFINE_integer(_name, _default, _meaning, 1, flag_values=FLAGS)
define_numbers(
    FLAGS,
    "remat_groups",
    [1],
    "Groups of layers in which a cell is computed again; for table "
    "`schedules`, and the first is for the others.",
)
flags.DEFINE_enum(
    "optimizer",
    "adam",
    ["adam", "sgd"],
    "adam holds two slots for each weight.",
    flag_values=FLAGS,
)
flags.DEFINE_float(
    "tolerance",
    0.1,
    "How near to the largest number of layers, relative to it.",
    0.0,
    flag_values=FLAGS,
)

_USE = [
    Column("held_mib", "held MiB", ".1f"),
    Column("gradients_mib", "gradients", ".1f"),
    Column("activations_mib", "activations", ".1f"),
    Column("model_mib", "by model", ".1f"),
    Column("other_mib", "other", ".0f"),
]
_WHO = [Column("method", "method"), Column("m", "M")]
_LARGEST = [
    *_WHO,
    Column("layers", "L"),
    Column("layers_ratio", "/ naive", ".1f"),
    Column("parameters", "parameters", ",d"),
    Column("parameters_ratio", "/ naive", ".1f"),
    *_USE,
]
_LAYERS = [
    *_WHO,
    Column("layers", "L"),
    *_USE,
    Column("activations_mib_ratio", "/ naive", ".2f"),
]
_SCHEDULES = [
    Column("schedule", "schedule"),
    Column("remat", "remat"),
    Column("groups", "groups"),
    Column("k", "K"),
    Column("m", "M"),
    Column("layers", "L"),
    *(column for column in _USE if column.key != "model_mib"),
    Column("activations_mib_ratio", "/ first", ".2f"),
    Column("by_device", "activations by accelerator"),
]
_WAYS = [
    Column("way", "arguments"),
    Column("activations_mib", "activations MiB", ".1f"),
    Column("activations_mib_ratio", "/ first", ".2f"),
    Column("by_device", "by accelerator"),
    Column("held_mib", "held MiB", ".1f"),
    Column("seconds", "s/step", ".3f"),
    Column("seconds_ratio", "/ first", ".2f"),
]
_SHARDS = [
    Column("shards", "shards"),
    Column("activations_mib", "peak MiB", ".0f"),
    Column("by_device", "by accelerator"),
    Column("sent_mib", "sent MiB/step", ".0f"),
    Column("limit", "limit", ".0f"),
    Column("fits", "fits"),
]
_HOST = [
    Column("weights_on", "weights on"),
    Column("schedule", "schedule"),
    Column("k", "K"),
    Column("layers", "L"),
    Column("parameters", "parameters", ",d"),
    Column("total_mib", "weights and slots MiB", ".0f"),
    Column("held_mib", "held MiB", ".1f"),
    Column("above_mib", "peak above", ".1f"),
    Column("fits", "fits"),
]
_LOADING = [
    Column("method", "method"),
    Column("total", "variables MiB", ".0f"),
    Column("share", "an accelerator's", ".0f"),
    Column("largest", "largest variable", ".0f"),
    Column("above", "peak above", ".0f"),
    Column("limit", "limit", ".0f"),
    Column("fits", "fits"),
    Column("host", "host's peak", ".0f"),
]


def run(values: flags.FlagValues, report: Report) -> None:
    """Makes the tables that the flags ask for."""
    size = _size(values)
    makers = {
        "ways": _ways,
        "largest": _largest,
        "layers": _same_layers,
        "schedules": _schedules,
        "loading": _loading,
        "host": _host,
        "shards": _shards,
    }
    for name in dict.fromkeys(values.table):
        table = makers[name](values, size, report)
        table.notes.append("MiB: of the accelerator that has most of it")


def _size(values: flags.FlagValues) -> Size:
    if values.width % values.heads:
        raise BadFlags(
            "--heads must divide --width. Received: "
            f"--heads={values.heads} and --width={values.width}."
        )
    most = max(values.m, values.schedule_m)
    if most > values.batch_size:
        raise BadFlags(
            "--m and --schedule_m must be at most --batch_size, "
            f"{values.batch_size}. Received: {most}."
        )
    if values.host_width % 8 or values.host_layers % values.host_k:
        raise BadFlags(
            "--host_width must be a multiple of 8, and --host_layers of "
            f"--host_k. Received: --host_width={values.host_width}, "
            f"--host_layers={values.host_layers} and --host_k={values.host_k}."
        )
    if max(values.k) > values.layers and "layers" in values.table:
        raise BadFlags(
            "--layers must be at least the largest --k. Received: "
            f"--layers={values.layers} and --k={max(values.k)}."
        )
    chunks = max(map(_chunks, values.schedule))
    if values.schedule_k * chunks > values.schedule_layers:
        raise BadFlags(
            "--schedule_layers must be at least the number of cells, "
            f"{values.schedule_k * chunks} with --schedule_k="
            f"{values.schedule_k}. Received: {values.schedule_layers}."
        )
    return Size(
        values.width,
        values.heads,
        values.sequence,
        values.batch_size,
        values.optimizer,
    )


def _about(size: Size) -> str:
    return (
        f"Transformer blocks of {size.width} units, {size.num_heads} heads, "
        f"{size.sequence} positions; batches of {size.batch_size}; "
        f"{size.optimizer}"
    )


# ------------------------------------------------------ what each way takes
def _ways(values: flags.FlagValues, size: Size, report: Report) -> Table:
    size = size._replace(width=128, batch_size=64, optimizer="sgd")
    table = report.add(
        Table(
            "ways",
            f"{values.ways_layers} blocks and a head of "
            f"{values.ways_words:,} words on {values.host_k} accelerators, "
            f"{values.m} micro-batches. {_about(size)}",
            _WAYS,
            notes=[
                "activations: at the peak of a step, above weights, slots and "
                "a gradient of each weight"
            ],
        )
    )
    first = Job(
        size,
        values.ways_layers,
        values.host_k,
        values.m,
        remat="never",
        num_steps=max(3, values.rounds),
        words=values.ways_words,
    )
    plain = first._replace(remat="except_last", remat_groups=None)
    ways = {
        'remat="never"': first,
        "remat=0.4": first._replace(remat=0.4),
        "remat=0.2": first._replace(remat=0.2),
        "what is the default": plain,
        "remat_groups=1": plain._replace(remat_groups=1),
        'remat="always"': plain._replace(remat="always"),
        'schedule="1f1b"': plain._replace(schedule="1f1b"),
        "head_parts=4": plain._replace(head_parts=4),
        'schedule="1f1b", remat="always", head_parts=4': plain._replace(
            schedule="1f1b", remat="always", head_parts=4
        ),
        'weights_on="host"': plain._replace(is_on_host=True),
        'weights_on="host", remat="offload"': plain._replace(
            is_on_host=True, remat="offload"
        ),
    }
    for way in progress([*ways], "memory"):
        outcome = memory_trial.run(ways[way])
        row: dict[str, Any] = {
            "way": way,
            "activations_mib": outcome.most("activations"),
            "held_mib": outcome.most("held"),
            "seconds": outcome.seconds,
            "by_device": " ".join(
                f"{use.activations:.1f}" for use in outcome.uses
            ),
        }
        base = table.rows[0] if table.rows else row
        for name in ("activations_mib", "seconds"):
            row[f"{name}_ratio"] = row[name] / base[name]
        table.rows.append(row)
    return table


# ----------------------------------------------- a layer larger than a device
def _shards(values: flags.FlagValues, size: Size, report: Report) -> Table:
    size = size._replace(
        width=values.shards_width, batch_size=64, optimizer="sgd"
    )
    rows = size.batch_size * size.sequence
    table = report.add(
        Table(
            "shards",
            f"A layer of {values.shards_width:,} to {values.shards_words:,} "
            f"units, {rows:,} rows a step in {values.m} micro-batches",
            _SHARDS,
            notes=[
                "peak: columns of weights, their gradients, and activations",
                "sent: inputs, outputs and gradients of both between "
                "accelerators; weights and gradients from the host and back",
            ],
        )
    )
    job = Job(
        size,
        0,
        1,
        values.m,
        remat="never",
        num_steps=values.rounds,
        is_on_host=True,
        words=values.shards_words,
    )
    for count in progress(values.shards, "memory"):
        own = job._replace(num_shards=count)
        outcome = memory_trial.run(own)
        table.rows.append(
            {
                "shards": count,
                "activations_mib": outcome.most("activations"),
                "by_device": " ".join(
                    f"{use.activations:.0f}" for use in outcome.uses
                ),
                "sent_mib": sent_by_shards(
                    count, rows, size.width, values.shards_words
                ),
                "limit": values.limit_mib,
                "fits": memory_trial.run(
                    own._replace(limit_mib=values.limit_mib)
                ).fits,
            }
        )
    return table


# ------------------------------------------------------------ the largest model
def _largest(values: flags.FlagValues, size: Size, report: Report) -> Table:
    title = (
        f"The largest model with {values.limit_mib} MiB an accelerator. "
        f"{_about(size)}"
    )
    table = report.add(Table("largest", title, _LARGEST))
    guess = 1  # layers a cell
    for job in _jobs(values, size, values.limit_mib):
        found = _Trials(job)
        count = largest(found.fits, guess, values.tolerance)
        if not count:
            table.notes.append(f"{name_of(job)}: not even one layer fits.")
            continue
        # The first pipeline keeps less of a mini-batch.
        guess = count if job.k else count * max(1, values.m // 2)
        naive = next((r for r in table.rows if r["k"] == 0), None)
        table.rows.append(row_of(*found.at(count), naive))
    return table


class _Trials:
    """Trials with more or fewer layers a cell."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._outcomes: dict[int, Outcome] = {}

    def fits(self, count: int) -> bool:
        """Whether so many layers a cell fit."""
        job = self._with(count)
        self._outcomes[count] = memory_trial.run(job)
        return self._outcomes[count].fits

    def at(self, count: int) -> tuple[Job, Outcome]:
        """The trial of a number that was tried."""
        return self._with(count), self._outcomes[count]

    def _with(self, count: int) -> Job:
        num_cells = max(self._job.k, 1) * self._job.chunks
        return self._job._replace(num_layers=count * num_cells)


def _jobs(
    values: flags.FlagValues, size: Size, limit_mib: float = 0
) -> Iterable[Job]:
    """Naive, then the pipelines, all of --layers layers."""
    jobs = [
        Job(
            size,
            values.layers,
            k,
            values.m if k else 1,
            values.schedule[0],
            values.remat[0],
            limit_mib,
            _chunks(values.schedule[0]),
            values.remat_groups[0],
            values.rounds,
        )
        for k in [0, *values.k]
    ]
    return progress(jobs, "memory")


def _chunks(schedule: str) -> int:
    """Cells of an accelerator."""
    return CHUNKS[schedule] or 2


# ------------------------------------------------- the same model, by every way
def _same_layers(values: flags.FlagValues, size: Size, report: Report) -> Table:
    title = f"The same model, without a limit. {_about(size)}"
    table = report.add(Table("layers", title, _LAYERS))
    for job in _jobs(values, size):
        naive = table.rows[0] if table.rows else None
        table.rows.append(row_of(job, memory_trial.run(job), naive))
    return table


# ---------------------------------------------------------------- the schedules
def _schedules(values: flags.FlagValues, size: Size, report: Report) -> Table:
    title = f"The same model with other schedules. {_about(size)}"
    table = report.add(Table("schedules", title, _SCHEDULES))
    ways = [
        (schedule, remat, groups)
        for remat in values.remat
        for groups in (values.remat_groups if remat != "never" else [1])
        for schedule in values.schedule
    ]
    first: dict[Any, float] = {}
    for schedule, remat, groups in progress(ways, "memory"):
        job = Job(
            size,
            values.schedule_layers,
            values.schedule_k,
            values.schedule_m,
            schedule,
            remat,
            chunks=_chunks(schedule),
            remat_groups=groups,
            num_steps=values.rounds,
        )
        outcome = memory_trial.run(job)
        row = row_of(job, outcome, None) | {"schedule": schedule}
        most = row["activations_mib"]
        row |= {"remat": remat, "groups": groups}
        base = first.setdefault((remat, groups), most)
        row["activations_mib_ratio"] = most / base
        row["by_device"] = " ".join(
            f"{u.activations:.1f}" for u in outcome.uses
        )
        table.rows.append(row)
    return table


# ------------------------------------------------------------------- the host
def _host(values: flags.FlagValues, size: Size, report: Report) -> Table:
    size = size._replace(
        width=values.host_width,
        num_heads=8,
        sequence=32,
        batch_size=16,
    )
    table = report.add(
        Table(
            "host",
            f"Weights and slots on the host, {values.limit_mib} MiB an "
            f"accelerator. {_about(size)}",
            _HOST,
            notes=["peak above: in a step, above what it rests at"],
        )
    )
    k, layers = values.host_k, values.host_layers
    on_host = Job(
        size,
        layers,
        k,
        4,
        "breadth_first",
        "always",
        values.limit_mib,
        layers // k,
        num_steps=values.rounds,
        is_on_host=True,
    )
    on_devices = on_host._replace(is_on_host=False)
    few = on_devices._replace(num_layers=k, chunks=1)
    copies = 3 if size.optimizer == "adam" else 1
    for job in progress([few, on_devices, on_host], "memory"):
        outcome = memory_trial.run(job)
        row = {
            "weights_on": "host" if job.is_on_host else "devices",
            "schedule": job.schedule,
            "k": job.k * job.chunks,
            "layers": job.num_layers,
            "fits": "yes" if outcome.fits else f"no: {outcome.why}",
        }
        if outcome.fits:
            row |= {
                "parameters": outcome.num_parameters,
                "total_mib": copies * 4 * outcome.num_parameters / 2**20,
                "held_mib": outcome.most("held"),
                "above_mib": outcome.most("gradients")
                + outcome.most("activations"),
            }
        table.rows.append(row)
    return table


# ----------------------------------------------------------- a preset is loaded
def _loading(values: flags.FlagValues, size: Size, report: Report) -> Table:
    title = (
        f"A task of KerasHub, {values.preset_layers} blocks of "
        f"{values.preset_units} units, is loaded"
    )
    table = report.add(Table("loading", title, _LOADING))
    table.notes.append("fits: with that limit, its share and its largest")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "preset"
        loading_trial.make(folder, values.preset_units, values.preset_layers)
        for k in progress([0, *values.k], "memory"):
            job = loading_trial.Preset(str(folder), k)
            loaded = loading_trial.run(job)
            if loaded is None:
                raise RuntimeError(f"{job} did not fit, without a limit.")
            limit = loaded.share + loaded.largest
            again = loading_trial.run(job._replace(limit_mib=limit))
            row = {
                "method": f"pipeline-{k}" if k else "naive",
                **loaded._asdict(),
                "limit": limit,
                "fits": "no" if again is None else "yes",
            }
            table.rows.append(row)
    return table
