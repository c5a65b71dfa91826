"""The benchmark beside other libraries, most of it with made-up ones.

The slow tests run those that are installed.
"""

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
from tools.bench.peer_programs import (
    tfgpipe_worker,
    work,
)
from tools.bench.peer_programs.protocol import Order
from tools.bench.peers import INSTALL, PEERS, Configuration
from tools.bench.step_worker import Worker

ROOT = pathlib.Path(__file__).parents[3]
PROGRAMS = ROOT / "tools" / "bench" / "peer_programs"
WORKER = """
    import json, sys

    print("starting")
    assert "--work=A" in sys.argv, "only work A"
    k = [a for a in sys.argv if a.startswith("--k=")][0]
    seconds = 1.0 if k == "--k=1" else 0.6
    losses = [4.0, 3.0, 2.0]
    print("READY", json.dumps({"losses": losses, "parameter_bytes": 2**20}))
    sys.stdout.flush()
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        answer = {"s": seconds}
        if line.strip() == "mem":
            answer = {"mib": 12.0}
        print("T", json.dumps(answer))
        sys.stdout.flush()
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Peers that all run one program, and take the same time."""
    program = tmp_path / "worker.py"
    program.write_text(textwrap.dedent(WORKER))

    def start(command, variables, is_pinned):
        python, _, _, *words = command
        return Worker([python, str(program), *words], variables, is_pinned)

    monkeypatch.setattr(bench_peers, "Worker", start)
    monkeypatch.setattr(
        bench_peers, "_has", lambda python, module: bool(python)
    )
    monkeypatch.setattr(bench_peers, "_CALM", 2.0)  # the tests are not alone


def tables(capsys, *words):
    command = ["bench", "peers", "--format=json", "--rounds=2"]
    assert bench.main([*command, *words]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    return table


# ---------------------------------------------------------------- the commands


def test_peers_take_turns_and_are_compared_with_their_own_k_1(made_up, capsys):
    torch = f"--torch_python={sys.executable}"
    flags = ["--peer=torch-gpipe,torch-1f1b", "--remat=on", "--work=A", torch]
    rows = tables(capsys, *flags)["rows"]
    assert [(row["library"], row["k"]) for row in rows] == [
        ("torch-gpipe", 1),
        ("torch-gpipe", 2),
        ("torch-1f1b", 2),
    ]
    assert [row["seconds"] for row in rows] == [1.0, 0.6, 0.6]
    assert rows[2]["speedup"] == pytest.approx(1 / 0.6, rel=1e-4)
    ideal = 2 * 8 / (8 + 1)
    assert rows[2]["of_ideal"] == pytest.approx(1 / 0.6 / ideal, rel=1e-4)
    assert rows[2]["loss_difference"] == 0
    # With a gradient that is kept between steps.
    assert rows[2]["mib"] == 13


def test_peers_that_are_not_there_are_notes(made_up, capsys):
    flags = ["--peer=lingvo,torch-gpipe", "--work=A", "--remat=on"]
    lingvo = f"--lingvo_python={sys.executable}"
    table = tables(capsys, *flags, lingvo, "--torch_python=")
    assert {row["library"] for row in table["rows"]} == {"lingvo"}
    assert any(
        note.startswith("torch-gpipe: not installed: ") and "pip" in note
        for note in table["notes"]
    )


# ------------------------------------------------------------------- the peers
def test_interpreters_without_the_module_are_not_installed():
    pythons = {"tfgpipe": sys.executable, "lingvo": None, "torch": "/no/such"}
    missing = bench_peers.not_installed(list(PEERS), pythons)
    assert missing == [n for n, p in PEERS.items() if p.python != "tfgpipe"]


def test_programs_of_other_libraries_need_nothing_of_tfgpipe():
    """They run where it is not installed."""
    found = set()
    for path in PROGRAMS.glob("*.py"):
        if path.name == "tfgpipe_worker.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(
                    node.module
                    if node.module.startswith("tools")
                    else node.module.partition(".")[0]
                )
    others = {"absl", "lingvo", "numpy", "tensorflow", "torch", "torchgpipe"}
    own = {"tools.bench.memory_worker", "tools.bench.peer_programs"}
    assert found - set(sys.stdlib_module_names) == others | own


