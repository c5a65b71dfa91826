"""Cells on a TPU's cores: a fabricated one, whose work TensorFlow does on CPUs.

TensorFlow's soft placement moves to a CPU what names a device that is not
there. So everything runs, but not on the TPU's own kernels.
"""

import keras
import numpy as np
import pytest
from fabricated_tpu import TPUS, list_cores, tensorflows_strategy
from graphs import called, is_task, operations, step_graph, tasks, types
from keras import layers as kl
from tiny import assert_close, data, fit, weights

import tfgpipe
from tfgpipe import internals
from tfgpipe.devices import names as names_lib


@pytest.fixture
def eight_cores(monkeypatch):
    list_cores(monkeypatch)


def on_tpu(num_replicas, num_partitions):
    return tfgpipe.TPUPipelineStrategy(
        tfgpipe.tpu_device_assignment(
            TPUS["v2-8"], num_replicas, num_partitions
        )
    )


# ----------------------------------------------------------- the assignment
def hosts_of(assignment):
    """Of each core, in order, its host; and the coordinates of its chip."""
    cores = assignment.core_assignment.reshape(-1, 4)
    tasks_of = assignment.topology.task_ordinal_at_coordinates
    return [tasks_of(c) for c in cores], cores[:, :3]


@pytest.mark.parametrize("name", TPUS)
def test_cores_of_a_host_follow_each_other_from_chip_to_neighbour(name):
    num_cores = int(np.prod(TPUS[name].mesh_shape))
    assignment = tfgpipe.tpu_device_assignment(TPUS[name], 1, num_cores)
    hosts, chips = hosts_of(assignment)
    assert hosts == sorted(hosts)
    hops = np.abs(np.diff(chips, axis=0)).sum(axis=1)
    same_host = np.diff(hosts) == 0
    assert hops[same_host].max() == 1
    cores = assignment.core_assignment.reshape(-1, 4)
    assert len({tuple(c) for c in cores}) == num_cores


def test_both_cores_of_a_chip_come_before_the_next_chip():
    assignment = tfgpipe.tpu_device_assignment(TPUS["v2-8"], 2, 4)
    found = [[assignment.coordinates(r, k) for k in range(4)] for r in range(2)]
    assert found == [
        [(0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0), (1, 0, 0, 1)],
        [(1, 1, 0, 0), (1, 1, 0, 1), (0, 1, 0, 0), (0, 1, 0, 1)],
    ]


@pytest.mark.parametrize(("r", "k"), [(1, 3), (2, 3), (4, 2), (8, 1), (1, 8)])
def test_replicas_are_cut_from_the_path(r, k):
    assignment = tfgpipe.tpu_device_assignment(TPUS["v2-8"], r, k)
    path = tfgpipe.tpu_device_assignment(TPUS["v2-8"], 1, 8).core_assignment
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (r, k)
    np.testing.assert_array_equal(
        assignment.core_assignment, path[0, : r * k].reshape(r, k, 4)
    )


@pytest.mark.parametrize(
    ("r", "k", "message"),
    [
        (3, 3, "number of cores, 8. Received: 3, 3"),
        (0, 3, "`num_replicas` must be an integer of at least 1"),
        (1, 2.0, "num_partitions=2.0"),
    ],
)
def test_assignment_that_cannot_be_is_refused(r, k, message):
    with pytest.raises(ValueError, match=message):
        tfgpipe.tpu_device_assignment(TPUS["v2-8"], r, k)


def test_tensorflow_places_logical_devices_where_cells_are(eight_cores):
    """Its own strategy on the same assignment: logical device k is cell k."""
    assignment = tfgpipe.tpu_device_assignment(TPUS["v2-8"], 2, 3)
    theirs = tensorflows_strategy(assignment)
    ours = tfgpipe.TPUPipelineStrategy(assignment)
    assert theirs.num_replicas_in_sync == ours.num_replicas == 2
    grid = theirs.extended._tpu_devices
    assert [list(own) for own in ours.devices] == grid.tolist()


# -------------------------------------------------------------- the strategy
def test_strategy_has_the_devices_of_its_assignment(eight_cores):
    strategy = on_tpu(2, 3)
    indices = [[name[-5:] for name in own] for own in strategy.devices]
    assert indices == [["TPU:0", "TPU:1", "TPU:2"], ["TPU:3", "TPU:6", "TPU:7"]]
    assert strategy.device_assignment.num_replicas == 2
    assert "TPUPipelineStrategy num_replicas=2 num_partitions=3" in repr(
        strategy
    )


def test_cells_go_to_cores_without_a_strategy(eight_cores):
    model = tfgpipe.GPipe([keras.Input((2,)), kl.Dense(1), kl.Dense(1)], 2)
    assert [cell.device[-5:] for cell in model.cells()] == ["TPU:0", "TPU:1"]


