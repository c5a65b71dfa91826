"""A mini-batch that is not finite changes nothing, whatever the pipeline."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from crossing import sent_tensors
from keras import layers as kl
from matrix import arguments
from quick import quick
from sharing_layers import Counter

import tfgpipe
from tfgpipe.model import nonfinite

ROWS, BATCH = 20, 4
BAD = slice(2 * BATCH, 3 * BATCH)  # the third of five mini-batches


@keras.saving.register_keras_serializable(package="tests")
class Spoiled(kl.Layer):
    """Multiplies the gradient of rows that hold a large number by it."""

    def call(self, x):
        @tf.custom_gradient
        def spoiled(x):
            factor = tf.where(tf.reduce_any(x > 1e3), np.inf, 1.0)
            return tf.identity(x), lambda dy: dy * tf.cast(factor, dy.dtype)

        return spoiled(x)


def layers():
    return [
        kl.Dense(6, activation="relu"),
        Counter(name="counter"),
        kl.BatchNormalization(),
        kl.Dropout(0.3, seed=1),
        kl.Dense(6, kernel_regularizer="l2"),
        kl.SpectralNormalization(kl.Dense(6)),
        kl.Dense(2),
    ]


def data(bad="none"):
    """Rows of five mini-batches; one row of the third is spoiled."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((ROWS, 4)), rng.standard_normal((ROWS, 2))
    dtype = keras.config.floatx()
    x, y = x.astype(dtype), y.astype(dtype)
    if bad == "input":
        x[BAD][1] = np.nan
    elif bad == "label":
        y[BAD][3] = np.inf
    elif bad == "gradient":
        x[BAD][2] = 1e9
    return x, y


def without_bad(x, y):
    keep = np.r_[0 : BAD.start, BAD.stop : ROWS]
    return x[keep], y[keep]


def trained(x, y, make=layers, optimizer=None, compiling=None, **options):
    """The model and its history after two epochs."""
    keras.utils.set_random_seed(5)
    model = tfgpipe.GPipe(make(), **options)
    model.compile(
        optimizer or keras.optimizers.Adam(0.01, use_ema=True),
        **{"loss": "mse", "metrics": ["mae"], **(compiling or {})},
    )
    history = model.fit(x, y, BATCH, epochs=2, shuffle=False, verbose=0)
    return model, history.history


def everything(model):
    found = {v.path: v.numpy() for v in model.variables}
    found |= {f"metric {v.path}": v.numpy() for v in model.metrics_variables}
    for i, v in enumerate(model.optimizer.variables):
        found[f"optimizer {i} {v.path}"] = v.numpy()
    return found


def assert_same(model, other):
    pairs = zip(everything(model).items(), everything(other).values())
    for (name, a), b in pairs:
        np.testing.assert_array_equal(a, b, name)


def check(bad, make=layers, optimizer=lambda: None, compiling=None, **options):
    """Training with a bad mini-batch is training without it."""
    x, y = data(bad)
    model, history = trained(
        x, y, make, optimizer(), compiling, skip_nonfinite=True, **options
    )
    other, expected = trained(
        *without_bad(x, y), make, optimizer(), compiling, **options
    )
    assert history.pop("skipped_steps") == [1, 1]
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(history[name], values, name)
    assert all(np.isfinite(v).all() for v in everything(model).values())
    assert_same(model, other)


POINTS = [
    ("input", 4, 3, "interleaved", "always"),
    ("label", 3, 4, "zero_bubble", "mapping"),
    *(
        pytest.param(*point, marks=pytest.mark.slow)
        for point in (
            ("label", 2, 2, "1f1b", "except_last"),
            ("input", 1, 1, "gpipe", "never"),
            ("input", 3, 2, "written", "never"),
        )
    ),
]


@pytest.mark.parametrize(("bad", "k", "m", "schedule", "remat"), POINTS)
def test_skipped_mini_batch_leaves_the_bits_of_one_never_seen(
    bad, k, m, schedule, remat
):
    check(bad, **arguments(k, m, schedule, remat))


def test_gradient_alone_can_be_what_is_not_finite():
    """The loss is finite, and so are the gradients of the later cells."""

    def make():
        return [kl.Dense(4), kl.Rescaling(1.0), Spoiled(), kl.Dense(2)]

    check("gradient", make, num_partitions=4, num_micro_batches=2)


