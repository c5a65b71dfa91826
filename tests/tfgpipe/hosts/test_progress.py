"""Devices that answer nothing while no step ends."""

import threading

import pytest

from tfgpipe.hosts import controller, link
from tfgpipe.hosts.controller import Progress, ask_devices, wait_until_silent

LONG = [0] * 30 + [1]  # a step of 155 s


class Stopped(Exception):
    """There is nothing more in a test's story."""


@pytest.fixture
def story(monkeypatch):
    """What happens between two looks: steps that end; None ends training.

    Returns a function that runs such a story; `answers` says of each question
    whether it is answered.
    """

    def run(steps, answers):
        watched, beats, asked = Progress(), iter(steps), []
        watched.on_train_begin()

        def sleep(seconds):
            assert seconds == link.BEAT
            beat = next(beats, 0)
            if beat is None:
                watched.on_train_end()
            for _ in range(beat or 0):
                watched.on_train_batch_end(0)
            if len(asked) > 500 or next(left, None) is None:
                raise Stopped

        def ask(names):
            assert names == ["CPU:0"]
            event = threading.Event()
            if answers(len(asked)):
                event.set()
            asked.append(event)
            return event

        left = iter(range(400))
        monkeypatch.setattr(controller.time, "sleep", sleep)
        monkeypatch.setattr(controller, "ask_devices", ask)
        return wait_until_silent(watched, ["CPU:0"]), asked

    return run


@pytest.mark.parametrize(
    ("steps", "answers"),
    [
        ([1, 1], lambda i: True),
        ([], lambda i: False),  # the first steps
        ([0, 1, 0, 0], lambda i: False),
        ([1, *(10 * LONG)], lambda i: i < 20 or i % 2),
        ([1, 1, 1, 0, 0, 0, None], lambda i: False),  # after training
    ],
)
def test_devices_are_not_lost(steps, answers, story):
    with pytest.raises(Stopped):
        story(steps, answers)


@pytest.mark.parametrize(
    ("steps", "beats", "questions"),
    [
        ([0, 1, 1, 1, 0, 0], link.BEATS, 1),
        # In the long steps that were looked at, and last.
        ([1, *(3 * LONG), 0], 3 * 31, 3),
    ],
)
def test_devices_that_do_not_answer_are_lost(steps, beats, questions, story):
    seconds, asked = story(steps, lambda i: False)
    assert seconds == beats * link.BEAT
    assert len(asked) == questions


def test_a_device_answers():
    assert ask_devices(["CPU:0"]).wait(30)


def test_a_device_that_there_is_not_has_no_answer_to_wait_for():
    assert ask_devices(["/job:nobody/task:7/device:CPU:0"]).wait(30)
