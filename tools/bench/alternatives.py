"""The same Keras models by tfgpipe and by what else there is.

A GPT-2 of 12 blocks of 128 units, and a U-Net; 32 rows, in float32, by Adam,
from the same weights. All have the same cores, cut into two devices or whole.
Keras on JAX runs in the Python of $JAX_PY, which needs jax and keras alone.

`lines`: of a program, that change. `weights and slots`: of the device that has
most. `peak`: of a step, above what the process of all devices rests at, in a
run of its own in which freed memory goes back at once. `losses`, `weights`: the
largest difference from plain Keras on TensorFlow, of losses relative to them,
of the weights after three steps. `CPU seconds`: of all threads in a step;
--format=json has the ratio of seconds, too, for a machine without other work.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
from absl import flags

from tfgpipe.commands import command_line
from tools.bench.case_worker import Case
from tools.bench.cases import Results
from tools.bench.gpu import define_run, fill
from tools.flags import define
from tools.report import Report, Table, columns

FLAGS = command_line.new_flags()
define_run(FLAGS, "bench_alternatives.jsonl", num_jobs=1)
define(FLAGS, small=(False, "Small models."))

COLUMNS = columns(
    "model | way | lines | held_mib: weights and slots MiB: .1f | "
    "peak_mib: peak MiB: .0f | loss_difference: losses differ by: .0e | "
    "difference: weights by: .0e | cpu_ratio: CPU seconds / Keras: .2f"
)
_M = 4  # micro-batches, and gradients that are accumulated
# What is recomputed, by model. The scope recomputes layers: blocks, where there
# are some. It fails around a batch normalisation, in Keras 3.15 on TensorFlow.
_REMAT: dict[str, dict[str, Any]] = {
    "decoder": {
        "RematScope": {
            "mode": "list_of_layers",
            "layer_names": [f"block_{index}" for index in range(12)],
        }
    },
    "small_unet": {},
}
# Lines of a program: the wrapper; two arguments, of the optimizer and of `fit`,
# and the scope; the backend; and with it the mesh, the layout, what it says of
# kernels, and to set it.
_LINES = [0, 1, 2, 1, 8]


def run(values: flags.FlagValues, report: Report) -> None:
    """Runs the cases that have no result, and shows all that have."""
    table = report.add(Table("alternatives", "", COLUMNS))
    cases: list[Case] = []
    for model in _REMAT:
        ways = _cases(model, values)
        cases += [*ways, *map(_exact, ways)]
    fill(table, cases, values, _rows)
    where = table.title.partition(", commit")[0]
    table.title = f"Mini-batches of {cases[0].rows} rows; {where}"


def _cases(model: str, values: flags.FlagValues) -> list[Case]:
    """Returns a case for each way, plain Keras first."""
    base = Case(
        model,
        "keras",
        dtype="float32",
        is_small=values.small,
        rounds=values.rounds,
        steps=values.steps,
    )
    less = {**_REMAT[model], "gradient_accumulation_steps": _M}
    ways = [
        base,
        dataclasses.replace(base, library="gpipe", k=2, m=_M),
        dataclasses.replace(base, arguments=less),
        dataclasses.replace(base, library="jax"),
        dataclasses.replace(
            base, library="jax", k=2, arguments={"ModelParallel": True}
        ),
    ]
    stem = pathlib.Path(values.output).absolute().with_suffix("")
    return [
        dataclasses.replace(case, keep=f"{stem}_{model}_{index}.npz")
        for index, case in enumerate(ways)
    ]


def _exact(case: Case) -> Case:
    """Returns the case in which bytes are measured."""
    return dataclasses.replace(case, is_exact=True, keep="", rounds=1, steps=1)


def _name(case: Case) -> str:
    if case.library == "gpipe":
        return f"tfgpipe, K = {case.k}, M = {case.m}"
    backend = "JAX" if case.library == "jax" else "TensorFlow"
    names = {"gradient_accumulation_steps": f"{_M} accumulated gradients"}
    extras = [names.get(name, f"`{name}`") for name in case.arguments]
    return ", ".join([f"Keras on {backend}", *extras])


def _rows(cases: list[Case], results: Results) -> list[dict[str, Any]]:
    rows = []
    cases = [case for case in cases if not case.is_exact]
    for index, case in enumerate(cases):
        way = index % len(_LINES)
        plain = cases[index - way]
        result, base, memory = map(
            results.result_of, (case, plain, _exact(case))
        )
        if not (result and base and memory):
            continue
        row = {"model": case.model, "way": _name(case)}
        row["lines"] = _LINES[way] + ("RematScope" in case.arguments)
        if error := result.get("error") or memory.get("error"):
            row["way"] += f": {error}"
        else:
            row["held_mib"] = result["held_mib"]
            row["peak_mib"] = memory["mib"][0]
            row["ratio"] = result["step_s"] / base["step_s"]
            row["cpu_ratio"] = result["cpu_s"] / base["cpu_s"]
            row |= _differences(case, plain, result, base)
        rows.append(row)
    return rows


def _differences(
    case: Case, plain: Case, result: dict[str, Any], base: dict[str, Any]
) -> dict[str, float]:
    """Returns how far losses and weights are from plain Keras's."""
    with np.load(case.keep) as ours, np.load(plain.keep) as theirs:
        pairs = [(ours[name], theirs[name]) for name in theirs]
    losses = zip(result["losses"], base["losses"])
    return {
        "loss_difference": max(abs(a - b) / abs(b) for a, b in losses),
        "difference": max(float(np.abs(a - b).max()) for a, b in pairs),
    }
