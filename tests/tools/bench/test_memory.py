"""The benchmark of memory: its search, its flags, and one tiny trial."""

import doctest
import json
import multiprocessing

import pytest

from tools.bench import __main__ as bench
from tools.bench import memory_rows, memory_trial, memory_worker
from tools.bench.memory_rows import by_model, largest, row_of
from tools.bench.memory_trial import Job, Outcome, Size, Use

SIZE = Size(width=4, num_heads=2, sequence=4, batch_size=8)


def outcome(activations, parameters=100):
    return Outcome(parameters, (Use(3, 1, activations, 9), Use(2, 1, 1, 8)))


# ------------------------------------------------------------------ the search
@pytest.mark.parametrize("most", [0, 1, 2, 7, 50, 100])
def test_search_finds_the_largest_from_any_guess(most):
    for guess in (1, 2, 6, 7, 8, 51, 300):
        assert largest(lambda number: number <= most, guess) == most


@pytest.mark.parametrize("guess", [1, 90, 100, 110, 1000])
def test_search_with_a_tolerance_stops_early(guess):
    tried = []

    def fits(number):
        tried.append(number)
        return number <= 100

    assert 90 <= largest(fits, guess, tolerance=0.1) <= 100
    assert len(tried) == len(set(tried)) <= 12


def test_search_tries_twice_if_the_guess_is_right():
    tried = []
    largest(lambda n: tried.append(n) or n <= 10, guess=10, tolerance=0.1)
    assert tried == [10, 11]


# -------------------------------------------------------------------- the rows
def test_docstrings_of_rows():
    assert doctest.testmod(memory_rows).failed == 0


def test_model_counts_the_layers_of_the_largest_cell():
    job = Job(SIZE, num_layers=9, k=4, m=2)
    assert by_model(job, 8.0) == SIZE.boundary_mib + 3 * 8 / 2


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
        (["--heads=3"], "--heads must divide --width"),
        (["--batch_size=4"], "must be at most --batch_size, 4"),
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


def test_ways_are_compared_with_the_first(monkeypatch, capsys):
    def run(job):
        """A head in parts takes half, and a share that share."""
        share = job.remat if isinstance(job.remat, float) else 1.0
        found = outcome(20 * share / min(2, job.head_parts))
        return found._replace(seconds=2.0)

    monkeypatch.setattr(memory_trial, "run", run)
    assert bench.main(["bench", "memory", "--table=ways", "--format=json"]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    found = {
        row["way"]: (row["activations_mib_ratio"], row["seconds_ratio"])
        for row in table["rows"]
    }
    assert found["remat=0.4"] == (0.4, 1)
    assert found["head_parts=4"] == (0.5, 1)
    assert found['remat="never"'] == (1, 1)


def test_shards_are_tried_with_a_limit_too(monkeypatch, capsys):
    def run(job):
        """A layer takes 400 MiB, or that share of them."""
        share = 400.0 / job.num_shards
        fits = not job.limit_mib or share <= job.limit_mib
        return outcome(share) if fits else Outcome(why="a process died")

    monkeypatch.setattr(memory_trial, "run", run)
    flags = ["--table=shards", "--shards=1,2", "--format=json"]
    assert bench.main(["bench", "memory", *flags]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    found = [(r["shards"], r["fits"]) for r in table["rows"]]
    assert found == [(1, False), (2, True)]


def test_shards_are_on_accelerators_of_their_own_at_last():
    def places(**job):
        found = memory_trial.shards_of(Job(SIZE, 1, **job))
        devices = [*map(memory_worker.device, range(5))]
        return found and [*map(devices.index, found["head"])]

    assert places(k=2) is None
    assert places(k=1, num_shards=2) == [0, 1]
    assert places(k=2, num_shards=2) == [0, 1]
    assert places(k=4, num_shards=2) == [2, 3]


def test_a_method_that_fits_nothing_is_a_note(monkeypatch, capsys):
    def run(job):
        return outcome(1.0) if job.k == 0 and job.num_layers == 1 else Outcome()

    monkeypatch.setattr(memory_trial, "run", run)
    flags = ["--table=largest", "--k=2"]
    assert bench.main(["bench", "memory", *flags]) == 0
    assert "pipeline-2: not even one layer fits" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("shown", "outcome"),
    [("a process died", Outcome(why="a process died")), ("", None)],
)
def test_failures_are_errors_unless_memory_is_the_cause(shown, outcome):
    class Accelerators:
        def out_of_memory(self, seconds):
            return shown

    ours, theirs = multiprocessing.Pipe()
    theirs.send((None, "ValueError: something else"))
    job = Job(SIZE, 1, k=1)
    if outcome is None:
        with pytest.raises(RuntimeError, match="something else"):
            memory_trial._judge(job, ours, Accelerators())
    else:
        judged = memory_trial._judge(job, ours, Accelerators())
        assert judged == (None, outcome.why)


def test_preset_is_loaded_by_a_share_and_its_largest_variable(capsys):
    """Everything is real, and small: an accelerator needs more to begin."""
    flags = ["--table=loading", "--k=2", "--format=json"]
    flags += ["--preset_units=512", "--preset_layers=2"]
    assert bench.main(["bench", "memory", *flags]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    plain, row = table["rows"]
    assert row["total"] == plain["total"] == plain["share"]
    assert row["total"] / 2 < row["share"] < row["total"]
    assert row["largest"] == 8.0  # MiB, of 8 x 512 tokens of 512 units
    assert row["above"] < 3.6 * row["largest"] < plain["total"]
