"""Pictures of the results."""

import pytest

from tools.results import plots
from tools.results.outcome import Picture, Series

PICTURES = {
    "lines": Picture(
        "Two models",
        "step",
        "perplexity",
        [Series("one", [1, 2, 3], [9.0, 4.0, 2.0]), Series("two", [1], [3.0])],
        levels={"baseline": 5.0},
        is_log=True,
    ),
    "groups": Picture(
        "Groups",
        "pairs",
        "chrF",
        [Series("one", ["few", "many"], [9.0, 40.0])],
    ),
    "dots": Picture(
        "Runs",
        "",
        "accuracy",
        dots=[Series("a", [], [0.5, 0.7]), Series("b", [], [0.6])],
        is_percent=True,
    ),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_picture_is_the_same_for_the_same_numbers(kind, tmp_path):
    paths = [tmp_path / name for name in ("one.png", "two.png")]
    for path in paths:
        plots.save(PICTURES[kind], " (tried)", path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_lines_differ_by_more_than_their_colour():
    axes = plots.figure(PICTURES["lines"]).axes[0]
    one, two, level = axes.get_lines()
    looks = {
        (line.get_color(), line.get_linestyle()) for line in (one, two, level)
    }
    assert len(looks) == 3
    assert one.get_marker() != two.get_marker()
    assert list(one.get_ydata()) == [9.0, 4.0, 2.0]
    assert axes.get_yscale() == "log"


def test_means_of_dots_are_written():
    axes = plots.figure(PICTURES["dots"]).axes[0]
    assert [text.get_text() for text in axes.texts] == [
        "mean 60.0%",
        "mean 60.0%",
    ]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]


def test_styles_are_all_different():
    for number in range(3):
        assert len({style[0] for style in plots._STYLES}) == 7
        assert len({style[number] for style in plots._STYLES}) > 3
