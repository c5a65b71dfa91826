"""In Keras's eyes a `GPipe` is the model: policies, weights, files."""

import h5py
import keras
import numpy as np
import pytest
from keras import layers as kl

import tfgpipe

registered = keras.saving.register_keras_serializable(package="test_face")


class WithConfig:
    """Made again by its name alone."""

    def get_config(self):
        return {"name": self.name}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return cls(**config)


def items():
    return [keras.Input((4,)), kl.Dense(4, name="a"), kl.Dense(2, name="b")]


def graph():
    x = keras.Input((4,))
    return x, kl.Dense(2, name="b")(kl.Dense(4, name="a")(x))


def add_weights(model):
    model.token = model.add_weight(shape=(4,), initializer="ones", name="token")
    model.seen = model.add_weight(
        shape=(), initializer="zeros", trainable=False, name="seen"
    )


@registered
class Own(WithConfig, keras.Model):
    """A `call`, and weights beside those of layers."""

    def __init__(self, **options):
        super().__init__(**options)
        add_weights(self)
        # As a `GPipe` has methods of these names.
        self.cells, self.zeta = [kl.Dense(4)], kl.Dense(2)
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(1.0)
        return self.zeta(self.cells[0](x) * self.token)


@registered
class SubOwn(Own):
    """Writes its weights by itself."""

    def save_own_variables(self, store):
        store["all"] = np.append(self.token.numpy(), self.seen.numpy())

    def load_own_variables(self, store):
        self.token.assign(store["all"][:4])
        self.seen.assign(store["all"][4])


@registered
class SubGraph(WithConfig, keras.Model):
    """A functional model that has weights which its graph does not use."""

    def __init__(self, **options):
        super().__init__(*graph(), **options)
        add_weights(self)


@registered
class SubGraphCall(SubGraph):
    def call(self, x, training=None, mask=None):
        return super().call(x * self.token, training=training)


@registered
class SubList(WithConfig, keras.Sequential):
    def __init__(self, name=None):
        super().__init__(items(), name=name)
        add_weights(self)


@registered
class SubListCall(SubList):
    def call(self, x, training=None, mask=None):
        return super().call(x * self.token, training=training)


KINDS = {
    "list": items,
    "sequential": lambda: keras.Sequential(items()),
    "unbuilt sequential": lambda: keras.Sequential(items()[1:]),
    "functional": lambda: keras.Model(*graph()),
    "own": Own,
    "subclass of own": SubOwn,
    "subclass of functional": SubGraph,
    "subclass of functional, call": SubGraphCall,
    "subclass of sequential": SubList,
    "subclass of sequential, call": SubListCall,
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def pipeline_of(made, k=2, m=2, cls=tfgpipe.GPipe, **options):
    model = cls(made, k, m, **options)
    model.build((None, 4))
    return model


def plain_of(kind):
    made = KINDS[kind]()
    plain = keras.Sequential(made) if kind == "list" else made
    if not plain.built or not isinstance(plain, keras.Sequential):
        plain(np.ones((1, 4), "float32"))
    return plain


def data(rows=8):
    x = np.linspace(-1, 1, rows * 4, dtype="float32").reshape(rows, 4)
    return x, x[:, :2] ** 2


def compiled(model, **options):
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
    return model


def draw(model, seed):
    """Gives all weights other values."""
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        variable.assign(rng.uniform(0.5, 1.5, variable.shape))
    return model


def assert_equal_weights(model, other):
    found, expected = model.get_weights(), other.get_weights()
    assert len(found) == len(expected)
    assert all(map(np.array_equal, found, expected))


# ------------------------------------------------------------ what Keras reads
# What a `GPipe` answers for itself: what its training and its call are.
OF_ITS_OWN = {
    "build",
    "call_signature_parameters",
    "compiled_metrics",
    "input",
    "input_spec",  # what is called checks, and what a step gets is checked
    "name",
    "output",
    "quantize",
    "supports_jit",  # False: XLA compiles cells, and no step
}


def read_by_keras():
    """The names of all properties and attributes of any model."""
    plain = keras.Model()
    names = {*vars(plain)} | {
        name
        for name in dir(keras.Model)
        if isinstance(getattr(keras.Model, name, None), property)
    }
    return {name for name in names if not name.startswith("_")} - OF_ITS_OWN


def is_same(value, other):
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(is_same, value, other))
    return value is other or bool(value == other)


