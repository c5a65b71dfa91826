"""A plan is a `GPipe` that trains, and nothing is made before."""

import dataclasses

import functional
import keras
import numpy as np
import own_call
import pytest
import tensorflow as tf
from keras import layers as kl

import tfgpipe
from tfgpipe.profiles import MEASURED
from tfgpipe.profiles.profile_record import Spread

CPUS = [f"CPU:{i}" for i in range(4)]
# Fast links and slow arithmetic: several cells pay.
MACHINE = tfgpipe.Machine(
    flops=1e6,
    memory=1e9,
    memory_bandwidth=1e9,
    bandwidth=1e9,
    task_seconds=1e-6,
    name="slow",
)


def dense(count=8, width=16):
    return [keras.Input((width,))] + [
        kl.Dense(width, "relu") for _ in range(count)
    ]


def planned(layers=None, batch_size=32, **changed):
    options = {"machine": MACHINE, "devices": CPUS, **changed}
    layers = dense() if layers is None else layers
    return tfgpipe.plan(layers, batch_size, **options)


def test_arguments_make_a_model_that_trains():
    layers = dense()
    plan = planned(layers)
    assert plan.arguments["num_partitions"] >= 4
    assert plan.arguments["num_micro_batches"] > 1
    model = tfgpipe.GPipe(layers, **plan.arguments)
    model.compile("adam", "mse")
    x = np.ones((32, 16), np.float32)
    model.train_on_batch(x, x)
    counts = [len(cell.layers) for cell in model.cells()]
    assert counts == plan.arguments["layers_per_cell"]
    held = [
        4 * cell.num_params * 3 for cell in model.cells()
    ]  # weights, two slots
    predicted = [own.weights + own.slots for own in plan.best.memory]
    if model.num_partitions == len(predicted):
        assert predicted == held


def test_plan_of_a_functional_model():
    model = functional.residual()
    plan = tfgpipe.plan(model, 32, machine="v100", devices=CPUS)
    assert sum(plan.arguments["layers_per_cell"]) == len(
        tfgpipe.layers_of(model)
    )
    tfgpipe.GPipe(model, **plan.arguments)


def test_plan_of_a_model_with_a_call_of_its_own_is_that_of_its_graph():
    own, graph = own_call.Residual(), own_call.functional()
    found = planned(own, inputs=keras.Input((4,)))
    assert found.choices == planned(graph).choices
    model = tfgpipe.GPipe(own, **found.arguments)
    model.build((None, 4))
    counts = [len(cell.layers) for cell in model.cells()]
    assert counts == found.arguments["layers_per_cell"]
    with pytest.raises(ValueError, match=r"must hold `keras.Input`s of"):
        planned(own_call.Residual())


def test_nothing_is_allocated():
    """12 TB of weights."""
    layers = [keras.Input((10**6,))] + [kl.Dense(10**6) for _ in range(3)]
    plan = planned(layers, machine="tpu_v2_core", memory_limit=1e15, devices=3)
    assert sum(own.weights for own in plan.best.memory) > 1.2e13


def test_memory_limit_is_kept():
    free = planned()
    limit = 0.97 * max(free.device_bytes)
    tight = planned(memory_limit=limit, margin=0)
    assert max(tight.device_bytes) <= limit
    wary = planned(memory_limit=limit)
    assert max(wary.device_bytes) <= 0.8 * limit
    assert ", 20% of them left free" in str(wary)
    fastest = [
        min(own.step_seconds for own in plan.choices) for plan in (tight, free)
    ]
    assert fastest[0] >= fastest[1]


def test_weights_go_to_the_host_where_no_devices_hold_them():
    layers = dense(8, 64)
    weights = planned(layers, devices=2).best.memory
    static = sum(own.weights + own.slots + own.gradients for own in weights)
    plan = planned(layers, devices=2, memory_limit=static / 3)
    assert max(plan.device_bytes) <= static / 3
    assert plan.arguments["weights_on"] == "host"
    assert "weights on the host" in str(plan)
    model = tfgpipe.GPipe(layers, **{**plan.arguments, "devices": CPUS[:2]})
    model.compile("adam", "mse")
    model.fit(np.ones((32, 64)), np.ones((32, 64)), 32, verbose=0)


def test_what_does_not_fit_is_named():
    layers = [keras.Input((16,)), kl.Dense(16), kl.Dense(4096, name="huge")]
    with pytest.raises(ValueError, match="largest layer, 'huge'") as info:
        planned(layers, memory_limit=1000)
    text = str(info.value)
    assert "has 1.06 MiB" in text
    assert "or smaller layers; or pass `shards` of that layer" in text


def test_replicas_need_their_scope():
    plan = planned(num_replicas=2)
    assert plan.num_replicas == 2
    with pytest.raises(ValueError, match=r"with plan.strategy\(\).scope"):
        plan.arguments  # noqa: B018
    with plan.strategy().scope():
        model = tfgpipe.GPipe(dense(), **plan.arguments)
    assert model.num_replicas == 2


