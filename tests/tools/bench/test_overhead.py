"""What a pipeline costs beside the work."""

import pytest


def overhead(tables, *parts):
    """The tables of small models."""
    return tables(
        "overhead",
        f"--part={','.join(parts)}",
        "--rounds=2",
        "--model=transformer",
        "--dispatch_k=2",
        "--dispatch_m=1,2",
        "--l=2",
        "--k=1,2,3",
        "--m=2",
    )


@pytest.mark.slow
def test_overhead_measures_steps(tables):
    (step,) = overhead(tables, "step")["step"]
    assert step["ratio"] > 0


@pytest.mark.slow
def test_overhead_measures_dispatch_and_tracing(tables):
    found = overhead(tables, "dispatch", "tracing")
    pipeline, calls = found["dispatch"]
    assert (pipeline["fewest"], pipeline["most"]) == (4, 8)
    assert calls["what"] == "empty function calls"
    # Three cells need three layers.
    assert [(r["l"], r["k"], r["num_tasks"]) for r in found["tracing"]] == [
        (2, 1, 4),
        (2, 2, 8),
    ]
    own, keras = found["trial"]
    assert (own["layers"], keras["layers"]) == ("own", "Keras's")
    assert own["share"] > keras["share"] > 0


@pytest.mark.slow
def test_overhead_measures_safety(tables):
    skipping, saving = overhead(tables, "safety")["safety"]
    assert skipping["what"] == "skip_nonfinite"
    assert saving["what"] == "a checkpoint in 10 steps"
    assert skipping["ratio"] > 0 and saving["ratio"] > 0
