"""Which micro-batches a program computes again; and a head at once."""

import pytest

from tfgpipe.schedules.lowering import CellFacts, Remat, lower
from tfgpipe.schedules.schedule import Schedule


def test_cells_without_a_rule_have_the_default():
    remat = Remat.by_group({1: "never"}, [2] * 3)
    assert (
        remat.rules == ["except_last"] * 2 + ["never"] * 2 + ["except_last"] * 2
    )
    assert [remat.recomputes(k) for k in range(6)] == [
        *(True, True, False, False, True, True)
    ]


def test_cells_that_a_schedule_recomputes_are_known():
    remat = Remat.by_group("never", [2, 2], written={1})
    assert [remat.recomputes(k) for k in range(4)] == [False] * 2 + [True] * 2
    assert Schedule("F0 R0 B0\nF0 B0").recomputing() == {0}
    assert Schedule("F0 B0\nF0+ B0").recomputing() == {0}
    assert Schedule("F0 B0\nF0 B0").recomputing() == set()


@pytest.mark.parametrize(
    ("written", "head"),
    [
        ("F0 F1 B1 B0\nF0 F1 B1 B0", "F1.0 F1.1 H2.1 R1.1 B1.1 H2.0 R1.0 B1.0"),
        ("F0 B0\nF0 I0 W0", "F1.0 H2.0 R1.0 I1.0 W1.0"),
        ("F0\nF0", "F1.0 F2.0"),
    ],
)
def test_a_head_goes_forward_and_back_at_once(written, head):
    """It is the second group of the last cell, and nothing of it is kept."""
    schedule = Schedule(written)
    trains = schedule.is_training
    facts = [
        CellFacts(has_backward=trains, needs_dx=k > 0, is_head=k == 2)
        for k in range(3)
    ]
    facts[2] = facts[2]._replace(has_halves=False, recomputes=False)
    remat = Remat.by_group("always", [1, 2], has_head=True)
    program = lower(
        lambda _: schedule, facts, remat, [schedule.num_micro_batches]
    )
    own = [op for op in program.ops if op.device == 1]
    letters = {"head": "H", "input_gradient": "I", "weight_gradient": "W"}
    words = [
        f"{letters.get(op.kind, op.kind[0].upper())}{op.cell}.{op.micro_batch}"
        for op in own
    ]
    assert " ".join(words) == head
    assert not any(op.keeps for op in own)
    assert program.is_forward_first


def test_a_head_that_is_a_whole_cell_waits_for_the_cell_before():
    schedule = Schedule("F0 B0\nF0 B0")
    head = CellFacts(has_halves=False, recomputes=False, is_head=True)
    facts = [CellFacts(needs_dx=False), head]
    program = lower(lambda _: schedule, facts, Remat(["never"] * 2), [1])
    times = dict(
        zip((op.kind for op in program.ops), program.simulate(lambda op: 1))
    )
    assert times == {"forward": (0, 1), "head": (1, 2), "backward": (2, 3)}
    assert program.held() == [1, 0]


def test_a_schedule_has_no_heads():
    with pytest.raises(ValueError, match="must be of the kinds"):
        Schedule([[("forward", 0, 0), ("head", 0, 0)]])
    with pytest.raises(ValueError, match="one of the letters F, R, B, I, W"):
        Schedule("F0 H0")