@pytest.mark.parametrize(
    "compiling",
    [
        {"jit_compile": True},
        {"loss": lambda y, p: tf.reduce_max(tf.square(y - p))},
        {"steps_per_execution": 2},
    ],
    ids=["xla", "whole_loss", "several_steps"],
)
def test_ways_to_run_skip_alike(compiling):
    def make():
        if "jit_compile" in compiling:
            return [kl.Dense(4), kl.BatchNormalization(), kl.Dense(2)]
        return [*layers()[:4], kl.Dense(2)]

    check(
        "label",
        make,
        None.__class__,
        compiling,
        num_partitions=2,
        num_micro_batches=2,
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Nadam(0.01),
        lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5),
            momentum=0.9,
            global_clipnorm=0.1,
            gradient_accumulation_steps=3,
        ),
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    ],
    ids=["nadam", "accumulated", "adamw"],
)
def test_optimizer_has_never_seen_it(optimizer):
    check(
        "label",
        lambda: [kl.Dense(4), kl.Dense(2)],
        optimizer,
        num_partitions=2,
        num_micro_batches=2,
    )


def embedded(x, y, **options):
    ids = np.arange(ROWS).reshape(ROWS, 1) % 7
    rows = ids if len(x) == ROWS else without_bad(ids, ids)[0]
    return trained(
        rows,
        y,
        lambda: [kl.Embedding(7, 4), kl.Flatten(), kl.Dense(2)],
        num_partitions=2,
        **options,
    )


def replicated(x, y, **options):
    with tfgpipe.PipelineStrategy(2, 2).scope():
        return trained(x, y, num_micro_batches=2, **options)


def in_float16(x, y, **options):
    """The loss is finite, and its gradient is not."""
    y = np.where(np.isinf(y), 1e7, y).astype("float32")
    policy = keras.DTypePolicy("float16")
    return trained(
        x,
        y,
        lambda: [kl.Dense(4, dtype=policy), kl.Dense(2, dtype=policy)],
        keras.optimizers.SGD(0.01),
        num_partitions=2,
        **options,
    )


@pytest.mark.parametrize("run", [embedded, replicated, in_float16])
def test_kinds_of_gradients_and_replicas_skip_alike(run):
    x, y = data("label")
    model, history = run(x, y, skip_nonfinite=True)
    other, _ = run(*without_bad(x, y))
    assert history["skipped_steps"] == [1, 1]
    assert_same(model, other)


def test_loss_scale_falls_and_nothing_else_changes():
    x, y = data("label")

    def scaled():
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=2.0**10
        )

    def run(x, y, **options):
        return trained(x, y, layers, scaled(), num_partitions=3, **options)

    model, history = run(x, y, skip_nonfinite=True)
    other, _ = run(*without_bad(x, y))
    assert history["skipped_steps"] == [1, 1]
    assert float(model.optimizer.dynamic_scale) == 2.0**8  # of two epochs
    for a, b in zip(model.variables, other.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), a.path)
    assert int(model.optimizer.iterations) == int(other.optimizer.iterations)


def test_own_metrics_are_what_they_return():
    class Own(tfgpipe.GPipe):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            found = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**found, "own": tf.reduce_max(y_pred)}

    model = Own([kl.Dense(2)], 1, 2, skip_nonfinite=True)
    model.compile("sgd", "mse")
    logs = model.fit(*data(), BATCH, verbose=0).history
    assert logs["skipped_steps"] == [0] and np.isfinite(logs["own"]).all()


def test_only_scalars_of_the_check_leave_a_device():
    width = 16
    x = np.ones((ROWS, width), "float32")

    def sent(**options):
        keras.utils.set_random_seed(1)
        made = [kl.Dense(width) for _ in range(4)]
        model = tfgpipe.GPipe(made, 4, 4, **options)
        model.compile("adam", "mse")
        return sorted(
            entry
            for entry in sent_tensors(model, x, x)
            if np.prod(entry[2]) > 1
        )

    assert sent(skip_nonfinite=True) == sent()


def test_number_of_all_is_kept_in_files(tmp_path):
    def make(x, y):
        return trained(
            x, y, lambda: [kl.Dense(2)], num_partitions=1, skip_nonfinite=True
        )[0]

    model, path = make(*data("label")), tmp_path / "model.keras"
    assert (model.num_skipped, int(model.optimizer.iterations)) == (2, 8)
    model.save(path)
    loaded = tfgpipe.load_model(path)
    assert loaded.skip_nonfinite is True and loaded.num_skipped == 2
    other = tfgpipe.load_model(path, skip_nonfinite=False)
    assert other.skip_nonfinite is False and other.num_skipped == 0
    other = make(*data())
    assert other.num_skipped == 0
    model.save_weights(tmp_path / "a.weights.h5")
    other.load_weights(tmp_path / "a.weights.h5")
    assert other.num_skipped == 2
    plain = keras.Sequential([kl.Dense(2)])
    plain.build((None, 4))
    plain.save_weights(tmp_path / "b.weights.h5")
    new = tfgpipe.GPipe([kl.Dense(2)], 1, skip_nonfinite=True)
    new.build((None, 4))
    new.load_weights(tmp_path / "b.weights.h5")
    assert new.num_skipped == 0


