"""Sizes without weights are those of the weights, the cells, the slots."""

import dataclasses

import keras
import numpy as np
import pytest
import texts

import params
import tfgpipe
from params.image import AmoebaNetD
from params.lm import TransformerLM
from params.mt import Translation
from params.random_data import RandomImages, RandomPairs, RandomTokens
from tfgpipe.saving import spec_config
from tools.sizes import model_size
from tools.sizes.model_size import device_sizes, layer_sizes, num_parameters

SMALL = {
    "image": dataclasses.replace(
        params.get("image.amoebanet_d_18_544"),
        model=AmoebaNetD(3, 16, 5),
        data=RandomImages(32, 5),
        batch_size=8,
        num_micro_batches=2,
        num_partitions=3,
    ),
    "lm": dataclasses.replace(
        params.get("lm.transformer_103"),
        model=TransformerLM(3, 16, 32, 2, vocab_size=50, max_length=8),
        data=RandomTokens(8, 50),
        batch_size=8,
        num_micro_batches=2,
        num_partitions=2,
    ),
    "mt": dataclasses.replace(
        params.get("mt.t_6_8192_16"),
        model=Translation(2, 16, 32, 2, vocab_size=50, head_dim=8),
        data=RandomPairs(8, 50),
        batch_size=64,
        num_micro_batches=2,
        num_partitions=2,
    ),
}


@pytest.fixture(
    params=[
        pytest.param("image", marks=pytest.mark.slow),  # many operations
        "lm",
        pytest.param("mt", marks=pytest.mark.slow),
    ]
)
def small(request):
    return SMALL[request.param]


def built(experiment):
    model = tfgpipe.GPipe(
        experiment.model.layers(),
        num_partitions=experiment.num_partitions,
        num_micro_batches=experiment.num_micro_batches,
    )
    spec = experiment.data.source().input_spec
    model.build_from_config(spec_config(spec))
    return model


def test_cells_are_those_of_the_pipeline(small):
    model = built(small)
    found = device_sizes(small)
    assert [(c.layers, c.num_values) for c in found] == [
        ((c.layers,), c.num_params) for c in model.cells()
    ]
    np.testing.assert_allclose(
        [cell.flops for cell in found], [cell.cost for cell in model.cells()]
    )
    optimizer = small.optimizer.make(10)
    optimizer.build(model.trainable_variables)
    slots = [v for v in optimizer.variables if len(v.shape)]
    assert sum(cell.slot_bytes for cell in found) == sum(
        4 * np.prod(v.shape) for v in slots
    )
    trainable = sum(np.prod(v.shape) for v in model.trainable_variables)
    assert num_parameters(small) == trainable
    assert sum(cell.gradient_bytes for cell in found) == 4 * trainable


def test_nothing_is_left_to_be_allocated(small):
    from keras.src.backend.common import global_state

    device_sizes(small)
    assert not global_state.get_global_attribute("uninitialized_variables")


def test_never_holds_what_its_schedule_holds():
    never = dataclasses.replace(SMALL["lm"], remat="never")
    kept = [size.kept_bytes for size in layer_sizes(never)]
    cells = {
        schedule: device_sizes(dataclasses.replace(never, schedule=schedule))
        for schedule in ("gpipe", "1f1b")
    }
    first = len(cells["gpipe"][0].layers[0])
    assert cells["gpipe"][0].activation_bytes == 2 * sum(kept[:first])
    last, other = (cells[name][-1] for name in ("gpipe", "1f1b"))
    assert last.activation_bytes - other.activation_bytes == sum(kept[first:])


def test_recomputing_holds_inputs_and_one_micro_batch():
    (cell,) = device_sizes(dataclasses.replace(SMALL["lm"], num_partitions=1))
    sizes = layer_sizes(SMALL["lm"])
    ids = 2 * 4 * 4 * 8  # both micro-batches of 4 rows of 8 tokens
    logits = 4 * 4 * 8 * 50
    kept = sum(size.kept_bytes for size in sizes)
    assert cell.activation_bytes == ids + kept + 2 * logits


def test_zero_bubble_keeps_what_waits_for_its_weight_gradient():
    """Device k has the activations of k + 1 micro-batches."""
    changed = {"num_micro_batches": 4, "remat": "always"}
    one = dataclasses.replace(SMALL["lm"], **changed, schedule="1f1b")
    two = dataclasses.replace(one, schedule="zero_bubble")
    sizes = layer_sizes(one)
    first, last = (device.layers[0] for device in device_sizes(two))
    kept = sum(size.kept_bytes for size in sizes[len(first) :])
    inputs = sizes[len(first)].input_bytes
    before, after = (
        [size.activation_bytes for size in device_sizes(experiment)]
        for experiment in (one, two)
    )
    assert len(last) == len(sizes) - len(first)
    # And as many inputs as device 0, instead of one.
    assert after == [before[0], before[1] + kept + inputs]