def test_table_has_a_line_for_each_choice():
    plan = planned()
    head, titles, first, *others = str(plan).splitlines()
    assert "mini-batches of 32; at most 954 MiB a device" in head
    assert "seconds from FLOPs on slow" in head
    assert titles.split()[:4] == ["R", "K", "M", "schedule"]
    assert first.endswith("the plan")
    assert len(others) == len(plan.choices) - 1
    assert all(line.endswith("%") for line in others)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be"),
        ({"machine": None}, "`profile` or `machine` must be given"),
        ({"machine": "abacus"}, "`machine` must be one of"),
        ({"devices": 0}, "`devices` must be"),
        ({"devices": ["CPU:9"]}, "CPU:9"),
        ({"devices": []}, "`devices` must be how many"),
        ({"devices": "CPU:0"}, "or a list of names"),
        ({"memory_limit": "1GB"}, "Received: memory_limit='1GB'"),
        ({"machine": None, "profile": "a.json"}, "`tfgpipe.Profile.load"),
        ({"inputs": keras.Input((9,))}, "`inputs` must be the inputs of"),
        ({"layers": [kl.Dense(3)], "inputs": (8,)}, "must hold `keras.Input`s"),
        ({"setting": {"chunks": 4}}, "`setting` must be a dict with some of"),
        ({"setting": {"schedule": "auto"}}, "`schedule` must be one of"),
        ({"setting": {"num_partitions": 9}}, "must go with the devices"),
        ({"batch_size": 2, "num_replicas": 4}, "and `batch_size`, 2. Received"),
        ({"memory_limit": -1}, "`memory_limit` must be .* above 0"),
        ({"margin": 1}, "`margin` must be a share of a device's memory"),
        ({"jit_compile": "no"}, "`jit_compile` must be"),
        ({"num_replicas": 5}, "at most the number of devices, 4"),
        ({"layers": [kl.Dense(3)]}, "of known sizes.* Received: None"),
        (
            {"layers": [keras.Input((None, 3)), kl.Dense(3)]},
            "`inputs` must hold `keras.Input`s of known sizes",
        ),
        ({"layers": [3]}, "`layers` must hold Keras layers"),
    ],
)
def test_bad_input_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        planned(**changed)


def test_inputs_of_a_list_may_be_given():
    plan = planned([kl.Dense(3)], inputs=keras.Input((5,)))
    assert plan.best.memory[0].weights == 4 * (5 * 3 + 3)
    with pytest.raises(ValueError, match="must be the inputs of the model"):
        planned(functional.residual(), inputs=keras.Input((99,)))


def test_inputs_of_a_model_say_the_sizes_that_it_leaves_open():
    """As if it had been made with these sizes."""

    def make(length):
        keras.backend.clear_session()
        x = keras.Input((length, 8), name="x")
        mask = keras.Input((length,), dtype="bool", name="mask")
        h = kl.Dense(8)(x) + x
        h = kl.MultiHeadAttention(2, 4)(h, h, key_mask=mask)
        return keras.Model({"x": x, "mask": mask}, kl.Dense(2)(h))

    inputs = {
        "mask": keras.Input((16,), dtype="bool"),
        "x": keras.Input((16, 8)),
    }
    made = [planned(make(16)), planned(make(None), inputs=inputs)]
    assert made[0].choices == made[1].choices
    with pytest.raises(ValueError, match=r"structure .'x': 'x', 'mask'"):
        planned(make(None))


class Repeating(kl.Layer):
    """Its code has to know the number of rows."""

    def build(self, input_shape):
        self.w = self.add_weight((input_shape[-1],), "ones")

    def call(self, x):
        return tf.concat([row * self.w for row in tf.split(x, x.shape[0])], 0)


def test_code_that_needs_to_know_the_rows_can_be_planned_for():
    layers = [keras.Input((4,)), kl.Dense(4), Repeating(), kl.Dense(3)]
    assert planned(layers).best.step_seconds > 0
    assert tfgpipe.profile(layers, np.ones((4, 4)), seconds=0.01, verbose=0)
    model = tfgpipe.GPipe(layers, 2, costs="bytes")
    model.build((None, 4))
    assert sum(len(cell.layers) for cell in model.cells()) == 3


def test_measured_seconds_make_a_plan():
    layers = [keras.Input((8,))] + [
        kl.Dense(8, name=f"dense_{i}") for i in range(4)
    ]
    x = np.ones((32, 8), np.float32)
    profile = tfgpipe.profile(layers, x, seconds=0.2, device="CPU:0", verbose=0)
    plan = tfgpipe.plan(layers, 32, profile, devices=CPUS[:2])
    assert plan.basis == "seconds as measured, cells not compiled by XLA"
    assert plan.memory_limit is None
    tfgpipe.GPipe(layers, **plan.arguments)
    others = [keras.Input((8,))] + [
        kl.Dense(8, "relu", name=f"dense_{i}") for i in range(4)
    ]
    for wrong in (dense(), others):
        with pytest.raises(ValueError, match="profile must be one of the mod"):
            tfgpipe.plan(wrong, 32, profile, devices=CPUS[:2])


