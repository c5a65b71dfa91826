"""Predictions are what schedules say of themselves."""

import pytest
from simple_layers import equal_tasks, random_seconds, size, workload

from tfgpipe.plans.prediction import Setting, predict
from tfgpipe.plans.workload import Machine, Workload
from tfgpipe.schedules import SCHEDULES, CellFacts, Remat, lower

LINK = Machine(1, 1, 1e9, 1e3, latency=0.5, task_seconds=0, efficiency=1)


def setting(cut, m=4, schedule="gpipe", remat="never", groups=1, **changed):
    rules = (remat,) * len(cut) if isinstance(remat, str) else remat
    made = Setting(1, len(cut), tuple(cut), m, schedule, rules, groups)
    return made._replace(**changed)


def expected_length(work, made):
    """By the program, with the seconds of each of its operations."""
    groups = [
        group
        for own in work.cells(made.layers_per_cell, made.remat_groups)
        for group in own
    ]
    schedule = SCHEDULES[made.schedule](
        made.num_devices, made.num_micro_batches, made.chunks
    )
    program = lower(
        lambda _: schedule,
        [CellFacts(needs_dx=k > 0) for k in range(len(groups))],
        Remat(
            [rule for rule in made.remat for _ in range(made.remat_groups)],
            [made.remat_groups] * made.num_partitions,
        ),
        [made.num_micro_batches],
    )

    def duration(op):
        return groups[op.cell].seconds[op.kind]

    return program.length(duration), program.bubble(duration)


@pytest.mark.parametrize("remat", ["never", "always", "except_last", "mixed"])
@pytest.mark.parametrize(
    ("schedule", "d"),
    [("gpipe", 4), ("1f1b", 4), ("zero_bubble", 4), ("interleaved", 2)],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_length_is_that_of_the_schedule(schedule, d, remat, groups):
    rules = ("never", "always", "except_last", "never")
    for seed in range(3):
        work = workload(random_seconds(12, seed))
        made = setting(
            [3, 2, 4, 3],
            5,
            schedule,
            rules if remat == "mixed" else remat,
            groups,
            num_devices=d,
        )
        found = predict(work, made, None)
        length, bubble = expected_length(work, made)
        assert found.step_seconds == pytest.approx(length)
        assert found.bubble == pytest.approx(bubble)


def test_transfers_delay_what_waits_for_them():
    work = workload([1.0, 1.0])
    made = setting([1, 1], m=1)
    # Forward, forward, backward, and the weight gradient of the first cell;
    # 8 bytes go there and back at 1,000 bytes a second.
    alone = 1 + 1 + 2 + 1
    assert predict(work, made, None).step_seconds == alone
    found = predict(work, made, LINK)
    assert found.step_seconds == pytest.approx(alone + 2 * (0.5 + 8 / 1e3))


def test_layers_before_the_first_weights_go_forward_only():
    sizes = [size(0), size(0), size(1)]
    work = Workload(sizes, 8, [equal_tasks(1)] * 3, 0, 1)
    found = predict(work, setting([2, 1], m=1, remat="always"), None)
    # 2 and 1 forward; computed again, and the gradient of the weights.
    assert found.step_seconds == 2 + 1 + 1 + 1
    assert found.memory[0].gradients == 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_never_holds_what_the_schedule_holds(schedule):
    work = workload([1.0] * 4, crossing=0)
    made = setting([1] * 4, 8, schedule)
    held = SCHEDULES[schedule](4, 8, 1).held()
    found = [own.activations for own in predict(work, made, None).memory]
    # Behind the last cell, the loss keeps 8 bytes of outputs.
    assert found[:-1] == [(8 + 16) * count for count in held[:-1]]
    assert found[-1] == (8 + 16 + 8) * held[-1]


def test_remat_holds_inputs_and_one_micro_batch():
    work = workload([1.0] * 4)
    for rule in ("always", "except_last"):
        made = setting([2, 2], 8, "gpipe", rule)
        found = [own.activations for own in predict(work, made, None).memory]
        # Each layer keeps 16 bytes and its 8 of input, and the loss 8.
        first = 8 * 8 + 2 * (8 + 16) - 8
        assert found == [first, first + 8]


def test_replicas_share_slots_and_exchange_gradients():
    work = workload([1.0] * 2)
    one = predict(work, setting([1, 1]), LINK)
    two = predict(work, setting([1, 1], num_replicas=2), LINK)
    assert two.memory[0].slots * 2 == one.memory[0].slots
    assert two.step_seconds > one.step_seconds


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("m", [1, 3])
def test_first_micro_batch_has_no_sums_to_add_to(schedule, m):
    """Of a step, each cell spares one addition."""
    plain = equal_tasks(2.0)
    sparing = plain | {"backward_first": plain["backward"] - 0.5}
    made = setting([3], m, schedule)
    slow, fast = (
        predict(Workload([size(1)] * 3, 8, [own] * 3, 0.0, 1.0), made, None)
        for own in (plain, sparing)
    )
    assert slow.step_seconds - fast.step_seconds == pytest.approx(3 * 0.5)


def test_share_is_between_what_all_and_inputs_alone_take():
    """In bytes that are kept; all of it is there in a backward task."""
    work = workload(random_seconds(12, 0))
    cut, shares = [3, 2, 4, 3], (0.9, 0.6, 0.3)

    def found(remat):
        return predict(work, setting(cut, 6, remat=(remat,) * 4), None)

    never, always = found("never"), found("always")
    before = never
    for share in shares:
        shared = found(share)
        assert shared.step_seconds > before.step_seconds
        for own, more in zip(shared.memory, before.memory, strict=True):
            assert own.activations < more.activations
        before = shared
    assert before.step_seconds < always.step_seconds


# ------------------------------------------------------- heads, and the host
def wide(rows=8):
    """Four layers of a few numbers, and one of many outputs."""
    sizes = [size(10) for _ in range(5)]
    return Workload(sizes, 1000, [equal_tasks(1.0)] * 5, 0, rows)


def test_a_head_in_parts_holds_a_part():
    work = wide()
    whole = predict(work, setting([2, 3]), None)
    parts = predict(work, setting([2, 3], head_parts=4), None)
    assert parts.memory[1].total < 0.5 * whole.memory[1].total
    assert parts.memory[0] == whole.memory[0]
    assert parts.step_seconds == pytest.approx(whole.step_seconds, rel=0.1)


def test_a_head_goes_forward_and_back_at_once():
    made = setting([2, 3], 1, head_parts=4)
    own = [(op.kind, op.cell) for op in made.program(wide()).by_device[1]]
    assert own == [("forward", 1), ("head", 2), ("backward", 1)]


def test_what_is_sent_is_held_while_it_is_on_the_way():
    work = workload([1.0] * 4)
    kept, sent = (
        predict(work, setting([2, 2], 8, remat=rule), None)
        for rule in ("never", "offload")
    )
    held = [own.activations for own in kept.memory]
    assert all(
        own.activations < 0.6 * most for own, most in zip(sent.memory, held)
    )
    assert sent.step_seconds == kept.step_seconds


def test_weights_on_the_host_are_those_of_two_cells():
    work = workload([1.0] * 8)
    cut = [1] * 8
    on_devices, on_host = (
        predict(
            work,
            setting(
                cut, schedule="interleaved", num_devices=2, weights_on=place
            ),
            None,
        )
        for place in ("devices", "host")
    )
    for a, b in zip(on_devices.memory, on_host.memory):
        assert b.weights == a.weights / 2
        assert b.gradients == a.gradients / 2
        assert (b.slots, b.activations) == (0, a.activations)