@pytest.mark.parametrize("remat", ["never", "except_last"])
def test_cells_of_an_interleaved_device_add_up(remat):
    base = dataclasses.replace(SMALL["lm"], num_partitions=4, remat=remat)
    apart = device_sizes(base)
    interleaved = dataclasses.replace(base, schedule="interleaved")
    found = device_sizes(interleaved, num_devices=2)
    assert [device.cells for device in found] == [(0, 2), (1, 3)]
    for device in found:
        own = [apart[cell] for cell in device.cells]
        assert device.layers == tuple(cell.layers[0] for cell in own)
        for field in ("num_values", "weight_bytes", "slot_bytes"):
            both = sum(getattr(cell, field) for cell in own)
            assert getattr(device, field) == both
        most = sum(cell.activation_bytes for cell in own)
        # With M = D = 2, all micro-batches are held by the first device.
        assert device.activation_bytes <= most
    if remat == "never":
        assert found[0].activation_bytes == sum(
            apart[cell].activation_bytes for cell in (0, 2)
        )
    with pytest.raises(ValueError, match="num_partitions=4 and 3 devices"):
        device_sizes(interleaved, num_devices=3)


def test_replicas_share_rows_and_slots():
    one = SMALL["lm"]
    half = dataclasses.replace(one, batch_size=one.batch_size // 2)
    expected, found = device_sizes(half), device_sizes(one, num_replicas=2)
    assert [d.activation_bytes for d in found] == [
        d.activation_bytes for d in expected
    ]
    assert [d.weight_bytes for d in found] == [d.weight_bytes for d in expected]
    assert [d.slot_bytes for d in found] == [
        d.slot_bytes // 2 for d in expected
    ]


class Reader(keras.layers.Layer):
    """Uses the weights of another layer."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def call(self, x):
        return x @ self.other.kernel


@dataclasses.dataclass(frozen=True)
class Tied:
    def layers(self):
        first, shared, equal = (
            keras.layers.Dense(16, use_bias=False) for _ in range(3)
        )
        readers = Reader(shared), Reader(shared)
        twice = [shared, shared, equal, *readers, equal]
        return [keras.layers.Flatten(), first, *twice]


def test_tied_weights_count_once():
    experiment = dataclasses.replace(
        SMALL["image"], model=Tied(), data=RandomImages(4, 16), num_partitions=1
    )
    expected = sum(np.prod(v.shape) for v in built(experiment).weights)
    assert expected == 4 * 4 * 3 * 16 + 2 * 16 * 16
    assert num_parameters(experiment) == expected
    (device,) = device_sizes(experiment)
    assert device.num_params == device.num_values == expected
    assert device.weight_bytes == device.gradient_bytes == 4 * expected


def test_more_micro_batches_hold_less(small):
    small = dataclasses.replace(small, num_partitions=1)
    few, many = (
        device_sizes(dataclasses.replace(small, num_micro_batches=m))[0]
        for m in (1, 4)
    )
    assert many.activation_bytes < few.activation_bytes / 2
    assert many.weight_bytes == few.weight_bytes


def test_pairs_are_measured_at_their_widest(monkeypatch, tmp_path):
    texts.use(monkeypatch, tmp_path)
    experiment = params.get("mt.t_6_8192_16_small")
    sizes = layer_sizes(experiment)
    m = experiment.num_micro_batches
    rows = experiment.batch_size // 64 // m
    assert sizes[0].input_bytes == 2 * 4 * rows * 64


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lm.transformer_3", 282.2e6),
        ("lm.transformer_13", 785.8e6),
        ("lm.transformer_103", 5.3e9),
        ("mt.t_64_16384_32", 6e9),
        ("image.amoebanet_d_18_544", 542.7e6),
    ],
)
def test_full_size_models_have_the_parameters_of_the_paper(name, expected):
    count = num_parameters(params.get(name))
    assert count == pytest.approx(expected, rel=0.06)


def test_deep_and_wide_translation_models_are_equally_large():
    deep, wide = (
        num_parameters(params.get(f"mt.multilingual_{shape}"))
        for shape in ("deep", "wide")
    )
    assert wide == pytest.approx(deep, rel=0.01)


@pytest.mark.slow
def test_largest_model_is_measured_without_allocating_it():
    cells = device_sizes(params.get("lm.transformer_1663"))
    assert len(cells) == 128
    total = sum(cell.num_values for cell in cells)
    assert total == pytest.approx(83.9e9, rel=1e-3)
    held = [cell.weight_bytes + cell.slot_bytes for cell in cells]
    assert sum(held) == 12 * total


def test_more_cells_than_layers_are_an_error():
    many = dataclasses.replace(SMALL["lm"], num_partitions=99)
    with pytest.raises(ValueError, match="at most the number of layers, 5"):
        device_sizes(many)


def test_layers_whose_settings_are_unknown_are_measured_each():
    class Odd(keras.layers.Layer):
        def get_config(self):
            raise NotImplementedError

    keys = {model_size._key(Odd(), keras.KerasTensor((2,))) for _ in range(2)}
    assert len(keys) == 2