def test_epoch_that_was_skipped_whole_is_not_the_best(tmp_path):
    x, y = data()
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(dict(logs))

    model = tfgpipe.GPipe(
        [keras.Input((4,)), kl.Dense(2)], 1, skip_nonfinite=True
    )
    model.compile("sgd", "mse", metrics=["mae"])
    rows = np.concatenate([x, x * np.nan, x * np.nan]), np.tile(y, (3, 1))
    stop = keras.callbacks.EarlyStopping("loss", patience=9)
    model.fit(
        tf.data.Dataset.from_tensor_slices(rows).batch(BATCH),
        steps_per_epoch=5,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[
            stop,
            tfgpipe.callbacks.Checkpoint(tmp_path, best="loss", keep=9),
            Look(),
        ],
    )
    assert stop.best == seen[0]["loss"]
    for logs in seen[1:]:
        assert np.isnan(logs["loss"]) and np.isnan(logs["mae"])
        assert logs["skipped_steps"] == 5
    best = tfgpipe.checkpoints.Folder(tmp_path).best("min", "loss")
    assert best == pytest.approx(seen[0]["loss"])
    assert np.isfinite(model.evaluate(x, y, BATCH, verbose=0)[0])


@pytest.mark.parametrize(
    ("loss", "gradients", "changes", "expected"),
    [
        (1.0, [[1.0, 2.0], None], [], True),
        (np.nan, [[1.0]], [], False),
        (1.0, [[1.0], [0.0, -np.inf]], [], False),
        (1.0, [[1.0 + 1j * np.nan]], [], False),
        (1.0, [], [], True),
        (1.0, [[1e19]], [], True),
        (1.0, [np.array([1e4], "float16")], [], True),  # squared in float32
        (1.0, [[1e20]], [], False),  # its square is kept
        (1.0, [np.full(2**15, 1e20, "float32")], [], False),
        (1.0, [], [([1.0, 2.0], [1.0, 1e38])], True),
        (1.0, [], [([1.0], [1.0]), ([1.0, 2.0], [1.0, np.inf])], False),
        (1.0, [], [([1.0, np.inf], [1.0, np.inf])], True),
        (1.0, [], [([1.0, np.inf], [np.nan, np.inf])], False),
    ],
)
def test_everything_must_be_finite(loss, gradients, changes, expected):
    tensors = [None if g is None else tf.constant(g) for g in gradients]
    changes = [tuple(map(tf.constant, pair)) for pair in changes]
    is_finite, _ = nonfinite.examine(tf.constant(loss), tensors, changes)
    assert bool(is_finite) == expected


def test_size_is_loss_and_norms():
    gradients = [tf.constant([3.0]), None, tf.fill([2**14, 2], 0.0)]
    gradients.append(tf.constant([[4.0]], tf.float64))
    changes = [(tf.constant([1.0, np.inf]), tf.constant([13.0, np.inf]))]
    changes.append((tf.constant(1.0), tf.constant(6.0)))
    _, size = nonfinite.examine(tf.constant(2.0), gradients, changes, True)
    np.testing.assert_allclose(size, [2.0, 5.0, 13.0])


# ------------------------------------------- finite, and what becomes infinite
def normalized():
    return [
        kl.BatchNormalization(name="first"),
        kl.Dense(6, "relu"),
        kl.Dropout(0.3, seed=1),
        kl.BatchNormalization(),
        kl.Dense(2),
    ]


@pytest.mark.parametrize(
    ("k", "m", "schedule"),
    quick(
        [(1, 1, "gpipe"), (2, 2, "gpipe"), (2, 2, "1f1b"), (1, 4, "gpipe")],
        [(1, 1, "gpipe"), (2, 2, "1f1b")],
    ),
)
def test_row_that_makes_state_infinite_is_skipped(k, m, schedule):
    """Loss and gradients are finite, and all later predictions were equal."""
    x, y = data()
    x[BAD][1] = 1e20
    options = {"num_partitions": k, "num_micro_batches": m}
    options |= {"schedule": schedule, "optimizer": keras.optimizers.Adam(0.01)}
    model, history = trained(x, y, normalized, skip_nonfinite=True, **options)
    options["optimizer"] = keras.optimizers.Adam(0.01)
    other, expected = trained(*without_bad(x, y), normalized, **options)
    assert history.pop("skipped_steps") == [1, 1]
    assert history == expected
    assert_same(model, other)
    plain, _ = trained(x, y, normalized, num_partitions=k)
    assert not np.isfinite(plain.get_layer("first").moving_variance).all()