def assert_same_face(model, plain, but=()):
    missing = object()
    differ = [
        name
        for name in sorted(read_by_keras() - {*but})
        if not is_same(
            getattr(model, name, missing), getattr(plain, name, missing)
        )
    ]
    assert not differ


@each_kind
def test_keras_reads_of_a_pipeline_what_it_reads_of_the_model(kind):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        made = KINDS[kind]()
        plain = keras.Sequential(made) if kind == "list" else made
        if kind == "list":  # which has no policy, but that of its `GPipe`
            model = pipeline_of(made)
    finally:
        keras.config.set_dtype_policy("float32")
    if kind != "list":
        model = pipeline_of(made)
    assert model.compute_dtype == "float16"
    if kind == "list":
        assert_same_face(model, plain, but={"path"})
        return
    if kind == "unbuilt sequential":
        plain(np.ones((1, 4)))
    assert model.model is plain
    assert_same_face(model, plain)
    paths = [v.path for v in plain.variables]
    assert [v.path for v in model.variables] == paths
    assert hasattr(model, "output_names") == hasattr(plain, "output_names")
    plain.trainable = False
    assert_same_face(model, plain)
    assert not model.trainable_variables
    model.trainable = True
    assert_same_face(model, plain)
    model.dtype_policy = "mixed_bfloat16"
    model.supports_masking = True
    assert plain.compute_dtype == "bfloat16"
    assert_same_face(model, plain)


def test_model_that_is_not_trained_stays_so_in_a_pipeline():
    model = keras.Model(*graph())
    model.trainable = False
    model.layers[1].trainable = True
    assert not pipeline_of(model).trainable_variables
    other = keras.Model(*graph())
    assert not pipeline_of(other, trainable=False).trainable_variables
    assert not other.layers[1].trainable


def test_names_of_variables_are_those_of_the_model():
    own = pipeline_of(Own(name="own"))
    assert all(v.path.startswith("own/") for v in own.weights)
    listed = pipeline_of(keras.Sequential(items()[1:], name="some"))
    assert all(v.path.startswith("some/") for v in listed.weights)


def test_structure_for_a_quantizer_is_the_model_s():
    class Structured(Own):
        def get_quantization_layer_structure(self, mode=None):
            return {"mode": mode}

    model = pipeline_of(Structured())
    assert model.get_quantization_layer_structure("gptq") == {"mode": "gptq"}
    listed = pipeline_of(items())
    assert listed.get_quantization_layer_structure("gptq") is None


def test_layers_that_xla_does_not_take_are_not_compiled():
    class Interpreted(kl.Dense):
        def __init__(self, units):
            super().__init__(units)
            self.supports_jit = False

    model = pipeline_of([keras.Input((4,)), Interpreted(2), kl.Dense(2)])
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        compiled(model, jit_compile=True)
    model.fit(*data(), verbose=0)
    assert not model._jit_cells


# ----------------------------------------------------------------- loss scales
# As Keras warns of a layer that is held and not called.
unbuilt = pytest.mark.filterwarnings("ignore:`build\\(\\)` was called on layer")


class Spare(keras.Model):
    """Has a layer that nothing calls yet."""

    def __init__(self, **options):
        super().__init__(**options)
        policy = self.dtype_policy
        self.first, self.last = kl.Dense(4, dtype=policy), kl.Dense(2)
        self.later = kl.Dense(3)

    def call(self, x):
        return self.last(self.first(x))


def own_loss(y, y_pred):
    """Of the whole mini-batch: it does not add up over rows."""
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y - y_pred)))


def scaled(inner, scale=2.0**10):
    return keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=scale, dynamic_growth_steps=2
    )


def trained(model, optimizer, loss, steps=6):
    keras.utils.set_random_seed(1)
    model.compile(optimizer, loss)
    losses = model.fit(
        *data(), batch_size=4, epochs=steps, shuffle=False, verbose=0
    ).history["loss"]
    return losses, model.get_weights(), model.optimizer


OPTIMIZERS = {
    "sgd": lambda: scaled(keras.optimizers.SGD(0.1, momentum=0.9)),
    "adam": lambda: scaled(keras.optimizers.Adam(0.1)),
    "overflow": lambda: scaled(keras.optimizers.SGD(0.1), scale=2.0**126),
}


