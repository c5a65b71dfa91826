"""Hosts of TF_CONFIG."""

import json

import pytest

from tools.train import cluster


def tf_config(job="worker", index=0, **jobs):
    jobs = jobs or {"worker": ["a:1", "b:2"]}
    task = {"type": job, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": task})}


def test_one_host_needs_neither():
    assert cluster.given(None, {}) is None
    assert cluster.given(None, {"TF_CONFIG": " "}) is None
    assert cluster.given(None, {"TF_CONFIG": "{}"}) is None
    assert cluster.given(None, tf_config(worker=["a:1"])) is None


@pytest.mark.parametrize(
    ("jobs", "task", "controller"),
    [
        ({"worker": ["a:1", "b:2"]}, ("worker", 1), "worker 0 at a:1"),
        (
            {"worker": ["a:1", "b:2"], "chief": ["c:3"]},
            ("worker", 0),
            "chief 0 at c:3",
        ),
    ],
)
def test_controller_is_the_chief_or_the_first_worker(jobs, task, controller):
    found = cluster.given(None, tf_config(*task, **jobs))
    assert str(found.controller) == controller == str(found.all[0])
    assert (found.here.job, found.here.index) == task
    assert found.here not in found.others
    assert len(found.others) == len(found.all) - 1


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"TF_CONFIG": "{"}, "must be JSON such as .* Received: TF_CONFIG={"),
        ({"TF_CONFIG": '{"cluster": {"worker": 3}}'}, "must be JSON such as"),
        (tf_config(index="x"), "must be JSON such as"),
        (tf_config(index=2), "which of them this process is"),
        (tf_config(worker=["a:1"], ps=["b:1"]), "no other jobs"),
        (tf_config(worker=["a:1"], chief=["b:1", "c:1"]), "at most one chief"),
        (tf_config(worker=["a:1", "b"]), "'b' in TF_CONFIG"),
        (tf_config(worker=["a:1"], chief=["a:1"]), "different addresses"),
    ],
)
def test_malformed_tf_config_is_an_error(environment, message):
    with pytest.raises(ValueError, match=message):
        cluster.given(None, environment)


def test_workers_and_tf_config_exclude_each_other():
    with pytest.raises(ValueError, match=r"not be given both.* Unset one"):
        cluster.given("a:1", tf_config())
