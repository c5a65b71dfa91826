"""What an accelerator holds, and the largest model that fits.

largest is the paper's table 1 in miniature. An accelerator is a process that is
refused more than 300 MiB of memory above what it uses without a model; the
cells of the pipeline are on the processes' devices. Naive is plain Keras on one
of them, without micro-batches. Every trial has new processes, and trains two
steps, then --rounds more, whose peak is measured. layers is one model without a
limit, schedules the activations of --schedule and --remat, ways what each way
to hold less takes.

An accelerator holds `held`: weights and the optimizer's slots; for a step a
gradient for each weight; and at the peak of a step activations. By the paper
these are N + L/K N/M, with the mini-batch N and L layers: the inputs of a cell
for the mini-batch, and for a micro-batch what its layers keep, which naive
keeps for the mini-batch. `other` is TensorFlow's own: the graph of a large
model, the buffers of a connection. It counts against the limit too, although
it would be in the memory of the host, beside real accelerators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from absl import flags

from tfgpipe.schedules import CHUNKS, REMAT, SCHEDULES
from tools.bench import memory_trial
from tools.bench.memory_trial import Job, Outcome, Size
from tools.flags import define, new_flags
from tools.report import Report, Table, columns, progress

_TABLES = ["ways", "largest", "layers", "schedules"]
FLAGS = new_flags(rounds=1)
define(
    FLAGS,
    table=(_TABLES, "What to measure.", _TABLES),
    k=([1, 2, 4, 8], "Accelerators of the pipelines."),
    schedule=(["gpipe", "1f1b"], "For table `schedules`.", SCHEDULES),
    remat=(["except_last", "never"], "For table `schedules`.", REMAT),
)
flags.DEFINE_integer(
    "schedule_layers", 4, "For table `schedules`.", 1, flag_values=FLAGS
)

_M, _LIMIT_MIB, _LAYERS = 8, 300, 8  # of tables largest and layers
_SCHEDULE_K, _SCHEDULE_M = 4, 32
_TOLERANCE = 0.1  # how near to the largest number of layers, relative to it
_WORDS, _WAYS_LAYERS, _WAYS_K = 8000, 8, 2  # of table ways
_USE = columns(
    "held_mib: held MiB: .1f | gradients_mib: gradients: .1f | "
    "activations_mib: activations: .1f | model_mib: by model: .1f | "
    "other_mib: other: .0f"
)
_COLUMNS = {
    "largest": [
        *columns("method | m: M | layers: L | layers_ratio: / naive: .1f"),
        *columns("parameters:: ,d | parameters_ratio: / naive: .1f"),
        *_USE,
    ],
    "layers": [
        *columns("method | m: M | layers: L"),
        *_USE,
        *columns("activations_mib_ratio: / naive: .2f"),
    ],
    "schedules": [
        *columns("schedule | remat | groups | k: K | m: M | layers: L"),
        *(column for column in _USE if column.key != "model_mib"),
        *columns("activations_mib_ratio: / first: .2f"),
        *columns("by_device: activations by accelerator"),
    ],
    "ways": columns(
        "way: arguments | activations_mib: activations MiB: .1f | "
        "activations_mib_ratio: / first: .2f | by_device: by accelerator | "
        "held_mib: held MiB: .1f | seconds: s/step: .3f | "
        "seconds_ratio: / first: .2f"
    ),
}


def run(values: flags.FlagValues, report: Report) -> None:
    """Makes the tables that the flags ask for."""
    num_cells = _SCHEDULE_K * max(map(_chunks, values.schedule))
    if num_cells > values.schedule_layers:
        raise ValueError(
            "--schedule_layers must be at least the number of cells, "
            f"{num_cells}. Received: {values.schedule_layers}."
        )
    makers: dict[str, Callable[[flags.FlagValues, Table], str]] = {
        "ways": _ways,
        "largest": _largest,
        "layers": _same_layers,
        "schedules": _schedules,
    }
    for name in dict.fromkeys(values.table):
        table = report.add(Table(name, "", _COLUMNS[name]))
        try:
            table.title = makers[name](values, table)
        finally:  # also after Ctrl-C
            table.notes.append("MiB: of the accelerator that has most of it")


def _chunks(schedule: str) -> int:
    """Cells of an accelerator."""
    return CHUNKS[schedule] or 2


def _about(size: Size) -> str:
    return (
        f"Transformer blocks of {size.width} units, {size.num_heads} heads, "
        f"{size.sequence} positions; batches of {size.batch_size}; "
        f"{size.optimizer}"
    )


# ----------------------------------------------------------------- the tables
def _ways(values: flags.FlagValues, table: Table) -> str:
    size = Size(width=128, batch_size=64, optimizer="sgd")
    first = Job(
        size,
        _WAYS_LAYERS,
        _WAYS_K,
        _M,
        remat="never",
        num_steps=max(3, values.rounds),
        words=_WORDS,
    )
    plain = first._replace(remat="except_last", remat_groups=None)
    both = plain._replace(schedule="1f1b", remat="always", head_parts=4)
    on_host = plain._replace(is_on_host=True)
    ways = {
        'remat="never"': first,
        "remat=0.4": first._replace(remat=0.4),
        "remat=0.2": first._replace(remat=0.2),
        "what is the default": plain,
        "remat_groups=1": plain._replace(remat_groups=1),
        'remat="always"': plain._replace(remat="always"),
        'schedule="1f1b"': plain._replace(schedule="1f1b"),
        "head_parts=4": plain._replace(head_parts=4),
        'schedule="1f1b", remat="always", head_parts=4': both,
        'weights_on="host"': on_host,
        'weights_on="host", remat="offload"': on_host._replace(remat="offload"),
    }
    table.notes.append(
        "activations: at the peak of a step, above weights, slots and a "
        "gradient of each weight"
    )
    for way in progress([*ways], "memory"):
        outcome = memory_trial.run(ways[way])
        row = uses_of(outcome) | {"way": way, "seconds": outcome.seconds}
        base = table.rows[0] if table.rows else row
        for name in ("activations_mib", "seconds"):
            row[f"{name}_ratio"] = row[name] / base[name]
        table.rows.append(row)
    return (
        f"{_WAYS_LAYERS} blocks and a head of {_WORDS:,} words on {_WAYS_K} "
        f"accelerators, {_M} micro-batches. {_about(size)}"
    )


def _largest(values: flags.FlagValues, table: Table) -> str:
    guess = 1  # layers a cell
    for job in _jobs(values, _LIMIT_MIB):
        outcomes: dict[int, tuple[Job, Outcome]] = {}

        def fits(count: int, job: Job = job, outcomes: dict = outcomes) -> bool:
            tried = job._replace(num_layers=count * max(job.k, 1) * job.chunks)
            outcomes[count] = tried, memory_trial.run(tried)
            return outcomes[count][1].fits

        count = largest(fits, guess, _TOLERANCE)
        if not count:
            table.notes.append(f"{name_of(job)}: not even one layer fits.")
            continue
        # The first pipeline keeps less of a mini-batch.
        guess = count if job.k else count * _M // 2
        naive = next((r for r in table.rows if r["k"] == 0), None)
        table.rows.append(row_of(*outcomes[count], naive))
    return (
        f"The largest model with {_LIMIT_MIB} MiB an accelerator. "
        f"{_about(Size())}"
    )


def _same_layers(values: flags.FlagValues, table: Table) -> str:
    for job in _jobs(values, 0):
        naive = table.rows[0] if table.rows else None
        table.rows.append(row_of(job, memory_trial.run(job), naive))
    return f"The same model, without a limit. {_about(Size())}"


def _jobs(values: flags.FlagValues, limit_mib: float) -> Iterable[Job]:
    """Naive, then the pipelines."""
    first = Job(
        Size(),
        _LAYERS,
        0,
        limit_mib=limit_mib,
        num_steps=values.rounds,
    )
    pipelines = [first._replace(k=k, m=_M) for k in values.k]
    return progress([first, *pipelines], "memory")


def _schedules(values: flags.FlagValues, table: Table) -> str:
    ways = [(s, remat) for remat in values.remat for s in values.schedule]
    first: dict[str, float] = {}
    for schedule, remat in progress(ways, "memory"):
        job = Job(
            Size(),
            values.schedule_layers,
            _SCHEDULE_K,
            _SCHEDULE_M,
            schedule,
            remat,
            chunks=_chunks(schedule),
            num_steps=values.rounds,
        )
        row = row_of(job, memory_trial.run(job), None)
        row |= {"schedule": schedule, "remat": remat, "groups": 1}
        most = row["activations_mib"]
        row["activations_mib_ratio"] = most / first.setdefault(remat, most)
        table.rows.append(row)
    return f"The same model with other schedules. {_about(Size())}"


# ------------------------------------------------------------------- the rows
def largest(
    fits: Callable[[int], bool], guess: int, tolerance: float = 0
) -> int:
    """Finds the largest number that fits, by doubling and bisection.

    `fits` is true up to some number. The result may be below by `tolerance`,
    relative to it; it is 0 if not even 1 fits. A good guess saves trials.

    Example:

    >>> largest(lambda n: n <= 100, guess=7)
    100
    """
    low, high = 0, 0  # the largest that fits, the smallest that does not
    step, number = max(1, int(tolerance * guess)), guess
    while not (low and high) and high != 1:
        if fits(number):
            low, number = number, number + step
        else:
            high, number = number, max(number - step, 1)
        step *= 2
    while high - low > max(1, tolerance * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def name_of(job: Job) -> str:
    """Returns the method, as in the paper's table."""
    return f"pipeline-{job.k}" if job.k else "naive"


