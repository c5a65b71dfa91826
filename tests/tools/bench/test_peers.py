"""The benchmark beside other libraries, with made-up ones: none is needed."""

import importlib
import itertools
import json
import os
import sys
import textwrap
import types

import keras
import numpy as np
import pytest

from tools.bench import __main__ as bench
from tools.bench import peer_libraries, step_worker
from tools.bench import peers as bench_peers
from tools.bench.peer_libraries import PEERS, Configuration
from tools.bench.step_worker import Step, Worker

WORKER = """
    import json, sys

    print("starting")
    assert "--workload=A" in sys.argv, "only work A"
    k = [a for a in sys.argv if a.startswith("--K=")][0]
    seconds = 1.0 if k == "--K=1" else 0.6
    losses = [4.0, 3.0, 2.0]
    print("READY", json.dumps({"losses": losses, "parameter_bytes": 2**20}))
    sys.stdout.flush()
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        answer = {"s": seconds}
        if line.strip() == "mem":
            answer = {"mem": [{"transient": 10.0}, {"transient": 2.0}]}
        print("T", json.dumps(answer))
        sys.stdout.flush()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of peers, all of which take the same time."""
    (tmp_path / "common.py").write_text("")
    script = textwrap.dedent(WORKER)
    for name in ("peer_lingvo", "peer_torchpp", "peer_torchgpipe"):
        (tmp_path / f"{name}.py").write_text(script)
    monkeypatch.setattr(
        peer_libraries, "_has", lambda python, module: bool(python)
    )
    monkeypatch.setattr(bench_peers, "_CALM", 2.0)  # the tests are not alone
    return str(tmp_path)


