"""The paper's table 1: the largest models that train, in real memory.

With --gpu, one GPU is cut into K devices of 8 GiB (AmoebaNet-D) or 16 GiB
(Transformer-L), and each model of the paper's own size trains, or does not fit:
naive is plain Keras on one device. The GPU needs K times that memory. Without,
the models' small twins train on logical devices of the CPU, for a rehearsal.

`GiB` are those that each device held at most, by TensorFlow's counters, `plan`
what the plan says, `paper` is what the paper's accelerators hold in the mean:
weights with slots and gradients, 12 bytes a parameter, and activations. The
paper does not say its mini-batches: those here have 128 images or 32 rows.

Results are lines of JSON in --output; rows that are there are not run again.

Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), table 1
"""

from typing import Any, NamedTuple

from absl import flags

import params
from tfgpipe.commands import command_line
from tools.bench.case_worker import Case
from tools.bench.cases import Results
from tools.bench.gpu import define_run, fill
from tools.flags import define
from tools.report import Report, Table, columns

FLAGS = command_line.new_flags()
define_run(FLAGS, "bench_table1.jsonl", num_jobs=1)
define(
    FLAGS,
    gpu=(False, "The paper's own sizes, on a GPU."),
)

COLUMNS = columns(
    "model | method | parameters: parameters: ,d | fits | gib: GiB | "
    "plan_gib: plan | paper_gib: paper: .1f | step_s: step s: .2f | "
    "first_s: first step s: .0f"
)


class Row(NamedTuple):
    """A column of the paper's table.

    Attributes:
        name: Of the experiment.
        k: Accelerators; 0 is naive.
        limit_gib: Of each.
        weights_gb: Of all accelerators, with slots and gradients.
        activations_gb: Of all accelerators, at the peak.
    """

    name: str
    k: int
    limit_gib: int
    weights_gb: float
    activations_gb: float


ROWS = [
    Row("image.amoebanet_d_18_208", 0, 8, 1.05, 6.26),
    Row("image.amoebanet_d_18_416", 1, 8, 3.8, 3.46),
    Row("image.amoebanet_d_18_544", 2, 8, 6.45, 8.11),
    Row("image.amoebanet_d_36_544", 4, 8, 12.53, 15.21),
    Row("image.amoebanet_d_72_512", 8, 8, 24.62, 26.24),
    Row("lm.transformer_3", 0, 16, 11.7, 3.15),
    Row("lm.transformer_13", 1, 16, 8.8, 6.4),
    Row("lm.transformer_103", 8, 16, 59.5, 50.9),
]


def run(values: flags.FlagValues, report: Report) -> None:
    """Runs the rows that have no result, and prints all that have."""
    table = report.add(Table("table_1", "", COLUMNS))
    fill(table, list_cases(values), values, _rows)


def list_cases(values: flags.FlagValues) -> list[Case]:
    """Lists a case for each of `ROWS`."""
    return [_case(row, values) for row in ROWS]


def _case(row: Row, values: flags.FlagValues) -> Case:
    name = row.name if values.gpu else f"{row.name}_small"
    experiment = params.get(name)
    return Case(
        name,
        "gpipe" if row.k else "keras",
        experiment.batch_size,
        max(1, row.k),
        experiment.num_micro_batches if row.k else 1,
        "float32",
        False,
        1024 * row.limit_gib if values.gpu else 0,
        {"remat": experiment.remat} if row.k else {},
        not values.gpu,
        values.rounds,
        values.steps,
    )


def _rows(cases: list[Case], results: Results) -> list[dict[str, Any]]:
    rows = []
    for row, case in zip(ROWS, cases):
        result = results.result_of(case)
        if result is not None:
            rows.append(_row(row, case, result))
    return rows


def _row(row: Row, case: Case, result: dict[str, Any]) -> dict[str, Any]:
    found = {
        **result,
        "model": case.model,
        "method": f"K = {row.k}" if row.k else "naive",
        "fits": result.get("error", "yes"),
    }
    for name, column in (("mib", "gib"), ("plan_mib", "plan_gib")):
        mibs = result.get(name, [])
        found[column] = ", ".join(f"{mib / 1024:.3g}" for mib in mibs)
    if not case.is_small:
        total = row.weights_gb + row.activations_gb
        found["paper_gib"] = total * 1e9 / 2**30 / max(1, row.k)
    return found