@pytest.mark.parametrize(
    "cls", [tfgpipe.PipelineStrategy, tfgpipe.TPUPipelineStrategy]
)
def test_assignment_of_tensorflows_strategy_is_taken_over(eight_cores, cls):
    assignment = tfgpipe.tpu_device_assignment(TPUS["v2-8"], 2, 3)
    found = cls.from_strategy(tensorflows_strategy(assignment), 3)
    assert type(found) is tfgpipe.TPUPipelineStrategy
    assert found.device_assignment is assignment
    assert (found.num_replicas, found.num_partitions) == (2, 3)


@pytest.mark.parametrize(
    ("assignment", "received"),
    [
        (None, "Received: None"),
        (tfgpipe.tpu_device_assignment(TPUS["v2-8"], 2, 3), "Received: 3"),
    ],
)
def test_strategy_that_does_not_say_which_cores_are_neighbours_is_refused(
    eight_cores, assignment, received
):
    with pytest.raises(ValueError, match=f"{received}.*tpu_device_assignment"):
        tfgpipe.PipelineStrategy.from_strategy(
            tensorflows_strategy(assignment), num_partitions=2
        )


def test_model_in_the_scope_of_tensorflows_strategy_is_refused(eight_cores):
    with (
        tensorflows_strategy().scope(),
        pytest.raises(ValueError, match=r"from_strategy\(strategy, num_part"),
    ):
        tfgpipe.GPipe([kl.Dense(1)], 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: on_tpu(1, 2), r"lists.*'/task:0/device:TPU:0'"),
    ],
)
def test_what_is_of_no_tpu_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ------------------------------------------------------------------ training
def layers():
    return [
        keras.Input((4,)),
        kl.Dense(6, activation="tanh"),
        kl.BatchNormalization(),
        kl.Dense(5, kernel_regularizer="l2"),
        kl.Dense(2),
    ]


def trained(strategy, optimizer, **arguments):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = tfgpipe.GPipe(layers(), **arguments)
        model.compile(optimizer, "mse", metrics=["mae"])
    history = fit(model, *data(8), batch_size=8)
    return model, history


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), "gpipe"),
        pytest.param(
            lambda: keras.optimizers.Adam(0.01, clipnorm=0.1),
            "1f1b",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_is_that_of_one_pipeline(
    float64, eight_cores, optimizer, schedule
):
    found, found_history = trained(
        on_tpu(2, 3), optimizer(), num_micro_batches=2, schedule=schedule
    )
    one = tfgpipe.PipelineStrategy(1, 1, ["CPU:0"])
    expected, history = trained(one, optimizer(), num_micro_batches=4)
    assert_close(weights(found), weights(expected))
    assert_close(found_history, history)


def test_each_task_is_compiled_for_the_core_of_its_cell(eight_cores):
    strategy = on_tpu(2, 3)
    with strategy.scope():
        model = tfgpipe.GPipe(layers(), num_micro_batches=2)
        model.compile("adam", "mse")
    graph = step_graph(model, *data(8))
    by_core = {}
    for op in tasks(graph):
        if set(types(internals.function_graph(op, called(op)))) == {"AddV2"}:
            continue  # sums between tasks
        by_core.setdefault(op.device, []).append(called(op))
        assert op.node_def.attr["_XlaMustCompile"].b
    assert set(by_core) == {name for own in strategy.devices for name in own}
    columns = zip(*strategy.devices)
    for first, second in columns:  # equal cells share their functions
        assert sorted(by_core[first]) == sorted(by_core[second])


def test_no_kernel_is_used_that_a_tpu_lacks(eight_cores):
    """Packed tensors, and rows taken apart at run time, stay off the TPU."""
    with on_tpu(2, 3).scope():
        model = tfgpipe.GPipe(layers(), num_micro_batches=2)
        model.compile("adam", "mse")
    for op in operations(step_graph(model, *data(8))):
        assert not op.type.startswith("Optional")
        assert not (op.type == "StridedSlice" and "TPU" in op.device)


@pytest.mark.slow
def test_updates_are_compiled_where_variables_are_on_a_tpu(
    float64, monkeypatch
):
    """As if CPUs were TPUs: here variables are on CPUs after all."""
    expected, _ = trained(
        tfgpipe.PipelineStrategy(2, 2), "adam", num_micro_batches=2
    )
    monkeypatch.setattr(names_lib, "only_compiles", lambda names: True)
    found, _ = trained(
        tfgpipe.PipelineStrategy(2, 2), "adam", num_micro_batches=2
    )
    assert_close(weights(found), weights(expected))
    graph = step_graph(found, *data(8))
    updates = [
        op
        for op in graph.get_operations()
        if "PartitionedCall" in op.type
        and "_XlaMustCompile" in op.node_def.attr
        and not is_task(op)
    ]
    assert len(updates) == len(found.trainable_variables)


# ---------------------------------------------------------------- connecting
def test_host_without_a_tpu_says_so():
    with pytest.raises(ValueError, match=r"TPU VM.*Received: tpu='local'"):
        tfgpipe.connect_to_tpu()


def test_tpu_that_does_not_answer_is_waited_for_no_longer_than_asked():
    with pytest.raises(ValueError, match=r"tpu='grpc.*refused"):
        tfgpipe.connect_to_tpu("grpc://127.0.0.1:1", timeout=0.1)