def tables(capsys, folder, *words):
    command = ["bench", "peers", f"--peers_dir={folder}", "--format=json"]
    assert bench.main([*command, "--rounds=2", *words]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    return table


# ---------------------------------------------------------------- the commands
def test_folder_of_peers_is_needed(tmp_path, capsys):
    command = ["bench", "peers", f"--peers_dir={tmp_path}"]
    assert bench.main(command) == 2
    assert "--peers_dir must be" in capsys.readouterr().err


def test_something_has_to_be_measured(folder, capsys):
    flags = [f"--peers_dir={folder}", "--notime", "--nomemory"]
    assert bench.main(["bench", "peers", *flags]) == 2
    assert "nothing to measure" in capsys.readouterr().err


def test_peers_take_turns_and_are_compared_with_their_own_k_1(folder, capsys):
    torch = f"--torch_python={sys.executable}"
    flags = ["--peer=torch-gpipe,torch-1f1b", "--remat=on", "--work=A", torch]
    rows = tables(capsys, folder, *flags)["rows"]
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
    # 10 and 2 in two processes, and a gradient that is kept between steps.
    assert rows[2]["mib"] == 13


def test_peers_that_are_not_there_are_notes(folder, capsys):
    flags = ["--peer=lingvo,torch-gpipe", "--work=A", "--remat=on"]
    lingvo = f"--lingvo_python={sys.executable}"
    table = tables(capsys, folder, *flags, lingvo, "--torch_python=")
    assert {row["library"] for row in table["rows"]} == {"lingvo"}
    assert any(
        note.startswith("torch-gpipe: not installed: ") and "pip" in note
        for note in table["notes"]
    )


def test_peers_that_fail_are_notes(folder, capsys):
    flags = ["--peer=torchgpipe,lingvo", "--work=A,B", "--remat=on"]
    pythons = [f"--{p}_python={sys.executable}" for p in ("torch", "lingvo")]
    table = tables(capsys, folder, *flags, *pythons)
    assert {row["work"] for row in table["rows"]} == {"A"}
    assert any("does not run: " in note for note in table["notes"])
    assert any("only work A" in note for note in table["notes"])


# ------------------------------------------------------------------- the peers
def test_interpreters_without_the_module_are_not_installed():
    pythons = {"tfgpipe": sys.executable, "lingvo": None, "torch": "/no/such"}
    missing = peer_libraries.not_installed(list(PEERS), pythons)
    ours = [name for name, peer in PEERS.items() if not peer.script]
    assert missing == [name for name in PEERS if name not in ours]


@pytest.mark.parametrize(
    ("configuration", "possible"),
    [
        (Configuration("lingvo", "A", 2, 8, True), True),
        (Configuration("lingvo", "A", 2, 8, False), False),
        (Configuration("lingvo", "A", 1, 1, False), True),
        (Configuration("torchgpipe", "C", 8, 32, True), False),
        (Configuration("torch-1f1b", "A", 2, 1, True), False),
        (Configuration("gpipe-always", "A", 2, 8, False), False),
        (Configuration("gpipe", "A", 2, 8, False), True),
    ],
)
def test_what_peers_cannot_do_is_left_out(configuration, possible):
    assert peer_libraries.is_possible(configuration) == possible


def test_every_baseline_is_a_peer_of_the_same_python():
    for peer in PEERS.values():
        assert PEERS[peer.baseline].python == peer.python
        assert peer.python in peer_libraries.INSTALL


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


# ----------------------------------------------------------------- the adapter
@pytest.fixture
def adapter(monkeypatch):
    """The adapter, with a `common.py` of tiny work."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (4, 6), "b1": (6,), "w2": (6, 4)}
    names = "ln1_g ln1_b wq bq wk bk wv bv wo bo ln2_g ln2_b w1 b1 w2 b2"
    square = ("wq", "wk", "wv", "wo")

    def block():
        return {
            name: rng.normal(
                size=shapes.get(name, (4, 4) if name in square else (4,))
            )
            for name in names.split()
        }

    def cuts(work, num_cells, cut):
        count = {"A": common.LM["L"], "B": 4, "C": num_cells}[work]
        ends = [count * k // num_cells for k in range(num_cells + 1)]
        return list(itertools.pairwise(ends))

    kernels = [rng.normal(size=(3, 3, 2, 2)) for _ in range(4)]
    weights = [block() for _ in range(4)]
    common = types.SimpleNamespace(
        LM={"L": 4, "D": 4, "H": 2, "F": 6, "S": 3},
        CNN={"C": [2, 2, 2, 2], "STRIDE": [1, 2, 1, 1]},
        TIMED={"FWD": 1e-4},
        LR={"A": 0.1, "B": 0.1, "C": 0.1},
        lm_weights=lambda: weights,
        lm_data=lambda: rng.normal(size=(8, 3, 4)).astype("float32"),
        cnn_weights=lambda: kernels,
        cnn_data=lambda: rng.normal(size=(8, 4, 4, 2)).astype("float32"),
        cuts=lambda work, num_cells, cut=0: cuts(work, num_cells, cut),
    )
    common.lm_shapes = lambda: {n: w.shape for n, w in weights[0].items()}
    written = types.SimpleNamespace(
        block=lambda tf, w, x: x + sum(map(tf.reduce_mean, w.values()))
    )
    monkeypatch.setitem(sys.modules, "common", common)
    monkeypatch.setitem(sys.modules, "lm_raw", written)
    monkeypatch.delitem(sys.modules, "tools.bench.peer_adapter", raising=False)
    yield importlib.import_module("tools.bench.peer_adapter")
    sys.modules.pop("tools.bench.peer_adapter", None)


def arguments(work, variant="gpipe", k=2):
    return types.SimpleNamespace(
        workload=work, variant=variant, K=k, M=4, remat=1, cut=0
    )


@pytest.mark.parametrize(
    ("work", "variant"),
    [("A", "gpipe"), ("A", "gpipe,layers=keras"), ("B", "gpipe")],
)
def test_adapter_loads_the_weights_of_all_peers(adapter, work, variant):
    adapter.common.LM["L"] = 1  # quicker
    model, x = adapter.build(arguments(work, variant, k=1))
    weights = (
        adapter.convolutions()[1] if work == "B" else adapter.blocks(True)[1]
    )
    for layer, values in zip(model.sequence, weights):
        for variable, value in zip(layer.weights, values):
            np.testing.assert_allclose(
                variable.numpy().ravel(), value.ravel(), rtol=1e-6
            )
    expected = float(keras.ops.mean(keras.ops.square(model(x))))
    if work == "A":  # in B, a micro-batch is normalised by itself
        assert adapter.train_step(model, x)() == pytest.approx(expected, 1e-5)


def test_order_of_the_weights_is_that_of_the_block(adapter):
    model, _ = adapter.build(arguments("A", "gpipe,layers=keras"))
    found = [w.path.split("/")[-2:] for w in model.sequence[0].weights]
    kinds = {"q": "query", "k": "key", "v": "value", "o": "attention_output"}
    for name, (layer, weight) in zip(adapter._BLOCK, found):
        if name[1:] in kinds:
            assert layer == kinds[name[1:]]
            assert weight == {"w": "kernel", "b": "bias"}[name[0]]
        elif name.startswith("ln"):
            assert weight == {"g": "gamma", "b": "beta"}[name[-1]]


@pytest.mark.parametrize(
    ("work", "variant", "num_partitions"),
    [
        ("A", "interleaved", 4),
        ("A", "1f1b,remat=always,remat_groups=2", 2),
        ("C", "gpipe", 2),
    ],
)
def test_adapter_makes_what_the_variant_says(
    adapter, work, variant, num_partitions
):
    model, x = adapter.build(arguments(work, variant))
    assert model.num_partitions == num_partitions
    assert model.schedule == variant.partition(",")[0]
    is_always = "remat=always" in variant
    assert model.remat == ("always" if is_always else "except_last")
    groups = {op.cell for op in model.program(8).ops}
    assert len(groups) == num_partitions * (2 if "groups" in variant else 1)
    assert x.shape[0] >= 8


def test_workers_find_the_folder_and_the_checkout(tmp_path, monkeypatch):
    started = {}

    def start(command, variables, is_pinned):
        started.update(command=command, variables=variables)

    monkeypatch.setattr(peer_libraries, "Worker", start)
    ours = Configuration("1f1b", "A", 2, 8, True)
    peer_libraries.start(ours, {"tfgpipe": "python"}, tmp_path, {"A": "B"})
    assert started["command"][1:3] == ["-m", "tools.bench.peer_adapter"]
    assert "--variant=1f1b" in started["command"]
    path = started["variables"]["PYTHONPATH"].split(os.pathsep)
    assert path[0] == str(tmp_path)
    assert os.path.exists(os.path.join(path[1], "tools/bench/peer_adapter.py"))
