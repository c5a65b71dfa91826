"""Runs tasks that wait for each other: batch normalisation over replicas.

The partners of a task are the same task of the i-th micro-batches of other
replicas. Where their cell takes moments over replicas, see `cells/moments.py`,
each of them runs up to there; then the sums are added up, in the order of the
replicas, and all go on:

    replica 0   stage 1 --sums--+   +--> stage 2 --sums--+   +--> results
                                +-->|                    +-->|
    replica 1   stage 1 --sums--+   +--> stage 2 --sums--+   +--> results

In the step's graph everything follows only from what was there before it: no
device can wait for ever, whatever the schedule.

A micro-batch without rows computes a row that counts for nothing: it adds
nothing to the others' sums, and keeps to its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe.cells import MicroBatches, Stages, by_reference
from tfgpipe.run.chain import Chain, run_independently
from tfgpipe.run.state_rules import sum_of
from tfgpipe.schedules import Task


class Started(NamedTuple):
    """A task that is ready to run.

    Attributes:
        task: The task.
        device: Where it runs.
        awaited: What it gets from other devices.
        work: Runs it.
    """

    task: Task
    device: str
    awaited: list[Any]
    work: Any


def run_together(
    chain: Chain, started: Sequence[Started], micro_batches: MicroBatches
) -> list[Any]:
    """Runs the tasks of partners, and returns what each returns.

    Args:
        chain: Of all devices.
        started: The tasks. Of replicas with unequal numbers of micro-batches,
            one may be the first to sum gradients, and another one not.
        micro_batches: How the rows fall into micro-batches.
    """
    functions: list[Stages] = [one.work.function for one in started]
    values = [dict(one.work.values) for one in started]
    is_first = True
    for stages in zip(*(f.before_last for f in functions), strict=True):
        sent = []
        for one, own, stage in zip(started, values, stages):
            with _on_device(chain, one, is_first):
                *sums, own[stage.carried] = stage.function(own)
                run_independently(sums)
                sent.append(sums)
        is_first = False
        totals = _totals(started, sent, micro_batches)
        for own, stage, received in zip(values, stages, totals):
            own.update(by_reference(stage.received, received))
    results = []
    for one, own, function in zip(started, values, functions):
        with _on_device(chain, one, is_first):
            found = function.last(own, one.work.sums)
            results.append(one.work.finish(found))
            chain.finish(one.task, one.device, results[-1])
    return results


def _on_device(chain: Chain, one: Started, is_first: bool) -> Any:
    if is_first:
        return chain.on_device(one.device, one.awaited)
    return tf.device(one.device)


def _totals(
    started: Sequence[Started],
    sent: list[list[tf.Tensor]],
    micro_batches: MicroBatches,
) -> list[list[tf.Tensor]]:
    """What each of the partners gets for what it sent."""
    if len(sent) == 1:
        return sent
    select = micro_batches.select
    places = [one.task.micro_batch for one in started]
    totals = []
    for values in zip(*sent):
        with tf.device(values[0].device):
            counted = [
                select(m, value, tf.zeros_like(value))
                for m, value in zip(places, values)
            ]
            totals.append(sum_of(counted))
    found = []
    for m, own in zip(places, sent):
        with tf.device(own[0].device):
            found.append(
                [select(m, total, value) for total, value in zip(totals, own)]
            )
    return found
