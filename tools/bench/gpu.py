"""Models on one GPU, beside plain Keras: seconds, bytes, operations.

compare: GPT-2, ResNet-50 and a U-Net as they come, the most important case
first: Keras and a `GPipe`, each with its defaults, then micro-batches, K = 4
parts of the GPU, what compiles nothing, Keras on JAX, and PyTorch. Some minutes
of it are worth having.

whole: ways to hold less, on a GPU that is one device; nothing is compiled.

split: the GPU is cut into four logical devices of 8 GiB each, which share its
processor: seconds are no fewer than on one, bytes are those of real devices.
Nothing is compiled.

Every case is a process of its own. --jobs of them compile at the same time, and
take turns at what is timed; what does not fit beside the others runs again,
alone. Results are lines of JSON in --output; cases that are there are not run
again. --table prints what is there, and runs nothing. --small is a rehearsal,
with small models, and logical devices of a CPU where there is no GPU.

`of Keras`: beside M steps of Keras, by default, with the rows of a micro-batch;
for K above 1, `of K = 1` is beside one cell. `GiB`: at most, by TensorFlow's
counters; a CPU has none.
"""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

from absl import flags

from tfgpipe.commands import command_line
from tools.bench.case_worker import Case
from tools.bench.cases import Results, run_cases
from tools.flags import FIGURE, define
from tools.report import Report, Table, columns, commit, define_format


def define_run(values: flags.FlagValues, output: str, num_jobs: int) -> None:
    """Defines the flags of commands that run cases."""
    define_format(values)
    define(
        values,
        figure=FIGURE,
        output=(output, "File of the results, to which lines are added."),
        table=(False, "Print the results that there are."),
        jobs=(num_jobs, "Processes at a time."),
        rounds=(3, "Times to measure; the fastest one counts."),
        steps=(4, "Steps of each."),
    )


FLAGS = command_line.new_flags()
define_run(FLAGS, "bench_gpu.jsonl", num_jobs=3)
define(
    FLAGS,
    part=(["compare"], "Which cases.", ["compare", "whole", "split"]),
    small=(False, "Small models."),
)

K, LIMIT_MIB = 4, 8192  # parts of the GPU

COLUMNS = columns(
    "model | name: what | dtype | rows | k: K | m: M | step_s: step s: .4f | "
    "of_keras: of Keras: .2f | of_k_1: of K = 1: .2f | "
    "first_s: first step s: .1f | gib: GiB | plan_gib: plan"
)
_NEVER = {"remat": "never"}
_WHOLE: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (8, {}),
    (8, _NEVER),
    (8, {"remat": "never", "head_parts": 4}),
    (8, {"remat": "offload"}),
    (8, {"remat": "never", "weights_on": "host"}),
    (8, {"remat": "always", "remat_groups": 12}),
]
_SPLIT: list[tuple[int, dict[str, Any]]] = [
    (8, {}),
    (16, {}),
    (8, {"schedule": "1f1b"}),
    (8, {"schedule": "1f1b", "remat": "never"}),
    (8, {"schedule": "1f1b", "remat": "offload"}),
    (8, {"head_parts": 4}),
    (8, {"weights_on": "host"}),
    (8, {"shards": {"token_embedding": 4}}),
]


def run(values: flags.FlagValues, report: Report) -> None:
    """Runs the cases that have no result, and prints all that have."""
    table = report.add(Table("gpu", "", COLUMNS))
    fill(table, list_cases(values), values, rows_of)


def fill(
    table: Table,
    cases: list[Case],
    values: flags.FlagValues,
    make_rows: Callable[[list[Case], Results], list[dict[str, Any]]],
) -> None:
    """Runs the cases that have no result, and fills a table with all.

    `make_rows` makes rows of results, also of a run that was interrupted.
    """
    results = Results(pathlib.Path(values.output))
    try:
        if not values.table:
            run_cases(cases, results, values.jobs)
    finally:  # also after Ctrl-C
        table.rows += make_rows(cases, results)
        table.title = ", ".join(machines(results))


def list_cases(values: flags.FlagValues) -> list[Case]:
    """Lists the cases that the flags ask for, the most important first."""
    parts = {"compare": _compared, "whole": _whole, "split": _split}
    return [
        dataclasses.replace(
            case,
            is_small=values.small,
            rounds=values.rounds,
            steps=values.steps,
        )
        for part in dict.fromkeys(values.part)
        for case in parts[part]()
        if _is_installed(case)
    ]


