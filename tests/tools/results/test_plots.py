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
