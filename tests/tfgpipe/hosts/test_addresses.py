"""Which hosts a run has."""

import pytest

from tfgpipe.hosts import addresses


def test_workers_are_in_the_order_of_the_flag():
    found = addresses.of_workers("b:2222, 10.0.0.1:1")
    assert [str(host) for host in found.all] == [
        "worker 0 at b:2222",
        "worker 1 at 10.0.0.1:1",
    ]
    assert found.all[1].task == "/job:worker/replica:0/task:1"
    assert found.here is None and found.controller is None
    assert found.others == found.all


@pytest.mark.parametrize(
    "text",
    ["", "a", "a:", ":1", "a:b", "a:0", "a:65536", "a:1,", "http://a:1", "a:²"],
)
def test_malformed_workers_are_an_error(text):
    with pytest.raises(ValueError, match="must be given as host:port"):
        addresses.of_workers(text)


# ------------------------------------------------------------------- devices
def listed(cpus, gpus):
    """What TensorFlow lists: so many on each worker, and on the controller."""
    return {
        kind: [f"/job:controller/replica:0/task:0/device:{kind}:0"] * (len(ns))
        + [
            f"/job:worker/replica:0/task:{task}/device:{kind}:{index}"
            for task, count in enumerate(ns)
            for index in range(count)
        ]
        for kind, ns in (("GPU", gpus), ("CPU", cpus))
    }


def test_devices_are_in_the_order_of_the_hosts():
    both = addresses.of_workers("a:1,b:2")
    found = addresses.device_names(both, listed([1, 1], [2, 1]), 3)
    assert [name[-12:] for name in found] == [
        "device:GPU:0",
        "device:GPU:1",
        "device:GPU:0",
    ]
    assert [name[:-13] for name in found] == [
        "/job:worker/replica:0/task:0",
        "/job:worker/replica:0/task:0",
        "/job:worker/replica:0/task:1",
    ]
    (name,) = addresses.device_names(
        addresses.of_workers("a:1"), listed([1], [0]), 1
    )
    assert name == "/job:worker/replica:0/task:0/device:CPU:0"


def test_many_hosts_are_told_apart():
    many = addresses.of_workers(",".join(f"a:{port}" for port in range(1, 13)))
    found = addresses.device_names(many, listed([1] * 12, [0] * 12), 12)
    assert len(found) == 12
    assert "/task:1/" in found[1] and "/task:10/" in found[10]


@pytest.mark.parametrize(
    ("cpus", "gpus", "message"),
    [
        ([2, 1], [0, 0], "4 wanted, of 3: 2 of worker 0 at a:1, 1 of worker 1"),
        ([1, 1], [8, 0], r"have a GPU where.* none on worker 1 at b:2\. Leave"),
    ],
)
def test_too_few_devices_are_an_error(cpus, gpus, message):
    both = addresses.of_workers("a:1,b:2")
    with pytest.raises(ValueError, match=message):
        addresses.device_names(both, listed(cpus, gpus), 4)