def test_state_that_is_infinite_from_the_start_may_stay_so():
    class Least(kl.Layer):
        """The least that was seen."""

        def build(self, shape):
            self.least = self.add_weight(
                name="least",
                initializer=lambda *_, **__: np.inf,
                trainable=False,
            )
            self.never = self.add_weight(
                name="never",
                shape=(2,),
                initializer=lambda *_, **__: np.array([np.inf, 1.0], "float32"),
                trainable=False,
            )

        def call(self, x):
            self.least.assign(tf.minimum(self.least, tf.reduce_min(x)))
            self.never.assign(self.never * 2)
            return x

    model, history = trained(
        *data(),
        lambda: [Least(), kl.Dense(2)],
        num_partitions=1,
        skip_nonfinite=True,
    )
    assert history["skipped_steps"] == [0, 0]
    assert np.isfinite(model.get_layer(index=0).least)


# --------------------------------------------------------------------- outliers
def sized(skips, loss, norm=1.0, is_finite=True):
    size = tf.constant([loss, norm, 0.0], tf.float32)
    finite = tf.constant(is_finite)
    outlier = skips.is_outlier(finite, size)
    return bool(outlier), skips.add(finite, outlier)


def test_outliers_are_far_above_what_was_seen():
    skips = nonfinite.Skips("CPU:0", spread=10.0)
    rng = np.random.default_rng(0)
    assert not sized(skips, 1e9)[0]  # nothing is known yet
    for loss in rng.normal(5.0, 1.0, 200):
        assert not sized(skips, loss)[0]
    for loss, norm, expected in [
        (10.0, 1.0, False),
        (30.0, 1.0, True),
        (5.0, 1.05, False),
        (5.0, 2.0, True),
        (-1e9, 0.5, False),
        (5.0, 1.0, False),
    ]:
        assert sized(skips, loss, norm)[0] == expected, (loss, norm)
    is_outlier, logs = sized(skips, np.nan, np.nan, is_finite=False)
    assert not is_outlier
    assert logs == {"skipped_steps": 1, "outlier_steps": 2}
    assert (skips.counts["total"], skips.counts["in_a_row"]) == (3, 1)


def test_level_that_rises_for_good_is_soon_none():
    skips = nonfinite.Skips("CPU:0", spread=10.0)
    for _ in range(128):
        sized(skips, 1.0)
    found = [sized(skips, 100.0)[0] for _ in range(128)]
    assert 10 < sum(found) < 20 and not any(found[20:])


def test_outlier_leaves_the_bits_of_one_never_seen(tmp_path):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(64 * BATCH, 4)).astype("float32")
    y = x[:, :2] + rng.normal(size=(64 * BATCH, 2)).astype("float32")
    bad = 50 * BATCH

    def run(x, y, **options):
        model, _ = trained(
            x,
            y,
            normalized,
            keras.optimizers.Adam(0.01),
            num_partitions=2,
            num_micro_batches=2,
            **options,
        )
        return model

    far = x.copy()
    far[bad] = 1e6
    model = run(far, y, skip_nonfinite=True, skip_outliers=20.0)
    assert model.num_skipped == 2
    assert model.history.history["outlier_steps"] == [1, 1]
    assert model.history.history["skipped_steps"] == [0, 0]
    keep = np.r_[0:bad, bad + BATCH : len(x)]
    other = run(x[keep], y[keep])
    assert_same(model, other)
    model.save(tmp_path / "model.keras")
    loaded = tfgpipe.load_model(tmp_path / "model.keras")
    assert (loaded.num_skipped, loaded.skip_outliers) == (2, 20.0)
    sizes = [m._notes.skips.lasting["sizes"].numpy() for m in (model, loaded)]
    np.testing.assert_array_equal(*sizes)
    again = tfgpipe.load_model(tmp_path / "model.keras", skip_outliers=None)
    assert again.skip_outliers is None
    again = tfgpipe.load_model(tmp_path / "model.keras", skip_nonfinite=False)
    assert again.skip_outliers is None


def test_outliers_need_what_is_not_finite_to_be_skipped():
    with pytest.raises(ValueError, match="needs skip_nonfinite=True"):
        tfgpipe.GPipe([kl.Dense(2)], 1, skip_outliers=10)
