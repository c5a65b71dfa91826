"""The benchmark beside other libraries, most of it with made-up ones.

The slow tests run those that are installed.
"""

import ast
import io
import json
import os
import pathlib
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

from tools.bench import __main__ as bench
from tools.bench import models, peer_libraries, step_worker
from tools.bench import peers as bench_peers
from tools.bench.peer_libraries import INSTALL, PEERS, Configuration
from tools.bench.peer_programs import (
    lingvo_operations,
    protocol,
    tensorflow_block,
    tfgpipe_worker,
    work,
)
from tools.bench.peer_programs.protocol import Order
from tools.bench.step_worker import Step, Worker

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

    monkeypatch.setattr(peer_libraries, "Worker", start)
    monkeypatch.setattr(
        peer_libraries, "_has", lambda python, module: bool(python)
    )
    monkeypatch.setattr(bench_peers, "_CALM", 2.0)  # the tests are not alone


def tables(capsys, *words):
    command = ["bench", "peers", "--format=json", "--rounds=2"]
    assert bench.main([*command, *words]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    return table


# ---------------------------------------------------------------- the commands
def test_something_has_to_be_measured(capsys):
    assert bench.main(["bench", "peers", "--notime", "--nomemory"]) == 2
    assert "nothing to measure" in capsys.readouterr().err


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


def test_peers_that_fail_are_notes(made_up, capsys):
    flags = ["--peer=torchgpipe,lingvo", "--work=A,B", "--remat=on"]
    pythons = [f"--{p}_python={sys.executable}" for p in ("torch", "lingvo")]
    table = tables(capsys, *flags, *pythons)
    assert {row["work"] for row in table["rows"]} == {"A"}
    assert any("does not run: " in note for note in table["notes"])
    assert any("only work A" in note for note in table["notes"])


# ------------------------------------------------------------------- the peers
def test_interpreters_without_the_module_are_not_installed():
    pythons = {"tfgpipe": sys.executable, "lingvo": None, "torch": "/no/such"}
    missing = peer_libraries.not_installed(list(PEERS), pythons)
    assert missing == [n for n, p in PEERS.items() if p.python != "tfgpipe"]


@pytest.mark.parametrize("peer", PEERS)
def test_program_begins_with_how_to_install_its_library(peer):
    library = PEERS[peer].library
    text = (PROGRAMS / f"{library}_worker.py").read_text("utf-8")
    docstring = ast.get_docstring(ast.parse(text))
    page = (ROOT / "docs" / "measurements_peers.md").read_text("utf-8")
    command, _, _ = INSTALL[library].partition(", in an")
    for installed in command.split(" && "):
        assert installed in docstring
        assert library == "tfgpipe" or installed in page
    assert f"peer_programs.{library}_worker" in docstring


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
    assert peer_libraries.is_possible(configuration) == possible


def test_every_baseline_is_a_peer_of_the_same_python():
    for peer in PEERS.values():
        assert PEERS[peer.baseline].python == peer.python
        assert peer.library in INSTALL


# ----------------------------------------------------------------- the workers
def test_least_disturbed_steps_are_chosen():
    steps = [Step(3.0, 0.5), Step(1.0, 0.0), Step(2.0, 0.1)]
    chosen = step_worker.least_disturbed(steps, 2)
    assert chosen == [Step(1.0, 0.0), Step(2.0, 0.1)]
    assert step_worker.median(chosen) == 1.5


def test_worker_that_dies_says_why():
    worker = Worker([sys.executable, "-c", "raise ValueError('no luck')"], {})
    try:
        assert not worker.wait(60)
        assert worker.why_not() == "ValueError: no luck"
    finally:
        worker.close()


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
def test_order_survives_the_command_line():
    given = Order("B", 2, 8, False, "1f1b,remat_groups=4,layers=keras")
    assert protocol.order(given.words()) == given
    assert given.schedule == "1f1b"
    assert given.options == {"remat_groups": "4", "layers": "keras"}


def test_program_answers_until_it_is_told_to_quit(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("step\nmem\nquit\nstep\n"))
    losses = iter(range(10))
    step = lambda: float(next(losses))  # noqa: E731
    protocol.serve(step, lambda: [10.0, 2.0], version="new")
    ready, *answers = capsys.readouterr().out.splitlines()
    facts = json.loads(ready.removeprefix("READY "))
    assert facts == {"losses": [0.0, 1.0, 2.0], "version": "new"}
    timed, memory = (json.loads(a.removeprefix("T ")) for a in answers)
    assert timed["loss"] == 3.0 and timed["s"] >= 0
    assert memory == {"mib": 12.0}


def test_cells_are_of_nearly_equal_length():
    assert work.cuts("A", 2) == [(0, 4), (4, 8)]
    assert work.cuts("B", 5) == [(0, 2), (2, 4), (4, 7), (7, 9), (9, 12)]
    assert work.cuts("C", 3) == [(0, 1), (1, 2), (2, 3)]


@pytest.fixture
def tiny(monkeypatch):
    """Tiny work."""
    monkeypatch.setattr(work, "TRANSFORMER", work.Transformer(4, 4, 2, 6, 3, 8))
    convolutions = work.Convolutions((2, 2, 2, 2), (1, 2, 1, 1), 4, 8)
    monkeypatch.setattr(work, "CONVOLUTIONS", convolutions)
    monkeypatch.setattr(work, "FORWARD_SECONDS", 1e-4)


def test_work_is_the_same_each_time(tiny):
    for values in (work.block_weights, work.kernels):
        tf.nest.map_structure(np.testing.assert_array_equal, values(), values())
    shapes = {"A": (8, 3, 4), "B": (8, 4, 4, 3), "C": (16, 1)}
    for name, shape in shapes.items():
        x = work.inputs(name, 4)
        assert x.shape == shape and x.dtype == np.float32
        np.testing.assert_array_equal(x, work.inputs(name, 4))


def test_written_block_computes_what_layers_of_keras_compute(tiny):
    x = work.inputs("A", 1)
    layer = models.TransformerBlock(2, 6)
    layer.build(x.shape)
    values = work.block_weights()[0]
    rng = np.random.default_rng(0)  # some begin with zeros, or ones
    values = {
        name: value + rng.normal(size=value.shape).astype("float32")
        for name, value in values.items()
    }
    tfgpipe_worker.load(layer, list(values.values()))
    written = tensorflow_block.block(values, tf.constant(x))
    np.testing.assert_allclose(written, layer(x), rtol=1e-4, atol=1e-5)


def test_checks_of_lingvo_that_are_absent_do_nothing():
    absent = lingvo_operations.Absent("gen_x_ops")
    with tf.Graph().as_default():
        for check in lingvo_operations._CHECKS:
            assert getattr(absent, check)(1, msg="").type == "NoOp"
    with pytest.raises(NotImplementedError, match="`best_step` is in its"):
        absent.best_step()
    assert not hasattr(absent, "__path__")


@pytest.mark.parametrize("is_there", [True, False])
def test_operations_of_lingvo_are_replaced_where_they_do_not_load(
    tmp_path, monkeypatch, is_there
):
    (tmp_path / "lingvo" / "core" / "ops").mkdir(parents=True)
    (tmp_path / "lingvo" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lingvo", raising=False)
    name = lingvo_operations._MODULE
    monkeypatch.setitem(sys.modules, name, None)  # and taken away afterwards
    if is_there:
        monkeypatch.setattr(tf, "load_op_library", lambda path: None)
    assert lingvo_operations.replace_if_absent() != is_there
    assert isinstance(sys.modules[name], lingvo_operations.Absent) != is_there


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


def test_order_of_the_weights_is_that_of_the_block(tiny):
    model, _ = tfgpipe_worker.build(order("A", "gpipe,layers=keras"))
    found = [w.path.split("/")[-2:] for w in model.sequence[0].weights]
    names = list(work.block_shapes())
    assert len(found) == len(names)
    for name, (layer, weight) in zip(names, found):
        of, _, kind = name.partition("_")
        if of in ("query", "key", "value", "output"):
            assert layer.removeprefix("attention_") == of
            assert weight == {"weight": "kernel", "bias": "bias"}[kind]
        elif of.startswith("norm"):
            assert weight == {"weight": "gamma", "bias": "beta"}[kind]


@pytest.mark.parametrize(
    ("name", "variant", "num_partitions"),
    [
        ("A", "interleaved", 4),
        ("A", "1f1b,remat=always,remat_groups=2", 2),
        ("C", "gpipe", 2),
    ],
)
def test_tfgpipe_does_what_the_variant_says(
    tiny, name, variant, num_partitions
):
    model, x = tfgpipe_worker.build(order(name, variant))
    assert model.num_partitions == num_partitions
    assert model.schedule == variant.partition(",")[0]
    is_always = "remat=always" in variant
    assert model.remat == ("always" if is_always else "except_last")
    groups = {op.cell for op in model.program(8).ops}
    assert len(groups) == num_partitions * (2 if "groups" in variant else 1)
    assert x.shape[0] >= 8


def test_workers_find_their_program_in_the_checkout(monkeypatch):
    started = {}

    def start(command, variables, is_pinned):
        started.update(command=command, variables=variables)

    monkeypatch.setattr(peer_libraries, "Worker", start)
    pythons = {"tfgpipe": "one", "torch": "another"}
    for peer, python in (("1f1b", "one"), ("torch-1f1b", "another")):
        c = Configuration(peer, "A", 2, 8, True)
        peer_libraries.start(c, pythons, {"A": "B"})
        assert started["command"][:2] == [python, "-m"]
        assert "--variant=1f1b" in started["command"]
        path = started["variables"]["PYTHONPATH"]
        module = started["command"][2]
        assert os.path.exists(f"{path}/{module.replace('.', '/')}.py")
        assert started["variables"]["A"] == "B"


# --------------------------------------------------------------- the libraries
def first_answers(peer, name):
    """The first losses of a peer, a step, and its memory."""
    pythons = {"tfgpipe": sys.executable}
    for kind in ("lingvo", "torch"):
        pythons[kind] = bench_peers.FLAGS[f"{kind}_python"].default
    if peer_libraries.not_installed([peer], pythons):
        pytest.skip(f"not installed: {INSTALL[PEERS[peer].library]}")
    c = Configuration(peer, name, 2, 2, True)
    worker = peer_libraries.start(c, pythons, {})
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
