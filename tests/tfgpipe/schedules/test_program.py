"""What runs: the passes one by one, and what devices really do."""

import keras
import numpy as np
import pytest
from keras import layers as kl
from quick import quick
from tiny import assert_close, data, layers, pipeline, weights

import tfgpipe
from tfgpipe import timeline
from tfgpipe.run import chain
from tfgpipe.schedules.lowering import (
    CellFacts,
    Remat,
    adapted,
    lower,
    recomputed,
)
from tfgpipe.schedules.orders import CHUNKS, SCHEDULES
from tfgpipe.schedules.program import Op
from tfgpipe.schedules.schedule import Schedule
from tfgpipe.schedules.task import KINDS

LETTERS = dict(zip("FRBIWHOT", KINDS, strict=True))


def ops(text, device=0):
    """'F0.1 B0.1': of cell 0 and micro-batch 1; 'F0.1+' keeps."""
    found = []
    for word in text.split():
        k, m = word.strip("+")[1:].split(".")
        found.append(
            Op(LETTERS[word[0]], int(k), int(m), device, word[-1] == "+")
        )
    return found


FACTS = CellFacts()
FROZEN = CellFacts(has_backward=False, needs_dx=False)
FIRST = CellFacts(needs_dx=False)
COMPILED = CellFacts(has_halves=False, recomputes=False)


# ----------------------------------------------------------------- the passes


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("never", "F0.0+ F0.1+ B0.1 B0.0"),
        ("except_last", "F0.0 F0.1+ B0.1 R0.0 B0.0"),
        ("always", "F0.0 F0.1 R0.1 B0.1 R0.0 B0.0"),
    ],
)
def test_what_is_not_kept_is_recomputed_right_before_its_use(rule, expected):
    given = ops("F0.0 F0.1 B0.1 B0.0")
    assert recomputed(given, [FACTS], Remat([rule])) == ops(expected)
    halves = ops("F0.0 F0.1 I0.1 I0.0 W0.1 W0.0")
    found = recomputed(halves, [FACTS], Remat([rule]))
    assert [op for op in found if op.kind == "recompute"] == [
        op for op in ops(expected) if op.kind == "recompute"
    ]


def test_recomputation_stays_where_a_schedule_has_it():
    given = ops("F0.0 R0.0 F0.1 B0.1 B0.0")
    found = recomputed(given, [FACTS], Remat(["always"]))
    assert found == ops("F0.0 R0.0 F0.1 R0.1 B0.1 B0.0")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (FACTS, "F0.0 I0.0 F0.1 W0.0"),
        (COMPILED, "F0.0 B0.0 F0.1"),  # where the cell before waits
        (FIRST, "F0.0 F0.1 B0.0"),  # nothing waits
    ],
)
def test_halves_that_cannot_be_apart_are_one(facts, expected):
    given = ops("F0.0 I0.0 F0.1 W0.0")
    assert adapted(given, [facts], 2) == ops(expected)


# --------------------------------------------------------------- all together
def by_device(program):
    letters = {kind: letter for letter, kind in LETTERS.items()}
    return [
        " ".join(f"{letters[op.kind]}{op.cell}.{op.micro_batch}" for op in own)
        for own in program.by_device
    ]


def test_program_of_replicas_with_unequal_mini_batches():
    program = lower(
        lambda count: SCHEDULES["1f1b"](2, count),
        [FIRST, FACTS],
        Remat(["except_last"] * 2),
        [1, 0, 2],
    )
    assert program.num_devices == 6
    assert by_device(program) == [
        "F0.0 B0.0",
        "F1.0 B1.0",
        "",
        "",
        "F0.1 F0.2 B0.1 R0.2 B0.2",
        "F1.1 B1.1 F1.2 R1.2 B1.2",
    ]
    assert not program.is_forward_first


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("m", [1, 3])
def test_only_fill_drain_and_single_micro_batches_go_forward_first(k, m):
    for name, make in SCHEDULES.items():
        program = make(k, m, CHUNKS[name] or 2).program()
        is_fill_drain = name in ("gpipe", "breadth_first")
        assert program.is_forward_first == (is_fill_drain or m == 1)
    only = Schedule([[("forward", 0, 0), ("forward", 0, 1)]])
    assert only.program(facts=[FROZEN]).is_forward_first


def test_wrong_rule_is_refused():
    with pytest.raises(ValueError, match=r"`remat` must be one of .*'Never'"):
        SCHEDULES["gpipe"](2, 2).program("Never")


