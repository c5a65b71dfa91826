"""The benchmark of memory: its search, its flags, and one tiny trial."""

import doctest
import json

import pytest

from tools.bench import __main__ as bench
from tools.bench import memory, memory_trial
from tools.bench.memory import largest, row_of
from tools.bench.memory_trial import Job, Outcome, Size, Use

SIZE = Size(width=4, num_heads=2, sequence=4, batch_size=8)


def outcome(activations, parameters=100):
    return Outcome(parameters, (Use(3, 1, activations, 9), Use(2, 1, 1, 8)))


# ------------------------------------------------------------------ the search
@pytest.mark.parametrize("most", [0, 1, 2, 7, 50, 100])
def test_search_finds_the_largest_from_any_guess(most):
    for guess in (1, 2, 6, 7, 8, 51, 300):
        assert largest(lambda number: number <= most, guess) == most


# -------------------------------------------------------------------- the rows
def test_docstrings_of_rows():
    assert doctest.testmod(memory).failed == 0


def test_row_has_the_accelerator_with_most_and_ratios_to_naive():
    naive = row_of(Job(SIZE, 2, k=0), outcome(40), None)
    row = row_of(Job(SIZE, 8, k=2, m=4), outcome(30, 500), naive)
    assert (naive["method"], row["method"]) == ("naive", "pipeline-2")
    assert (row["held_mib"], row["activations_mib"]) == (3, 30)
    assert (row["layers_ratio"], row["parameters_ratio"]) == (4, 5)
    assert row["activations_mib_ratio"] == 0.75
    assert row["model_mib"] == SIZE.boundary_mib + 4 * 20 / 4


def test_cells_have_even_numbers_of_blocks_and_the_layers_at_the_ends():
    assert memory_trial.cut_of(Job(SIZE, 7, k=3)) == [4, 2, 3]
    assert memory_trial.cut_of(Job(SIZE, 4, k=2, chunks=2)) == [2, 1, 1, 2]
    assert memory_trial.cut_of(Job(SIZE, 5, k=1)) == [7]


# ---------------------------------------------------------------- the commands
@pytest.mark.parametrize(
    ("flags", "wording"),
    [
        (["--m=500"], "must be at most the batch size, 256"),
        (["--layers=2", "--k=4"], "--layers must be at least"),
        (["--schedule_layers=1"], "--schedule_layers must be at least"),
        (["--schedule=interleaved"], "number of cells, 8"),
        (["--schedule=clever"], "unknown: ['clever']"),
        (["--table=all"], "unknown: ['all']"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, wording, capsys):
    assert bench.main(["bench", "memory", *flags]) == 2
    assert wording in capsys.readouterr().err


def test_tables_come_from_trials(monkeypatch, capsys):
    def run(job):
        """Naive holds 3 layers, an accelerator of a pipeline 10."""
        most = 10 * job.k if job.k else 3
        if job.limit_mib and job.num_layers > most:
            return Outcome(why="a process died")
        return outcome(5.0 * job.num_layers, job.num_layers)

    monkeypatch.setattr(memory_trial, "run", run)
    flags = [
        "--table=largest,layers,schedules",
        "--k=1,2",
        "--schedule_k=2",
        "--format=json",
    ]
    assert bench.main(["bench", "memory", *flags]) == 0
    made = json.loads(capsys.readouterr().out)["tables"]
    rows = {table["name"]: table["rows"] for table in made}
    found = {r["method"]: r["layers"] for r in rows["largest"]}
    assert found == {"naive": 3, "pipeline-1": 10, "pipeline-2": 20}
    assert [r["layers"] for r in rows["layers"]] == 3 * [8]
    assert [(r["schedule"], r["remat"]) for r in rows["schedules"]] == [
        ("gpipe", "except_last"),
        ("1f1b", "except_last"),
        ("gpipe", "never"),
        ("1f1b", "never"),
    ]


# ------------------------------------------------------------- the real thing
def test_trials_train_or_run_out_of_memory():
    job = Job(SIZE, num_layers=1, k=1, m=2)
    trained = memory_trial.run(job, seconds=120)
    assert trained.fits and len(trained.uses) == 1
    # Weights and two slots; the optimizer's and the metrics' scalars.
    used = trained.uses[0]
    assert used.held == pytest.approx(3 * used.gradients, rel=0.1)
    large = SIZE._replace(sequence=64, width=64, batch_size=64)
    refused = memory_trial.run(
        job._replace(size=large, k=0, m=1, limit_mib=30), seconds=120
    )
    assert not refused.fits and refused.why
