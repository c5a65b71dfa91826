"""The benchmark beside torch, most of it with a made-up program."""

import ast
import json
import pathlib
import sys
import textwrap

import keras
import numpy as np
import pytest

from tools.bench import __main__ as bench
from tools.bench import peers as bench_peers
from tools.bench.peer_programs import tfgpipe_worker, work
from tools.bench.step_worker import Worker

ROOT = pathlib.Path(__file__).parents[3]
WORKER = """
    import json, sys

    seconds = 1.0 if "--k=1" in sys.argv else 0.6
    losses = [4.0, 3.0, 2.0]
    print("starting")
    print("READY", json.dumps({"losses": losses, "parameter_bytes": 2**20}))
    sys.stdout.flush()
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        answer = {"mib": 12.0} if line.strip() == "mem" else {"s": seconds}
        print("T", json.dumps(answer))
        sys.stdout.flush()
"""


@pytest.fixture
def table(tmp_path, monkeypatch, capsys):
    """Runs the command; all libraries take the same time."""
    program = tmp_path / "worker.py"
    program.write_text(textwrap.dedent(WORKER))

    def start(command, variables, is_pinned):
        python, _, _, *words = command
        return Worker([python, str(program), *words], variables, is_pinned)

    monkeypatch.setattr(bench_peers, "Worker", start)
    monkeypatch.setattr(bench_peers, "_has_torch", bool)
    monkeypatch.setattr(bench_peers, "_CALM", 2.0)  # the tests are not alone

    def table(*words):
        words = ["--format=json", "--rounds=2", "--nocompiled", *words]
        assert bench.main(["bench", "peers", *words]) == 0
        (found,) = json.loads(capsys.readouterr().out)["tables"]
        return found

    return table


def test_peers_take_turns_and_are_compared_with_their_own_k_1(table):
    rows = table(f"--torch_python={sys.executable}")["rows"]
    assert [(row["library"], row["k"]) for row in rows] == [
        ("tfgpipe gpipe", 1),
        ("tfgpipe gpipe", 2),
        ("tfgpipe 1f1b", 2),
        ("tfgpipe interleaved", 2),
        ("tfgpipe zero_bubble", 2),
        ("torch gpipe", 1),
        ("torch gpipe", 2),
        ("torch 1f1b", 2),
        ("torch interleaved", 2),
    ]
    assert [row["seconds"] for row in rows[5:7]] == [1.0, 0.6]
    assert rows[7]["speedup"] == pytest.approx(1 / 0.6, rel=1e-4)
    ideal = 2 * 8 / (8 + 1)
    assert rows[7]["of_ideal"] == pytest.approx(1 / 0.6 / ideal, rel=1e-4)
    assert rows[7]["loss_difference"] == 0
    # With a gradient that is kept between steps.
    assert (rows[0]["mib"], rows[7]["mib"]) == (12, 13)


def test_torch_that_is_not_there_is_a_note(table):
    found = table("--torch_python=", "--notime")
    assert {row["library"].split()[0] for row in found["rows"]} == {"tfgpipe"}
    assert "torch is not installed: pip" in found["notes"][0]


def test_program_of_torch_needs_nothing_of_tfgpipe():
    """It runs where it is not installed."""
    names = ["peer_programs/work.py", "peer_programs/torch_worker.py"]
    names += ["protocol.py", "memory_worker.py"]
    imported = set()
    for name in names:
        tree = ast.parse((ROOT / "tools" / "bench" / name).read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
    imported -= set(sys.stdlib_module_names)
    others = {name.split(".")[0] for name in imported}
    assert others - set(sys.stdlib_module_names) == {"numpy", "tools", "torch"}
    assert {name for name in imported if name.startswith("tools")} == {
        "tools.bench.memory_worker",
        "tools.bench.peer_programs",
        "tools.bench.protocol",
    }


def test_worker_that_dies_while_asked_is_an_error():
    code = "print('READY {}', flush=True); input(); raise KeyError('gone')"
    worker = Worker([sys.executable, "-c", code], {}, is_pinned=True)
    try:
        assert worker.wait(60)
        with pytest.raises(RuntimeError, match="gone"):
            worker.step()
    finally:
        worker.close()


def test_tfgpipe_begins_with_the_weights_of_all_peers(monkeypatch):
    monkeypatch.setattr(work, "TRANSFORMER", work.Transformer(1, 4, 2, 6, 3, 8))
    model, x = tfgpipe_worker.build(work.Order(1, 4, "gpipe", False))
    for layer, values in zip(model.sequence, work.block_weights()):
        for variable, value in zip(layer.weights, values.values()):
            np.testing.assert_allclose(
                variable.numpy().ravel(), value.ravel(), rtol=1e-6
            )
    expected = float(keras.ops.mean(keras.ops.square(model(x))))
    step = tfgpipe_worker.train_step(model, x)
    assert step() == pytest.approx(expected, 1e-5)


@pytest.mark.slow
def test_torch_computes_what_tfgpipe_computes():
    if not bench_peers._has_torch(bench_peers.FLAGS["torch_python"].default):
        pytest.skip(f"not installed: {bench_peers.INSTALL}")
    bench_peers.FLAGS(["peers"])
    losses = []
    for c in bench_peers.CONFIGURATIONS:
        if c.k == 2 and not c.is_compiled:
            worker = bench_peers.start(c, bench_peers.FLAGS, {})
            try:
                assert worker.wait(300), worker.why_not()
                losses.append(worker.ready["losses"])
                assert worker.ask("step")["loss"] < losses[-1][-1]
                assert worker.ask("mem")["mib"] >= 0
            finally:
                worker.close()
    assert losses[1:] == [pytest.approx(losses[0], 2e-5)] * (len(losses) - 1)
