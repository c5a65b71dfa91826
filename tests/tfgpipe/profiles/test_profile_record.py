"""What a profile says, by hand."""

import math
import pathlib

import pytest
from fabricated_profile import layer, profile, tasks

import tfgpipe


def test_seconds_are_on_a_line_without_the_cost_of_a_call():
    found = profile(layer("a", tasks(2, 3.0), tasks(6, 7.0)), call_seconds=1.0)
    seconds = [found.seconds(0, "forward", rows) for rows in (2, 4, 6, 10)]
    assert seconds == [2, 4, 6, 10]
    assert found.seconds(0, "recompute", 4) == 0.0


def test_seconds_of_three_sizes_are_on_the_lines_between_neighbours():
    found = profile(layer("a", tasks(1, 1.0), tasks(2, 4.0), tasks(4, 6.0)))
    seconds = [found.seconds(0, "forward", rows) for rows in (1.5, 3, 6)]
    assert seconds == [2.5, 5, 8]


def test_fewer_rows_than_were_measured_take_no_less():
    found = profile(layer("a", tasks(2, 3.0), tasks(6, 7.0)), call_seconds=1.0)
    assert found.seconds(0, "forward", 1) == found.seconds(0, "forward", 2) == 2
    assert profile(layer("a", tasks(4, 3.0))).seconds(0, "forward", 2) == 3


def test_halves_of_a_whole_are_all_in_the_second():
    whole = layer("a", tasks(1, 1.0, 1.0, 1.0, 5.0))
    split = layer("b", tasks(1, 1.0, 1.0, 1.0, 5.0, (2.0, 4.0)))
    found = profile(whole, split)
    kinds = ("backward", "input_gradient", "weight_gradient")
    assert [found.seconds(0, kind, 1) for kind in kinds] == [5, 0, 5]
    assert [found.seconds(1, kind, 1) for kind in kinds] == [5, 2, 4]


def test_cell_takes_its_layers_and_one_call():
    layers = [
        layer(name, tasks(1, 2.0, 3.0, 1.5, 5.0)) for name in ("a", "b", "c")
    ]
    loss = layer("loss", tasks(1, 1.5, 1.5, 1.25, 1.25), weights=0)
    found = profile(*layers, loss=loss, call_seconds=1.0)
    assert found.task_seconds(0, 2, "forward", 1) == 1 + 1 + 1
    # The last layer of a cell computes no outputs again: here 0.5 for 2.
    assert found.task_seconds(0, 2, "recompute", 1) == 1 + 2 + 0.5
    # Of the last cell that is the loss.
    assert found.task_seconds(1, 3, "forward", 1) == 1 + 1 + 1 + 0.5
    assert found.task_seconds(1, 3, "recompute", 1) == 1 + 2 + 2 + 0.25
    assert found.task_seconds(1, 3, "backward", 1) == 1 + 4 + 4 + 0.25


def test_costs_are_the_seconds_of_all_tasks():
    found = profile(
        layer("a", tasks(1, 2.0, 3.0, 1.5, 5.0), tasks(2, 3.0, 4.0, 2.5, 6.0)),
        layer("b", tasks(1, 2.0), tasks(2, 2.0)),
        loss=layer("loss", tasks(1, 1.0), tasks(2, 1.0)),
    )
    assert found.rows == (1, 2)
    assert found.costs() == [3 + 4 + 6, 3]
    assert found.costs(1) == [2 + 3 + 5, 3]


def test_bytes_are_those_held_while_training():
    found = profile(layer("a", tasks(2, 1.0)), layer("b", tasks(2, 1.0)))
    assert found.bytes() == [8 + 16 + 8 + 40] * 2
    assert found.bytes(4) == [8 + 16 + 8 + 80] * 2


def test_file_holds_the_same(tmp_path):
    found = profile(
        layer("a", tasks(1, 1 / 3, 1.0, None, math.pi, (1.0, 2.0))),
        loss=layer("loss", tasks(1, 0.1)),
        call_seconds=1e-6,
    )
    found.save(tmp_path / "own.json")
    assert type(found).load(str(tmp_path / "own.json")) == found
    assert [path.name for path in tmp_path.iterdir()] == ["own.json"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"format": "another"}', 'no "format"'),
        ('{"format": "tfgpipe.profile 2"}', "KeyError"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, text, reason):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"other.json.*{reason}"):
        tfgpipe.Profile.load(path)


def test_files_written_before_are_read():
    """Their format stays: another one would be refused."""
    path = pathlib.Path(__file__).with_name("profile_2.json")
    found = tfgpipe.Profile.load(path)
    assert [layer.name for layer in found.layers] == ["a"]
    seconds = found.seconds(0, "forward", 1)
    assert seconds == pytest.approx(1 / 3 + 0.1 - 2e-6)


def test_table_has_a_line_for_every_layer_and_size():
    found = profile(
        layer("a", tasks(2, 2e-6), tasks(8, 3.14e-3, 1.0, 1.0, 12.0)),
        loss=layer("loss", tasks(2, 5e-4), tasks(8, 5e-4), weights=0),
        call_seconds=1.5e-5,
    )
    titles, first, second, *others, last = str(found).splitlines()
    assert titles.split()[:5] == "layer rows forward recompute backward".split()
    assert (
        titles.split()[5:] == "+- outputs kept weights slots gradients".split()
    )
    held = ["10%", *"20 B 40 B 8 B 16 B 8 B".split()]
    assert first.split() == ["a", "2", "0.002", "ms", "-", "-", *held]
    assert "3.140 ms  1,000.000 ms  12,000.000 ms" in second
    assert [line.split()[0] for line in others] == ["loss", "loss"]
    assert last == (
        "On /device:CPU:0; slots of Adam; a call takes 0.015 ms of each."
    )
