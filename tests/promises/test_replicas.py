"""The promise of replicas: the numbers of one pipeline, and of Keras.

R replicas with M micro-batches each are one pipeline with R M micro-batches.
"""

import collections
import dataclasses
import itertools

import keras
import mixed
import numpy as np
import pytest
import tensorflow as tf
from crossing import sent_tensors, short
from graphs import step_graph, tasks
from keras import layers as kl
from kinds import KINDS
from matrix import OPTIMIZERS, REMAT, SCHEDULES, WHOLE, largest_difference
from quick import quick
from replicated import replicas, small
from table import Case, assert_same
from tiny import (
    assert_close,
    compiled,
    data,
    fit,
    quickly,
    random_layers,
)

import tfgpipe
from tfgpipe import internals

# ------------------------------------------------------- the numbers of Keras
# (kind, K, M, schedule, R, optimizer)
CASES = [
    Case(kind, k, m, schedule, replicas=r, optimizer=optimizer, epochs=2)
    for kind, k, m, schedule, r, optimizer in (
        ("dense", 1, 2, "1f1b", 3, "clipnorm"),
        ("tied", 2, 2, "interleaved", 2, "global_clipnorm"),
        ("weighted_mean", 2, 1, "zero_bubble", 3, "momentum"),
        ("user_loss", 2, 2, "gpipe", 2, "accumulation"),
        ("counters", 2, 1, "gpipe", 3, "momentum"),
        ("lookups", 2, 1, "gpipe", 3, "adam"),
        ("outputs", 3, 1, "1f1b", 2, "average"),
    )
]
CASES[-1] = dataclasses.replace(CASES[-1], infers=True)
QUICK = CASES[:1]


def dealt():
    """Each kind with some R, K, M, schedules, rules and optimizers in turn."""
    points = itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 4))
    points = itertools.cycle(p for p in points if p[:2] != (3, 3))  # 9 devices
    for i, kind in enumerate([*KINDS] * 5):
        r, k, m = next(points)
        # Adam amplifies rounding of attention.
        names = ["momentum"] if kind == "attention" else [*OPTIMIZERS]
        schedule = SCHEDULES[i % len(SCHEDULES)]
        yield Case(
            kind,
            k,
            m,
            "gpipe" if kind in WHOLE else schedule,
            REMAT[i % 4],
            replicas=r,
            optimizer=names[i % len(names)],
            epochs=2,
            infers=i % 3 == 0,
        )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", quick([*CASES, *dealt()], QUICK), ids=str)
def test_replicas_in_float64_equal_keras(case):
    assert_same(case, "keras")


# ----------------------------------------------------- the numbers of one more
@pytest.mark.usefixtures("float64")
def test_replicas_are_one_pipeline_of_all_micro_batches():
    """Masks, moments, seeds and statistics; also where shards are uneven."""
    case = Case("noisy", 2, 2, "1f1b", replicas=2, epochs=2)
    one = dataclasses.replace(case, k=1, m=4, replicas=1)
    assert_same(case, one, 1e-10)


@pytest.mark.usefixtures("float64")
def test_batches_of_a_known_size_that_replicas_do_not_divide():
    x, y = np.split(np.random.default_rng(3).random((14, 7)), [5], axis=1)

    def run(make):
        keras.utils.set_random_seed(5)
        model = make(small())
        compiling = quickly(model, {"loss": "mse"})
        model.compile(OPTIMIZERS["momentum"](), **compiling)
        for rows in (7, 3, 1):
            batches = tf.data.Dataset.from_tensor_slices((x, y))
            batches = batches.batch(rows, drop_remainder=True).take(2)
            model.fit(batches, epochs=1, shuffle=False, verbose=0)
        return [w.numpy() for w in model.weights]

    worst = largest_difference(
        run(lambda layers: replicas(layers, 2, 2, 2)), run(keras.Sequential)
    )
    assert worst < 1e-10


# -------------------------------------------------------------------- saving
GRIDS = {(2, 2): 2, (1, 3): 4}  # M for each (R, K): four micro-batches in all


def on_grid(grid):
    """A model that training changes in every way."""
    keras.utils.set_random_seed(5)
    with tfgpipe.PipelineStrategy(*grid).scope():
        return compiled(
            tfgpipe.GPipe(random_layers(), num_micro_batches=GRIDS[grid]),
            metrics=["mae"],
        )


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("before", GRIDS)
def test_training_goes_on_exactly_at_another_grid(before, tmp_path):
    """Slots, seeds and statistics too; from every kind of file."""
    (after,) = GRIDS.keys() - {before}
    first, path = on_grid(before), str(tmp_path / "checkpoint")
    fit(first, *data())
    first.save(tmp_path / "model.keras")
    first.save_weights(tmp_path / "model.weights.h5")
    models = [on_grid(after), on_grid(after)]
    checkpoints = [
        tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        for model in (first, models[1])
    ]
    checkpoints[0].write(path)
    models[0].load_weights(tmp_path / "model.weights.h5")
    checkpoints[1].read(path)
    with tfgpipe.PipelineStrategy(*after).scope():
        file = tmp_path / "model.keras"
        loaded = tfgpipe.load_model(file, num_micro_batches=GRIDS[after])
    assert (loaded.num_replicas, loaded.num_partitions) == after

    def continued(model):
        fit(model, *data(), initial_epoch=2, epochs=4)
        return mixed.numbers(model)

    expected = continued(first)
    for model in (*models, loaded):
        assert_close(continued(model), expected)


