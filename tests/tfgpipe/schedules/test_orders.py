import math

import pytest
from ideal import IDEALS

from tfgpipe.schedules.lowering import CellFacts
from tfgpipe.schedules.orders import CHUNKS, SCHEDULES

SIZES = [(k, m) for k in range(1, 9) for m in (*range(1, 10), 16, 25)]
SHAPES = [
    (name, chunks)
    for name, own in CHUNKS.items()
    for chunks in ((own,) if own else range(1, 5))
]
V_SHAPED = [name for name, own in CHUNKS.items() if own == 2]


def durations(forward, backward, recompute=0):
    """Of the tasks of equal cells; half a backward is one of its parts."""
    by_kind = {
        "forward": forward,
        "recompute": recompute,
        "backward": backward,
        "input_gradient": backward / 2,
        "weight_gradient": backward / 2,
    }
    return lambda task: by_kind[task.kind]


@pytest.mark.parametrize(("name", "chunks"), SHAPES)
def test_simulation_gives_the_closed_forms(name, chunks):
    for devices, m in SIZES:
        schedule = SCHEDULES[name](devices, m, chunks)
        assert schedule.num_devices == devices
        assert schedule.num_cells == devices * chunks
        assert schedule.num_micro_batches == m
        known = ((1, 2), (1, 4), (3, 2))
        if name in V_SHAPED:
            fewest = 2 * devices if name == "dualpipe_v" else devices
            known = ((1, 2), (3, 6)) if m >= fewest else ()
        # The closed forms of a V count the first cell's halves as they run.
        facts = None if name in V_SHAPED else [CellFacts()] * schedule.num_cells
        program = schedule.program(facts=facts)
        for forward, backward in known:
            duration = durations(forward, backward)
            ideal = IDEALS[name](devices, m, chunks, forward, backward)
            assert program.length(duration) == ideal.length, (devices, m)
            assert program.bubble(duration) == pytest.approx(ideal.bubble)
            held, most = program.held(), ideal.held
            if name in V_SHAPED:  # of the device that holds most
                held, most = [max(held)], [max(most)]
            assert held == most, (devices, m)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_length_under_except_last_is_that_of_one_recomputation_less(name):
    for k, m in SIZES:
        schedule = SCHEDULES[name](k, m)
        program = schedule.program("except_last")
        kept = [op.micro_batch for op in program.ops if op.keeps]
        assert kept == [m - 1 if name == "gpipe" else 0] * k
        length = program.length(durations(1, 2, recompute=1))
        assert length == 4 * m - 1 + 3 * (k - 1)


def test_interleaved_with_one_chunk_is_1f1b():
    for k, m in SIZES:
        assert SCHEDULES["interleaved"](k, m, 1) == SCHEDULES["1f1b"](k, m, 1)


@pytest.mark.parametrize("link", [0.1, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("d", [2, 4, 8])
def test_warm_up_hides_links(d, link):
    """But for the first way there, and the last one back."""
    forward, backward, m = 1, 2, 16 * d
    duration = durations(forward, backward)
    transfer = link * (forward + backward)
    made = SCHEDULES["1f1b"](d, m, link_share=link)
    ways = 2 * (d - 1) * transfer
    assert made.length(duration, transfer) == pytest.approx(
        SCHEDULES["1f1b"](d, m).length(duration) + ways
    )
    each = 2 if link <= 0.5 else 3
    assert made.held() == [each * (d - 1 - i) + 1 for i in range(d)]
    plain = SCHEDULES["1f1b"](d, m).length(duration, transfer)
    assert plain > made.length(duration, transfer)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("d", "m"), [(2, 16), (3, 17), (4, 32), (8, 28)])
def test_groups_hide_links(d, m, chunks):
    duration, transfer = durations(1, 2), 0.25 * 3
    made = SCHEDULES["interleaved"](d, m, chunks, link_share=0.25)
    without = SCHEDULES["interleaved"](d, m, chunks).length(duration)
    ways = 2 * (d - 1) * transfer
    assert made.length(duration, transfer) == pytest.approx(without + ways)


def test_quotients_are_rounded():
    share = 0.4 / (0.1 + 0.7)
    assert share > 0.5  # in its last bit
    made = SCHEDULES["1f1b"](4, 16, link_share=share)
    assert made.held() == [7, 5, 3, 1]


def test_longest_links_have_all_under_way():
    for name in ("1f1b", "interleaved"):
        made = SCHEDULES[name](3, 8, link_share=1e308)
        assert made.held() == [8, 8, 1]


@pytest.mark.parametrize("link", [-0.1, math.inf, "0.25", None])
def test_links_that_are_no_share_are_refused(link):
    with pytest.raises(
        ValueError, match=r"`link_share` must be .* Received: link_share="
    ):
        SCHEDULES["1f1b"](2, 4, link_share=link)


@pytest.mark.parametrize("name", [n for n, own in CHUNKS.items() if own == 1])
def test_chunks_are_refused_where_a_device_has_one_cell(name):
    with pytest.raises(
        ValueError, match=r"`num_chunks` must be 1.*num_chunks=2"
    ):
        SCHEDULES[name](2, 2, 2)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_nothing_of_something_is_refused(name, position):
    counts = [1, 1, 1]
    counts[position] = 0
    with pytest.raises(ValueError, match=r"at least 1. Received: num_.*=0"):
        SCHEDULES[name](*counts)