@pytest.mark.parametrize(
    ("configuration", "possible"),
    [
        (Configuration("lingvo", "A", 2, 8, True), True),
        (Configuration("lingvo", "A", 2, 8, False), False),
        (Configuration("lingvo", "A", 1, 1, False), True),
        (Configuration("torchgpipe", "C", 8, 32, True), False),
        (Configuration("torch-1f1b", "A", 2, 1, True), False),
        (Configuration("torch-1f1b-compiled", "A", 2, 1, True), False),
        (Configuration("gpipe-always", "A", 2, 8, False), False),
        (Configuration("gpipe", "A", 2, 8, False), True),
    ],
)
def test_what_peers_cannot_do_is_left_out(configuration, possible):
    assert bench_peers.is_possible(configuration) == possible


# ----------------------------------------------------------------- the workers


def test_worker_that_dies_while_asked_is_an_error():
    code = "print('READY {}', flush=True); input(); raise KeyError('gone')"
    worker = Worker([sys.executable, "-c", code], {}, is_pinned=True)
    try:
        assert worker.wait(60)
        with pytest.raises(RuntimeError, match="gone"):
            worker.step()
    finally:
        worker.close()


# ---------------------------------------------------------------- the programs


@pytest.fixture
def tiny(monkeypatch):
    """Tiny work."""
    monkeypatch.setattr(work, "TRANSFORMER", work.Transformer(4, 4, 2, 6, 3, 8))
    convolutions = work.Convolutions((2, 2, 2, 2), (1, 2, 1, 1), 4, 8)
    monkeypatch.setattr(work, "CONVOLUTIONS", convolutions)
    monkeypatch.setattr(work, "FORWARD_SECONDS", 1e-4)


def order(name, variant="gpipe", k=2):
    return Order(name, k, 4, True, variant)


@pytest.mark.parametrize(
    ("name", "variant"),
    [("A", "gpipe"), ("A", "gpipe,layers=keras"), ("B", "gpipe")],
)
def test_tfgpipe_begins_with_the_weights_of_all_peers(
    tiny, monkeypatch, name, variant
):
    one_block = work.TRANSFORMER._replace(blocks=1)  # quicker
    monkeypatch.setattr(work, "TRANSFORMER", one_block)
    model, x = tfgpipe_worker.build(order(name, variant, k=1))
    for layer, values in zip(model.sequence, tfgpipe_worker.weights(name)):
        for variable, value in zip(layer.weights, values):
            np.testing.assert_allclose(
                variable.numpy().ravel(), value.ravel(), rtol=1e-6
            )
    expected = float(keras.ops.mean(keras.ops.square(model(x))))
    if name == "A":  # in B, a micro-batch is normalised by itself
        step = tfgpipe_worker.train_step(model, x)
        assert step() == pytest.approx(expected, 1e-5)


# --------------------------------------------------------------- the libraries
def first_answers(peer, name):
    """The first losses of a peer, a step, and its memory."""
    pythons = {"tfgpipe": sys.executable}
    for kind in ("lingvo", "torch"):
        pythons[kind] = bench_peers.FLAGS[f"{kind}_python"].default
    if bench_peers.not_installed([peer], pythons):
        pytest.skip(f"not installed: {INSTALL[PEERS[peer].library]}")
    c = Configuration(peer, name, 2, 2, True)
    worker = bench_peers.start(c, pythons, {})
    try:
        assert worker.wait(300), worker.why_not()
        return worker.ready["losses"], worker.ask("step"), worker.ask("mem")
    finally:
        worker.close()


@pytest.fixture(scope="module")
def losses_of_tfgpipe():
    return {name: first_answers("gpipe", name)[0] for name in "AB"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize(
    "peer",
    [
        n
        for n, p in PEERS.items()
        if p.python != "tfgpipe" and "compiled" not in n
    ],
)
def test_library_computes_what_tfgpipe_computes(losses_of_tfgpipe, peer, name):
    losses, step, memory = first_answers(peer, name)
    assert losses == pytest.approx(losses_of_tfgpipe[name], 2e-5)
    assert step["loss"] < losses[-1]
    assert step["s"] > 0 and memory["mib"] >= 0
