"""The monitor: right steps, right numbers, and no trace in the training."""

import dataclasses
import itertools

import keras
import numpy as np
import pytest
import runs
from tiny import Interrupt

import tfgpipe
from tools.train import comparison, event_log, meter, monitor
from tools.train.monitor import Monitor
from tools.train.trainer import Trainer

PER_EPOCH = 4  # steps: 28 images in batches of 8


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path_factory):
    runs.use(monkeypatch, tmp_path_factory)


def fit(trainer, *callbacks):
    trainer.fit(list(callbacks), verbose=0)


def steps(folder, tag):
    return [step for step, _ in event_log.read(folder).get(tag, [])]


def test_scalars_are_written_every_so_often_and_at_the_end(tmp_path):
    trainer = Trainer(runs.IMAGE, num_steps=10)
    fit(trainer, Monitor.of(trainer, tmp_path, every=4))
    found = event_log.read(tmp_path)
    expected = {
        "train/loss",
        "train/accuracy",
        "learning_rate",
        "speed/examples_per_second",
        "pipeline/ideal_bubble",
        "memory_mib/process_current",
        "memory_mib/process_peak",
    }
    assert set(found) == expected
    assert steps(tmp_path, "train/loss") == [4, 8, 10]
    rates = [rate for _, rate in found["learning_rate"]]
    schedule = runs.IMAGE.optimizer.make(10)
    for rate, step in zip(rates, (4, 8, 10), strict=True):
        schedule.iterations.assign(step)
        assert rate == pytest.approx(float(schedule.learning_rate))
    # K = 2, M = 2
    assert found["pipeline/ideal_bubble"][0][1] == pytest.approx(1 / 3)


class Losses(keras.callbacks.Callback):
    """The loss of every step, from the running means that Keras gives."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_epoch_begin(self, epoch, logs=None):
        self.sum = self.rows = 0

    def on_train_batch_end(self, batch, logs=None):
        rows = 8 if batch < PER_EPOCH - 1 else 28 - 8 * (PER_EPOCH - 1)
        total = logs["loss"] * (self.rows + rows)
        self.found.append(((total - self.sum) / rows, rows))
        self.sum, self.rows = total, self.rows + rows


def test_losses_are_means_over_the_steps_in_between(tmp_path):
    trainer = Trainer(runs.IMAGE)
    losses = Losses()
    fit(trainer, Monitor.of(trainer, tmp_path, every=3), losses)
    written = event_log.read(tmp_path)["train/loss"]
    assert [step for step, _ in written] == [3, 6, 9, 12]
    for (last, value), first in zip(written, itertools.count(0, 3)):
        own = losses.found[first:last]
        mean = sum(loss * rows for loss, rows in own) / sum(r for _, r in own)
        assert value == pytest.approx(mean, rel=1e-4)


def test_resumed_run_goes_on_with_the_steps_of_its_checkpoint(tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    trainer = Trainer(runs.IMAGE, train_dir=folder)
    options = {"every": 1, "evaluate_every": 2, "say": lambda line: None}
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, Monitor.of(trainer, log, **options), Interrupt(2, 3))
    before = event_log.read(log)
    assert steps(log, "train/loss") == list(range(1, 12))
    resumed = Trainer(runs.IMAGE, train_dir=folder)
    assert resumed.first_step == 8
    fit(resumed, Monitor.of(resumed, log, **options))
    assert steps(log, "train/loss") == list(range(1, 13))
    assert steps(log, "test/accuracy") == [2, 4, 6, 8, 10, 12]
    after = event_log.read(log)
    for tag in ("train/loss", "learning_rate", "test/accuracy"):
        # The steps that were done twice gave the same again.
        assert after[tag][: len(before[tag])] == before[tag]


def test_tests_in_between_leave_no_trace_in_the_training(tmp_path):
    weights, histories, said = [], [], []
    for every in (None, 1):
        trainer = Trainer(dataclasses.replace(runs.IMAGE, epochs=1))
        watch = Monitor.of(trainer, None, evaluate_every=every, say=said.append)
        losses = Losses()
        fit(trainer, watch, losses)
        weights.append(trainer.model.get_weights())
        histories.append(trainer.model.history.history)
    assert comparison.difference(*weights).num_different == 0
    for name in ("loss", "accuracy"):
        assert histories[0][name] == histories[1][name]
    assert [line.split(",")[0] for line in said] == [
        f"Step {step}" for step in range(1, PER_EPOCH + 1)
    ]
    assert said[-1].endswith(f"accuracy {trainer.evaluate()['accuracy']:.4g}")


def test_throughput_joins_the_history(monkeypatch):
    times = itertools.count()

    class Seconds:
        monotonic = staticmethod(lambda: float(next(times)))

    monkeypatch.setattr(meter, "time", Seconds)
    trainer = Trainer(dataclasses.replace(runs.IMAGE, epochs=2))
    fit(trainer, Monitor.of(trainer, None))
    rates = trainer.model.history.history["examples_per_second"]
    # The clock is read twice after the first step, and after each epoch.
    assert rates[0] == pytest.approx((28 - 8) / 2)
    assert len(rates) == 2 and rates[1] > 0


def test_line_now_and_then_says_how_it_goes(monkeypatch, capsys):
    times = itertools.count(0, 10)

    class TenSeconds:
        monotonic = staticmethod(lambda: float(next(times)))

    monkeypatch.setattr(monitor, "time", TenSeconds)
    trainer = Trainer(runs.IMAGE)
    losses = Losses()
    fit(trainer, Monitor.of(trainer, None, say_every=30.0), losses)
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert not {"\b", "\r", "\x1b"} & set(printed)
    assert len(lines) == 4
    for line, last in zip(lines, (3, 6, 9, 12), strict=True):
        own = losses.found[last - 3 : last]
        mean = sum(loss * rows for loss, rows in own) / sum(r for _, r in own)
        assert line.startswith(f"Step {last} of 12: loss {mean:.3f}"[:-1])
        assert line.endswith(" examples/s")


class NextToken(keras.layers.Layer):
    """Logits of the next target token, from the last one alone."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = keras.layers.Embedding(320, 320)

    def call(self, pair):
        return self.table(pair[1])


