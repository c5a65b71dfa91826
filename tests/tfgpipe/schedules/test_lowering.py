"""Which micro-batches a program computes again."""

import pytest

from tfgpipe.schedules.lowering import REMAT, Remat
from tfgpipe.schedules.schedule import Schedule


@pytest.mark.parametrize(
    ("rule", "recomputes", "keeps_first", "keeps_others"),
    [
        ("always", True, False, False),
        ("except_last", True, True, False),
        ("never", False, True, True),
    ],
)
def test_rule_says_what_is_kept(rule, recomputes, keeps_first, keeps_others):
    assert rule in REMAT
    remat = Remat([rule])
    assert remat.recomputes(0) == recomputes
    assert remat.keeps(0, goes_back_first=True) == keeps_first
    assert remat.keeps(0, goes_back_first=False) == keeps_others


def test_one_rule_is_that_of_every_group_of_every_cell():
    assert Remat.of("never", 2, 3).rules == ["never"] * 6


def test_cells_without_a_rule_have_the_default():
    remat = Remat.of({1: "never"}, 3, 2)
    assert (
        remat.rules == ["except_last"] * 2 + ["never"] * 2 + ["except_last"] * 2
    )
    assert [remat.recomputes(k) for k in range(6)] == [
        *(True, True, False, False, True, True)
    ]


def test_cells_that_a_schedule_recomputes_are_known():
    remat = Remat.of("never", 2, 2, written={1})
    assert [remat.recomputes(k) for k in range(4)] == [False] * 2 + [True] * 2
    assert Schedule("F0 R0 B0\nF0 B0").recomputing() == {0}
    assert Schedule("F0 B0\nF0+ B0").recomputing() == {0}
    assert Schedule("F0 B0\nF0 B0").recomputing() == set()