def test_profile_of_a_busy_computer_or_of_fewer_rows_is_warned_of():
    layers = dense(2, 8)
    spread = Spread(1.2, 1.0, 1.5)
    key = tfgpipe.profile(layers, np.ones((2, 8)), seconds=1e-3, verbose=0)
    noisy, quiet = (
        dataclasses.replace(
            key,
            layers=tuple(
                dataclasses.replace(
                    layer,
                    measured=tuple(
                        dataclasses.replace(own, **dict.fromkeys(MEASURED, one))
                        for own in layer.measured
                    ),
                )
                for layer in key.layers
            ),
        )
        for one in (spread, Spread(1.0, 1.0, 1.1))
    )
    assert quiet.spread == pytest.approx(0.1)
    with pytest.warns(UserWarning, match="measurements spread by 50%"):
        tfgpipe.plan(layers, 2, noisy, devices=CPUS[:2])
    with pytest.warns(UserWarning, match="8 rows, .* up to 2: what they take"):
        tfgpipe.plan(
            layers, 8, quiet, devices=1, setting={"num_micro_batches": 1}
        )
    tfgpipe.plan(layers, 2, quiet, devices=CPUS[:2])


def test_setting_of_ones_own_is_predicted():
    layers = dense()
    wanted = {"num_partitions": 2, "num_micro_batches": 4, "schedule": "1f1b"}
    plan = planned(layers, setting={**wanted, "remat": {1: "never"}})
    assert len(plan.choices) == 1
    assert wanted.items() <= plan.arguments.items()
    assert plan.arguments["remat"] == {0: "except_last", 1: "never"}
    assert plan.arguments["layers_per_cell"] == [4, 4]
    tfgpipe.GPipe(layers, **plan.arguments)
    # The plan's own choice comes to the same.
    chosen = planned()
    assert planned(setting=chosen.arguments).best == chosen.best
    tight = planned(setting=wanted, memory_limit=1000)
    assert "does not fit" in str(tight)


def test_cells_may_begin_inside_of_a_layer():
    """As those of a `GPipe`, which takes what is planned."""

    def layers():
        inner = keras.Sequential([keras.Input((8,)), *map(kl.Dense, [8] * 4)])
        return [keras.Input((8,)), inner, kl.Dense(8), kl.Dense(8)]

    found = planned(layers(), setting={"num_partitions": 3})
    assert found.arguments["layers_per_cell"] == [2, 2, 2]
    model = tfgpipe.GPipe(layers(), **found.arguments)
    assert [len(cell.layers) for cell in model.cells()] == [2, 2, 2]
    # Of whole layers, if these are counted.
    of_calls = {"num_partitions": 2, "layers_per_cell": [1, 2]}
    found = planned(layers(), setting=of_calls)
    assert found.arguments["layers_per_cell"] == [4, 2]
    with pytest.raises(ValueError, match="must have a sum of 6"):
        planned(layers(), setting={**of_calls, "layers_per_cell": [1, 1]})
    with pytest.raises(ValueError, match="`num_partitions` must be at most"):
        planned([keras.Input((8,)), kl.Dense(8)], setting={"num_partitions": 4})
    with pytest.raises(ValueError, match="`remat_groups` must be at most"):
        planned(layers(), setting={"num_partitions": 2, "remat_groups": 4})


def test_machine_is_that_of_the_gpus_here(monkeypatch):
    """Their memory is the limit."""
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
    monkeypatch.setattr(
        tf.config.experimental,
        "get_device_details",
        lambda device: {"device_name": "NVIDIA A100-SXM4-40GB"},
    )
    found = tfgpipe.plan(dense(), 64, devices=CPUS[:2])
    assert found.memory_limit == 40 * 2**30
    assert "seconds from FLOPs on a100" in str(found)


@pytest.mark.parametrize("jit_compile", ["auto", True, False])
def test_a_machine_that_is_elsewhere_compiles_unless_told(jit_compile):
    plan = planned(devices=2, machine="v100", jit_compile=jit_compile)
    is_compiled = jit_compile is not False
    assert (plan.arguments["remat_groups"] is None) == is_compiled
    word = "compiled" if is_compiled else "not compiled"
    assert plan.basis == f"seconds from FLOPs on v100, cells {word} by XLA"
    on_tpu = planned(devices=2, machine="tpu_v4", jit_compile=jit_compile)
    assert on_tpu.arguments["remat_groups"] is None


def test_plan_says_how_far_it_was_off():
    plan = planned()
    held = [1.25 * n for n in plan.device_bytes]
    text = plan.compare(2 * plan.step_seconds, held)
    assert "planned (+100%); the fullest device" in text
    assert text.endswith("planned (+25%).")
    assert "are not counted" in plan.compare(1.0)