def _compared() -> list[Case]:
    most = 8
    keras = Case(library="keras")
    parts = Case(m=most, k=K, limit_mib=12288, arguments=_NEVER)
    cases = [
        keras,
        Case(),
        dataclasses.replace(keras, jit_compile=False),
        Case(m=4, arguments=_NEVER),
        Case(m=most, arguments=_NEVER),
        *(dataclasses.replace(keras, rows=32 // m) for m in (4, most)),
        parts,
        Case(m=most),
        dataclasses.replace(parts, arguments={}),
    ]
    for model, rows in (("resnet50", 64), ("unet", 16)):
        plain = Case(model, "keras", rows)
        cases += [
            plain,
            Case(model, rows=rows),
            Case(model, rows=rows, m=4, arguments=_NEVER),
            dataclasses.replace(plain, rows=rows // 4),
            dataclasses.replace(plain, jit_compile=False),
            Case(model, rows=rows, k=K, m=4, limit_mib=8192, arguments=_NEVER),
        ]
    cases += [dataclasses.replace(c, dtype="float32") for c in cases[:7]]
    cases += [
        Case(jit_compile=False, dtype=dtype, m=m, arguments=arguments)
        for dtype in ("bfloat16", "float32")
        for m, arguments in ((1, {}), (most, _NEVER))
    ]
    others = [
        Case(library="jax"),
        Case(library="torch"),
        Case(library="torch", jit_compile=True),
        Case("resnet50", "jax", 64),
    ]
    return cases + others


def _whole() -> list[Case]:
    plain = Case(dtype="float32", jit_compile=False)
    return [
        dataclasses.replace(plain, library="keras"),
        *(dataclasses.replace(plain, m=m, arguments=a) for m, a in _WHOLE),
    ]


def _split() -> list[Case]:
    plain = Case(dtype="float32", jit_compile=False, limit_mib=LIMIT_MIB)
    parts = [
        dataclasses.replace(plain, k=K, m=m, arguments=a) for m, a in _SPLIT
    ]
    return [dataclasses.replace(plain, library="keras"), *parts]


def _is_installed(case: Case) -> bool:
    packages = {"jax": ["jax"], "torch": ["torch", "transformers"]}
    needed = packages.get(case.library, [])
    return all(importlib.util.find_spec(name) for name in needed)


def machines(results: Results) -> list[str]:
    """Returns cards, versions, and the commit of this checkout."""
    names = ("card", "versions")
    known = [line[n] for n in names for line in results.lines if n in line]
    return [*dict.fromkeys(known), f"commit {commit()}"]


def rows_of(cases: list[Case], results: Results) -> list[dict[str, Any]]:
    """Returns the rows of the cases that have a result, in their order."""
    rows = []
    for case in cases:
        result = results.result_of(case)
        if result is not None:
            base = results.result_of(_keras_of(case)) or {}
            one = results.result_of(_one_cell_of(case)) or {}
            rows.append(_row(case, result, base, one))
    return rows


def _keras_of(case: Case) -> Case:
    """Keras by default, with the rows of a micro-batch."""
    return dataclasses.replace(
        case,
        library="keras",
        rows=case.rows // case.m,
        k=1,
        m=1,
        jit_compile="auto",
        limit_mib=0,
        arguments={},
    )


def _one_cell_of(case: Case) -> Case:
    return dataclasses.replace(case, k=1, limit_mib=0)


def _row(
    case: Case, result: dict[str, Any], base: dict[str, Any], one: dict
) -> dict[str, Any]:
    row = {**dataclasses.asdict(case), **result, "name": case.name}
    if "error" in result:
        return row | {"name": f"{case.name}: {result['error']}"}
    for name, column in (("mib", "gib"), ("plan_mib", "plan_gib")):
        row[column] = ", ".join(f"{mib / 1024:.3g}" for mib in result[name])
    if "step_s" in base:
        row["of_keras"] = result["step_s"] / base["step_s"] / case.m
    if case.k > 1 and "step_s" in one:
        row["of_k_1"] = result["step_s"] / one["step_s"]
    return row