# --------------------------------------------------------- what devices do run
@pytest.fixture
def ran(monkeypatch):
    """What each device has run, by its name."""
    found = {}
    run = chain.Chain.run

    def watched(self, task, device, *arguments):
        found.setdefault(device, []).append(task)
        return run(self, task, device, *arguments)

    monkeypatch.setattr(chain.Chain, "run", watched)
    return found


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rows", ["F0 R0 F1 B1 B0", "F0 F1 R1 B1 R0 B0"])
def test_recomputation_may_come_before_the_loss(rows):
    """A loss of whole mini-batches was asked for when a forward was left.

    Then it was a `KeyError`.
    """
    x, y = data()

    def loss(y, found):
        return keras.ops.log(1 + keras.ops.mean((y - found) ** 2))

    def trained(model):
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
        model.fit(x, y, batch_size=7, verbose=0, shuffle=False)
        return weights(model)

    keras.utils.set_random_seed(5)
    expected = trained(keras.Sequential(layers()))
    schedule = Schedule("\n".join([rows] * 2))
    found = trained(pipeline(m=2, schedule=schedule, remat="always"))
    assert_close(found, expected, 1e-12)


# Remat, groups, frozen layers, and fewer rows than micro-batches.
SETTINGS = [("except_last", 9, 0, 2), ("always", 2, 1, 1), ("never", 9, 1, 1)]
RUNS = [(name, *rest) for name in SCHEDULES for rest in SETTINGS]
# Each schedule once.
SOME = [RUNS[3 * i + i % 3] for i in range(len(SCHEDULES))]


@pytest.mark.parametrize(
    ("name", "remat", "rows", "frozen", "groups"), quick(RUNS, SOME)
)
def test_devices_run_the_program(name, remat, rows, frozen, groups, ran):
    chunks = CHUNKS[name] or 2
    layers = [
        kl.Dense(2, "tanh", trainable=i >= frozen)
        for i in range(2 * chunks * groups)
    ]
    model = tfgpipe.GPipe(
        layers,
        2 * chunks,
        3,
        devices=["CPU:0", "CPU:1"],
        schedule=name,
        remat=remat,
        remat_groups=groups,
    )
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((rows, 2)), np.ones((rows, 2)))
    # A layer each: those before the first trained one are frozen.
    facts = [
        CellFacts(
            has_backward=k >= frozen,
            needs_dx=k > frozen,
            has_halves=k > frozen,
        )
        for k in range(2 * chunks * groups)
    ]
    program = lower(
        lambda count: SCHEDULES[name](2, count, chunks),
        facts,
        Remat.by_group(remat, [groups] * (2 * chunks)),
        [min(rows, 3)],
    )
    assert [*ran.values()] == [
        [op.task for op in own] for own in program.by_device
    ]
    assert model.program(rows).ops == program.ops


def own_loss(y, found):
    return keras.ops.mean(keras.ops.square(y - found))


class Linear(keras.losses.Loss):
    """Its gradient needs no outputs."""

    is_row_wise = True

    def call(self, y, found):
        return keras.ops.mean(y * found, -1)


@pytest.mark.parametrize("last", ["dense", "flatten"])
@pytest.mark.parametrize("how", ["mse", "own", "linear", "1f1b"])
def test_program_that_is_printed_is_what_ran(how, last, ran):
    """Whatever the loss keeps."""
    loss = {"own": own_loss, "linear": Linear()}.get(how, "mse")
    model = tfgpipe.GPipe(
        [
            keras.Input((2,)),
            kl.Dense(2, "tanh"),
            kl.Dense(2) if last == "dense" else kl.Flatten(),
        ],
        2,
        3,
        devices=["CPU:0", "CPU:1"],
        schedule="1f1b" if how == "1f1b" else "gpipe",
    )
    assert str(model.program(6)).endswith("is taken to keep the outputs")
    model.compile("sgd", loss)
    model.train_on_batch(np.ones((6, 2)), np.ones((6, 2)))
    program = model.program(6)
    assert [*ran.values()] == [
        [op.task for op in own] for own in program.by_device
    ]
    assert str(program).endswith("\n# mini-batches of 6 rows")


@pytest.mark.parametrize("remat", ["never", "except_last"])
def test_text_that_keeps_is_run_and_saved(remat, ran):
    """Which `remat` there is makes no difference."""
    schedule = Schedule("F0+ F1 F2+ B2 B1 B0\nF0 F1+ F2 B2 B1 B0")
    model = pipeline(m=3, schedule=schedule, remat=remat)
    model.compile("sgd", "mse")
    model.train_on_batch(*data(6))
    again = [
        (task.cell, task.micro_batch)
        for own in ran.values()
        for task in own
        if task.kind == "recompute"
    ]
    assert again == [(0, 1), (1, 2), (1, 0)]
    copy = tfgpipe.GPipe.from_config(model.get_config())
    assert copy.program(6).ops == model.program(6).ops


def test_events_number_devices_as_the_program_does():
    """A schedule may have its first cell on its last device."""
    schedule = Schedule("F1.0 B1.0\nF0.0 B0.0")
    model = pipeline(k=2, m=1, schedule=schedule, devices=["CPU:3", "CPU:2"])
    model.compile("sgd", "mse")
    events = timeline.measure(model, *data(4), num_steps=1)
    measured = {e.task: e.device for e in events if e.task.kind != "update"}
    ops = model.program(4).ops
    assert measured == {op.task: op.device for op in ops}
    assert [cell.device[-1] for cell in model.cells()] == ["2", "3"]
