"""From a schedule to the program of a step, by passes.

    grouped      makes a cell several, recomputed one at a time
    adapted      drops micro-batches that a short mini-batch has not, and what
                 nothing trained asks for; joins halves that cannot run apart,
                 and a head's tasks
    recomputed   notes what is kept; recomputes the rest before use
    on_shards    has shards of a layer run on devices of their own
    offloaded    sends what is kept to the host, and fetches it

Each takes operations in an order in which they can run, and returns such.

A forward task either keeps the activations that its backward pass needs, or
drops them, and a "recompute" task comes before the backward pass. `remat` says
which:

    "always"       every micro-batch is computed again
    "except_last"  all but the one that goes back through the cell first, whose
                   activations are still there: its forward pass is the last
    "never"        every micro-batch's activations are kept
    "offload"      they are, in the host's memory where there is time

Pure Python: nothing here knows TensorFlow.

Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), section 2.3,
where re-materialisation of all but the last micro-batch is the default.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tfgpipe.checks import is_amount
from tfgpipe.schedules.program import Op, Program, most_held
from tfgpipe.schedules.task import HALVES, Shard

REMAT = ("except_last", "always", "never", "offload")
Rule = str | float


def rule_of(text: str) -> Rule:
    """Reads a rule of `remat` from a flag; it is not checked.

    Example:

    >>> rule_of("never"), rule_of("0.4")
    ('never', 0.4)
    """
    try:
        return float(text)
    except ValueError:
        return text


def checked_rule(rule: object) -> Rule:
    """Returns a rule of `remat`, or a `ValueError` that says what it can be.

    Example:

    >>> checked_rule("never"), checked_rule(0.4)
    ('never', 0.4)
    """
    if isinstance(rule, str) and rule in REMAT:
        return str(rule)
    if is_amount(rule) and 0 < rule < 1:
        return float(rule)
    raise ValueError(
        f"`remat` must be one of {list(REMAT)}, or the share of what "
        '"never" keeps that may be kept, a number between 0 and 1. '
        f"Received: remat={rule!r}."
    )


class CellFacts(NamedTuple):
    """The facts of a cell that a program needs.

    Attributes:
        has_backward: Whether something in it, or before it, is trained.
        needs_dx: Whether something before it is trained.
        has_halves: Whether its backward pass can be cut into halves.
        recomputes: Whether its backward pass gets tensors of its forward pass
            or a recomputation, besides its inputs.
        is_head: Whether it goes forward and back at once, if it goes back.
        shard: If it is one of the shards of a layer, which.
    """

    has_backward: bool = True
    needs_dx: bool = True
    has_halves: bool = True
    recomputes: bool = True
    is_head: bool = False
    shard: Shard | None = None


class Remat(NamedTuple):
    """The rule of each cell.

    A rule is one of `REMAT`, or a number: the share of what the rule "never"
    keeps that may be kept of every micro-batch. The rest is computed again by
    what needs it.

    Attributes:
        rules: One for each cell, or group of one that is recomputed at once.
        groups: How many groups each cell of the schedule has; None: one.
        written: Those of which the schedule itself recomputes micro-batches.
    """

    rules: Sequence[Rule]
    groups: Sequence[int] | None = None
    written: Collection[int] = ()

    @classmethod
    def by_group(
        cls,
        remat: Rule | Mapping[int, Rule],
        num_groups: Sequence[int],
        written: Collection[int] = (),
        has_head: bool = False,
    ) -> Remat:
        """Returns the rules of the groups of all cells.

        `remat` is a rule, or rules by cells, with the first of `REMAT` for
        others; `written` are cells of which the schedule itself recomputes
        some micro-batches. A head, the last group, goes forward and back at
        once.
        """
        cells = [k for k, count in enumerate(num_groups) for _ in range(count)]
        rules = (
            remat if isinstance(remat, Mapping) else dict.fromkeys(cells, remat)
        )
        of_groups = [rules.get(k, REMAT[0]) for k in cells]
        again = {i for i, k in enumerate(cells) if k in written}
        if has_head:
            of_groups[-1] = "never"
            again.discard(len(cells) - 1)
        return cls(of_groups, num_groups, again)

    def recomputes(self, k: int) -> bool:
        """Returns whether cell k computes a whole micro-batch again."""
        return k in self.written or self.rules[k] in ("always", "except_last")

    def offloads(self, k: int) -> bool:
        """Returns whether what cell k keeps goes to the host."""
        return self.rules[k] == "offload"

    def share(self, k: int) -> float:
        """Returns the share of what "never" keeps that cell k may keep."""
        rule = self.rules[k]
        return 1.0 if isinstance(rule, str) else rule

    def parted(self, cells: Sequence[int], groups: Sequence[int]) -> Remat:
        """Returns the rules of smaller groups; who keeps a share keeps all.

        A share is one of a whole group: a part of it may need more, such as one
        that is a loop. `cells` says which group each is a part of.
        """
        written = [i for i, k in enumerate(cells) if k in self.written]
        rules = [self.rules[k] for k in cells]
        rules = [r if isinstance(r, str) else "never" for r in rules]
        return Remat(rules, groups, written)

    def compiled(self, num_micro_batches: int) -> Remat:
        """Returns the same rules for cells that XLA compiles.

        With several micro-batches, the one that goes back first is no exception
        there: the functions for it would be compiled besides the others.
        """
        if num_micro_batches == 1:
            return self
        rules = ["always" if r == "except_last" else r for r in self.rules]
        return self._replace(rules=rules)

    def keeps(self, k: int, goes_back_first: bool) -> bool:
        """Returns whether cell k keeps the activations of a micro-batch."""
        if self.rules[k] == "except_last":
            return goes_back_first
        return self.rules[k] != "always"


# ----------------------------------------------------------------- the passes
def grouped(ops: Iterable[Op], groups: Sequence[int]) -> list[Op]:
    """Makes each cell so many groups, which go back in the other order."""
    starts = [*itertools.accumulate(groups, initial=0)]
    split = []
    for op in ops:
        cells = range(starts[op.cell], starts[op.cell + 1])
        split += [
            op._replace(cell=k)
            for k in (cells if op.kind == "forward" else reversed(cells))
        ]
    return split


def adapted(
    ops: Iterable[Op], facts: Sequence[CellFacts], count: int
) -> list[Op]:
    """Adapts operations to the cells, and to `count` micro-batches.

    Backward passes of cells that have none are left out. Halves that cannot run
    apart are one, at the half whose result is awaited: where the input gradient
    is if the cell before needs it, else where the weight gradient is. A head is
    one operation where its backward pass is: so what it computes of a
    micro-batch, such as its logits, is not kept from the one to the other.
    """
    left = []
    for op in ops:
        cell = facts[op.cell]
        is_wanted = op.kind == "forward" or cell.has_backward
        if op.micro_batch >= count or not is_wanted:
            continue
        if op.kind in HALVES and not (cell.has_halves and cell.needs_dx):
            if (op.kind == "input_gradient") != cell.needs_dx:
                continue
            op = op._replace(kind="backward")
        if cell.is_head and cell.has_backward:
            if not op.takes_gradient:
                continue
            op = op._replace(kind="head")
        left.append(op)
    return left


def recomputed(
    ops: Sequence[Op],
    facts: Sequence[CellFacts],
    remat: Remat,
    says_keeps: bool = False,
) -> list[Op]:
    """Notes what each forward pass keeps, and adds recomputations.

    A recomputation that the schedule has stays where it is, and its forward
    pass keeps nothing. All others come right before what takes their results.
    `says_keeps` is whether the schedule says which forward passes keep.
    """
    first = {
        op.cell: op.micro_batch for op in reversed(ops) if op.takes_gradient
    }
    again = {op.at for op in ops if op.kind == "recompute"}
    kept = {
        op.at
        for op in ops
        if op.kind == "forward"
        and facts[op.cell].has_backward
        and op.at not in again
        and (
            op.keeps
            if says_keeps
            else remat.keeps(op.cell, first.get(op.cell) == op.micro_batch)
        )
    }
    lowered, known = [], kept | again
    for op in ops:
        recomputes = facts[op.cell].recomputes
        if op.takes_gradient and recomputes and op.at not in known:
            lowered.append(op._replace(kind="recompute", keeps=False))
        if op.kind != "recompute" or recomputes:
            keeps = op.kind == "forward" and op.at in kept
            lowered.append(op._replace(keeps=keeps))
    return lowered


def on_shards(ops: Iterable[Op], shards: Mapping[int, Shard]) -> list[Op]:
    """Shards of a layer on their devices; other cells stay where they are.

    Those that run beside others come first: they follow what their caller's
    device runs before, and not a shard there.
    """
    moved: list[Op] = []
    layers = itertools.groupby(
        ops, lambda op: op.cell in shards and shards[op.cell].cells
    )
    for _, layer in layers:
        others: list[Op] = []
        for op in layer:
            shard = shards.get(op.cell)
            if shard is not None:
                op = op._replace(device=shard.device)
            beside = shard is not None and shard.is_beside
            (moved if beside else others).append(op)
        moved += others
    return moved


def offloaded(
    ops: list[Op], facts: Sequence[CellFacts], remat: Remat
) -> list[Op]:
    """With what is kept sent to the host, where it is not needed at once.

        F0 --> F1 ----> F2 ----> B2 ----> B1 ----> B0
               O0: while F1 runs          T0: while B1 runs

    It is fetched while the operation before the one that takes it runs; so two
    operations run in between, at least. A device that would hold no fewer
    micro-batches sends nothing.
    """
    # Some keep nothing but what comes in.
    cells = {
        k
        for k, cell in enumerate(facts)
        if remat.offloads(k) and cell.recomputes
    }
    if not cells:
        return ops
    by_device: dict[int, list[Op]] = collections.defaultdict(list)
    for op in ops:
        by_device[op.device].append(op)
    chosen: list[tuple[Op, Op]] = []
    for on_device in by_device.values():
        gaps = len(on_device), 3, 2
        ways = [_away(on_device, cells, between) for between in gaps]
        held = [most_held(_with_transfers(on_device, way)) for way in ways]
        chosen += ways[held.index(min(held))]  # as few transfers as do
    return _with_transfers(ops, chosen)


def _away(
    ops: Sequence[Op], cells: Collection[int], between: int
) -> list[tuple[Op, Op]]:
    """Finds activations that a device need not hold all the time.

    At least `between` operations run until they are needed. Returns operations
    that keep them, each with the one before which they are fetched.
    """
    keepers: dict[tuple[int, int], int] = {}
    pairs = []
    for i, op in enumerate(ops):
        if op.keeps and op.cell in cells:
            keepers[op.at] = i
        elif op.takes_gradient and i - keepers.get(op.at, i) > between:
            pairs.append((ops[keepers[op.at]], ops[i - 1]))
    return pairs


def _with_transfers(
    ops: Sequence[Op], pairs: Sequence[tuple[Op, Op]]
) -> list[Op]:
    """Sends what operations keep behind them, and fetches it before others."""
    sent, fetched = {}, collections.defaultdict(list)
    for keeper, before in pairs:
        transfer = keeper._replace(kind="offload", keeps=False)
        sent[keeper.task] = [transfer]
        fetched[before.task].append(transfer._replace(kind="fetch"))
    longer = []
    for op in ops:
        longer += [*fetched[op.task], op, *sent.get(op.task, [])]
    return longer


# ---------------------------------------------------------------- all of them
def lower(
    schedule_of: Callable[[int], Any],
    facts: Sequence[CellFacts],
    remat: Remat,
    counts: Sequence[int] = (0,),
) -> Program:
    """Lowers a schedule to the program of a step.

    Args:
        schedule_of: Returns the `Schedule` of a replica for a number of
            micro-batches; of more, the first of them count.
        facts: Of each cell; of each group if `remat` has groups.
        remat: What is recomputed.
        counts: How many micro-batches each replica has; some may have none.
    """
    longest = schedule_of(max(counts))
    shards = {
        k: cell.shard for k, cell in enumerate(facts) if cell.shard is not None
    }
    others = [shard.device + 1 for shard in shards.values()]
    num_devices = max([longest.num_devices, *others])

    replicas = []
    starts = itertools.accumulate(counts, initial=0)
    for r, (start, count) in enumerate(zip(starts, counts)):
        if not count:
            continue
        schedule = schedule_of(count)
        ops: Sequence[Op] = schedule.ops
        if remat.groups is not None:
            ops = grouped(ops, remat.groups)
        ops = adapted(ops, facts, count)
        ops = recomputed(ops, facts, remat, schedule.keeps is not None)
        replicas.append(
            [
                op._replace(
                    micro_batch=op.micro_batch + start,
                    device=op.device + r * num_devices,
                )
                for op in on_shards(ops, shards)
            ]
        )
    every = offloaded(_in_turn(replicas), facts, remat)
    return Program(every, num_devices * len(counts), shards)


def _in_turn(replicas: list[list[Op]]) -> list[Op]:
    """Replicas take turns.

    What all begin with, whatever needs no gradient, comes first: what is known
    after the last of them is known before the first backward operation.
    """
    begins = [
        [*itertools.takewhile(lambda op: not op.is_backward, ops)]
        for ops in replicas
    ]
    rests = [ops[len(begin) :] for ops, begin in zip(replicas, begins)]
    return [
        op
        for lists in (begins, rests)
        for turn in itertools.zip_longest(*lists)
        for op in turn
        if op is not None
    ]