@pytest.mark.usefixtures("float64")
def test_interleaved_replicas_are_one_pipeline_before_and_after_saving(
    tmp_path,
):
    """Two of four cells on two devices; then R = 4 and K = 1."""
    path = tmp_path / "model.keras"
    model = mixed.replicas()
    assert [len(set(cell.devices)) for cell in model.cells()] == [2] * 4
    assert len({cell.devices for cell in model.cells()}) == 2
    fit(model, *data())
    model.save(path)
    one = mixed.one_pipeline()
    assert_close(mixed.numbers(model), mixed.numbers(one))
    mixed.assert_goes_on(path, one)


# ------------------------------------------------------- devices and their work
def send_counts(sent, shape):
    return collections.Counter(entry[:2] for entry in sent if entry[2] == shape)


@pytest.mark.parametrize(
    "optimizer", quick(["global_clipnorm", "average"], ["global_clipnorm"])
)
def test_weights_and_gradients_stay_in_the_column_of_their_cell(optimizer):
    """Read from the graphs that TensorFlow runs, one a device."""
    width, rows = 16, 24
    layers = [kl.Dense(width, activation="relu") for _ in range(6)]
    model = replicas(layers, 3, 2, 2)  # devices 0 1, 2 3, 4 5
    model.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"])
    x = np.ones((rows, width), "float32")
    sent = sent_tensors(model, x, x)
    devices = [(f"CPU:{k}", f"CPU:{k + 2}", f"CPU:{k + 4}") for k in (0, 1)]
    # A kernel and a bias go down from their owner, and gradients up to it.
    exchanged = {
        pair: 2 for d in devices for pair in itertools.permutations(d, 2)
    }
    for shape in ((width, width), (width,)):
        assert send_counts(sent, shape) == exchanged
    within = collections.Counter()
    for r in range(3):  # 2 micro-batches forward, and their gradients back
        a, b = f"CPU:{2 * r}", f"CPU:{2 * r + 1}"
        within.update({(a, b): 2, (b, a): 2})
    # inputs and labels come from the host, which is CPU:0, once each
    for device in ("CPU:2", "CPU:4"):
        within["CPU:0", device] += 2
    for device in ("CPU:1", "CPU:3", "CPU:5"):
        within["CPU:0", device] += 2
    assert send_counts(sent, (rows // 6, width)) == within
    known = {(width, width), (width,), (rows // 6, width)}
    others = [e for e in sent if e[2] not in known and np.prod(e[2]) > 1]
    assert others == []


def test_variables_and_slots_have_one_owner_in_their_column():
    model = replicas(small(), 2, 3, 2)
    model.compile("adam", "mse")
    model.train_on_batch(np.ones((4, 5)), np.ones((4, 2)))
    for variable in [*model.variables, *model.optimizer.variables]:
        assert isinstance(variable.value, tf.Variable)
    for cell in model.cells():
        (layer,) = (v for v in model.sequence if v.name == cell.layers[0])
        found = set()
        for weight in layer.weights:
            own = [weight, *internals.slots(model.optimizer, weight)]
            (device,) = {short(v.value.device) for v in own}
            found.add(device)
        assert found == set(map(short, cell.devices))


def ancestors(op):
    """All operations that must run before one."""
    found, waiting = set(), [op]
    while waiting:
        op = waiting.pop()
        before = {*(t.op for t in op.inputs), *op.control_inputs} - found
        waiting += before
        found |= before
    return found


def test_gradients_are_added_up_while_other_cells_still_work():
    """The last cell's sum and update wait for no backward task before it."""
    model = replicas(small(), 2, 3, 2)
    model.compile(OPTIMIZERS["momentum"](), "mse")
    graph = step_graph(model, np.ones((8, 5), "f4"), np.ones((8, 2), "f4"))
    sums = [op for op in tasks(graph) if "sum_of_gradients" in op.name]
    # a kernel and a bias, each on its owner's device
    assert sorted(op.device[-1] for op in sums) == list("012345")
    others = [op for op in tasks(graph) if op not in sums]
    for op in sums:
        update = next(
            o
            for o in graph.get_operations()
            if o.device == op.device
            and "PartitionedCall" in o.type
            and o not in others
            and op in ancestors(o)
        )
        before = ancestors(update)
        for k in range(3):
            own = {o for o in others if o.device[-1] in f"{k}{k + 3}"}
            # 2 forward tasks a replica; behind them recomputation and gradients
            waited = len(own & before)
            assert waited >= 4
            assert (waited == 4) == (k < int(op.device[-1]) % 3)