@dataclasses.dataclass(frozen=True)
class Bigrams:
    def layers(self):
        return [NextToken()]


def test_tokens_of_pairs_are_those_that_are_no_padding(tmp_path):
    trainer = Trainer(dataclasses.replace(runs.MT, model=Bigrams()), 3)
    batches = list(trainer.source.train(512, seed=0, first_step=0, num_steps=3))
    fit(trainer, Monitor.of(trainer, tmp_path))
    found = event_log.read(tmp_path)
    ((_, tokens),) = found["speed/tokens_per_second"]
    ((_, examples),) = found["speed/examples_per_second"]
    rows = sum(len(y) for _, y, _ in batches[1:])
    counted = sum(np.count_nonzero(w) for _, _, w in batches[1:])
    assert tokens / examples == pytest.approx(counted / rows, rel=1e-4)


def test_plain_keras_has_no_bubble(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    watch = Monitor(tmp_path, input_spec=model.inputs[0], every=1)
    x = np.ones((8, 4), np.float32)
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[watch])
    found = event_log.read(tmp_path)
    assert steps(tmp_path, "train/loss") == [1, 2]
    assert "pipeline/ideal_bubble" not in found
    assert "memory_mib/process_peak" in found


def test_devices_of_all_replicas_are_watched():
    with tfgpipe.PipelineStrategy(2, 2).scope():
        model = tfgpipe.GPipe([keras.layers.Dense(2) for _ in range(3)])
    model.build((None, 2))
    assert sorted(name[-5:] for name in monitor._devices(model)) == [
        f"CPU:{index}" for index in range(4)
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"evaluate_every": 0, "evaluate": dict}, "evaluate_every=0"),
        ({"evaluate_every": 5}, "such as `trainer.evaluate`"),
    ],
)
def test_bad_arguments_are_refused(given, message):
    spec = keras.KerasTensor((None, 4))
    with pytest.raises(ValueError, match=message):
        Monitor(None, input_spec=spec, **given)
