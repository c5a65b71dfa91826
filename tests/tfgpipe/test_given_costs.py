"""The argument `costs` of `GPipe`."""

import keras
import own_call
import pytest
from fabricated_profile import layer, profile, tasks
from keras import layers as kl

import tfgpipe
from tfgpipe.costs import Placed
from tfgpipe.sequence import source_of


def dense(*units):
    return [keras.Input((4,)), *(kl.Dense(n) for n in units)]


def profile_of(layers, *seconds):
    """One in which they take these seconds forward."""
    keys = Placed(source_of(layers), keras.KerasTensor((None, 4))).keys
    return profile(
        *(
            layer(one.name, tasks(2, s), key=key)
            for one, s, key in zip(layers[1:], seconds, keys, strict=True)
        )
    )


def cut(model):
    return [len(cell.layers) for cell in model.cells()]


def test_layers_are_cut_by_the_costs_in_the_list():
    model = tfgpipe.GPipe(dense(4, 4, 4, 4), 2, costs=[9, 1, 1, 1])
    assert cut(model) == [1, 3]
    assert [cell.cost for cell in model.cells()] == [9, 3]
    assert model.cells()[0].unit == ""


def test_layers_are_cut_by_measured_seconds():
    measured = dense(4, 4, 4, 4)
    tfgpipe.GPipe(measured, 1)  # builds them
    found = profile_of(measured, 1, 1, 1, 5)
    model = tfgpipe.GPipe(dense(4, 4, 4, 4), 2, costs=found)
    assert cut(model) == [3, 1]
    assert [(cell.cost, cell.unit) for cell in model.cells()] == [
        (3.0, "s"),
        (5.0, "s"),
    ]


def test_bytes_by_hand():
    layers = [keras.Input((4,)), kl.Dense(3, "relu"), kl.ReLU(), kl.Dense(2)]
    model = tfgpipe.GPipe(layers, 3, costs="bytes")
    # Weights, gradient and two slots; inputs and outputs of a row are kept.
    first, second, third = (cell.cost for cell in model.cells())
    assert first == 4 * 4 * (4 * 3 + 3) + 4 * 4 + 4 * 3
    assert second == 4 * 3
    assert third == 4 * 4 * (3 * 2 + 2)
    assert {cell.unit for cell in model.cells()} == {"bytes"}


def test_bytes_of_a_model_with_a_call_of_its_own_are_those_of_its_graph():
    own, graph = (
        tfgpipe.GPipe(model, 4, costs="bytes")
        for model in (own_call.Residual(), own_call.functional())
    )
    own.build((None, 4))
    found = [cell.cost for cell in own.cells()]
    assert found == [cell.cost for cell in graph.cells()]
    assert {cell.unit for cell in own.cells()} == {"bytes"}


def test_costs_of_a_model_with_a_call_of_its_own_are_counted_when_it_has_run():
    model = tfgpipe.GPipe(own_call.Residual(), 2, costs=[1, 1, 1, 9])
    model.build((None, 4))
    assert cut(model) == [3, 1]
    model = tfgpipe.GPipe(own_call.Residual(), 2, costs=[1, 9])
    with pytest.raises(ValueError, match=r"4 in all.*costs=\[1, 9\]"):
        model.build((None, 4))


def test_bytes_need_known_sizes():
    layers = [keras.Input((None, 4)), kl.Dense(3, name="own")]
    with pytest.raises(ValueError, match=r"known sizes.*\(None, None, 4\)"):
        tfgpipe.GPipe(layers, 1, costs="bytes")


def test_table_shows_the_unit(capsys):
    tfgpipe.GPipe(dense(4, 2), 1, costs="bytes").summary()
    assert "cost (bytes)" in capsys.readouterr().out


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("kind", ["bytes", "profile", "list", "flops"])
def test_costs_survive_a_copy(kind, is_built):
    layers = dense(4, 4, 2)
    tfgpipe.GPipe(layers, 1)
    costs = {
        "profile": profile_of(layers, 1, 2, 3),
        "list": [3, 2, 1],
    }.get(kind, kind)
    own = dense(4, 4, 2)[0 if is_built else 1 :]
    model = tfgpipe.GPipe(own, 2, costs=costs)
    copy = tfgpipe.GPipe.from_config(model.get_config())
    for one in (model, copy):
        one.build((None, 4))
    assert copy.cells() == model.cells()


def test_costs_survive_a_file(tmp_path):
    model = tfgpipe.GPipe(dense(4, 4, 2), 2, costs="bytes")
    model.save(tmp_path / "own.keras")
    loaded = tfgpipe.load_model(tmp_path / "own.keras", num_partitions=3)
    assert {cell.unit for cell in loaded.cells()} == {"bytes"}
    total = sum(cell.cost for cell in loaded.cells())
    assert total == sum(cell.cost for cell in model.cells())


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ("seconds", r"`costs` must be one of \['flops', 'bytes'\].*'seconds'"),
        (None, "costs=None"),
        ([1, 2], r"3 in all.*costs=\[1, 2\], of 2 num"),
        ([1, 2, -1], r"finite numbers from 0.*costs=\[1, 2, -1\]"),
        ([1, 2, "3"], "finite numbers from 0"),
        (
            profile(layer("a", tasks(1, 1.0))),
            "3 in all.*a profile, of 1 numbers",
        ),
    ],
)
def test_bad_costs_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        tfgpipe.GPipe(dense(4, 4, 4), 1, costs=costs)


def test_profile_of_other_layers_is_refused():
    measured = dense(4, 4, 5)
    tfgpipe.GPipe(measured, 1)
    with pytest.raises(ValueError, match=r"layer 2, .*computation"):
        tfgpipe.GPipe(dense(4, 4, 4), 1, costs=profile_of(measured, 1, 1, 1))


def test_costs_beside_pairs_are_refused():
    layers = [keras.Input((4,)), (kl.Dense(3), 2), kl.Dense(2)]
    with pytest.raises(ValueError, match="`costs` beside 1 pairs"):
        tfgpipe.GPipe(layers, 1, costs=[1, 2])