@unbuilt
@pytest.mark.parametrize(
    ("name", "loss", "m"),
    [
        ("sgd", "mse", 1),
        ("sgd", own_loss, 2),
        ("adam", own_loss, 1),
        ("adam", "mse", 2),
        ("overflow", "mse", 1),
        ("overflow", own_loss, 2),
    ],
)
def test_loss_scale_moves_where_a_layer_is_never_called(name, loss, m):
    def run(pipelined):
        keras.utils.set_random_seed(3)
        model = Spare()
        if pipelined:
            model = tfgpipe.GPipe(model, 2, m)
        return trained(model, OPTIMIZERS[name](), loss)

    (losses, found, optimizer), (expected_losses, expected, other) = (
        run(True),
        run(False),
    )
    assert float(other.dynamic_scale) != other.initial_scale
    assert float(optimizer.dynamic_scale) == float(other.dynamic_scale)
    assert int(optimizer.iterations) == int(other.iterations)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-5)
    for own, weight in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, weight, rtol=2e-4, atol=1e-5)


# ------------------------------------------------------------------------ files
def datasets(path):
    """All values of a file, by their names."""
    found = {}

    def note(name, value):
        if isinstance(value, h5py.Dataset):
            found[name] = value[()]

    with h5py.File(path) as file:
        file.visititems(note)
    return found


@each_kind
def test_files_of_a_pipeline_are_those_of_its_model(tmp_path, kind):
    plain = draw(plain_of(kind), 1)
    model = draw(pipeline_of(KINDS[kind]()), 2)
    for one in (plain, model):
        compiled(one).optimizer.build(one.trainable_variables)
    of_plain, of_model = tmp_path / "p.weights.h5", tmp_path / "g.weights.h5"
    plain.save_weights(of_plain)
    model.save_weights(of_model)
    assert datasets(of_plain).keys() == datasets(of_model).keys()
    before = model.get_weights()
    model.load_weights(of_plain)
    assert_equal_weights(model, plain)
    plain.load_weights(of_model)
    assert all(map(np.array_equal, plain.get_weights(), before))
    # As several files, too.
    folder = tmp_path / "parts"
    folder.mkdir()
    model.save_weights(folder / "m.weights.json", max_shard_size=1)
    draw(model, 3).load_weights(folder / "m.weights.json")
    draw(plain, 4).load_weights(folder / "m.weights.json")
    assert_equal_weights(model, plain)


@each_kind
def test_model_file_has_all_weights(tmp_path, kind):
    k = 1 + len(kind) % 2
    model = draw(pipeline_of(KINDS[kind]()), 1)
    compiled(model).optimizer.build(model.trainable_variables)
    for i, slot in enumerate(model.optimizer.variables[2:]):
        slot.assign(np.full(slot.shape, i + 1.0))
    model.save(tmp_path / "m.keras")
    loaded = tfgpipe.load_model(tmp_path / "m.keras", num_partitions=k)
    assert loaded.num_partitions == k
    assert_equal_weights(loaded, model)
    for own, slot in zip(
        loaded.optimizer.variables, model.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(own.numpy(), slot.numpy())
    copy = draw(keras.models.clone_model(model), 5)
    assert len(copy.get_weights()) == len(model.get_weights())
    x = data()[0]
    copy.set_weights(model.get_weights())
    np.testing.assert_array_equal(
        copy.predict(x, verbose=0), loaded.predict(x, verbose=0)
    )


@pytest.mark.parametrize("kind", ["own", "functional", "list"])
def test_weights_of_a_pipeline_s_own_are_beside_the_model_s(tmp_path, kind):
    class Scaled(tfgpipe.GPipe):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.scale = self.add_weight(name="scale")
            self.aside = kl.Dense(1)
            self.aside.build((None, 2))

    model = draw(pipeline_of(KINDS[kind](), cls=Scaled), 1)
    path = tmp_path / "m.weights.h5"
    model.save_weights(path)
    other = draw(pipeline_of(KINDS[kind](), cls=Scaled), 2)
    other.load_weights(path)
    assert_equal_weights(other, model)
    assert float(other.scale) == float(model.scale)


def test_assets_of_a_model_are_in_its_files(tmp_path):
    @registered
    class WithWords(Own):
        words = ()

        def save_assets(self, store):
            with open(f"{store}/words.txt", "w") as file:
                file.write(" ".join(self.words))

        def load_assets(self, store):
            with open(f"{store}/words.txt") as file:
                self.words = tuple(file.read().split())

    model = pipeline_of(WithWords())
    model.user_model.words = ("some", "words")
    model.save(tmp_path / "m.keras")
    loaded = tfgpipe.load_model(tmp_path / "m.keras")
    assert loaded.user_model.words == ("some", "words")
    assert not hasattr(pipeline_of(items()), "save_assets")