def by_model(job: Job, layer_mib: float) -> float:
    """Computes the paper's N + L/K N/M, from MiB that naive keeps for a layer.

    Example:

    >>> size = Size(width=64, sequence=64, batch_size=256)  # N is 4 MiB
    >>> by_model(Job(size, num_layers=12, k=4, m=8), layer_mib=16.0)
    10.0
    """
    layers = -(-job.num_layers // job.k)
    return job.size.boundary_mib + layers * layer_mib / job.m


def uses_of(outcome: Outcome) -> dict[str, Any]:
    """Returns the most of each use, and activations by accelerator."""
    names = ("held", "gradients", "activations", "other")
    by_device = [f"{use.activations:.1f}" for use in outcome.uses]
    most = {f"{name}_mib": outcome.most(name) for name in names}
    return most | {"by_device": " ".join(by_device)}


def row_of(
    job: Job, outcome: Outcome, naive: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns a method's row, beside that of plain Keras if there is one."""
    row = {
        "method": name_of(job),
        "k": job.k,
        "m": job.m,
        "layers": job.num_layers,
        "parameters": outcome.num_parameters,
        **uses_of(outcome),
    }
    if naive is not None:
        for key in ("layers", "parameters", "activations_mib"):
            row[f"{key}_ratio"] = row[key] / naive[key]
        layer_mib = naive["activations_mib"] / naive["layers"]
        row["model_mib"] = by_model(job, layer_mib)
    return row
