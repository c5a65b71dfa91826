"""Which variable of a model is which of a checkpoint, by names.

Of one model, names are not always the same: they begin with the model's own,
and Keras numbers layers that were given none through the process. So these are
tried, one after the other:

    the same names, in any order;       each is taken by its name
    those that only differ in their
    numbers count from 0 on, as they
    come
    other names, of which none of the   in their order, which is told: layers
    old ones has another place          may have new names
    else                                an error: layers were moved

An optimizer's slots are found by their weights, whose names begin theirs.
Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

_NUMBERED = re.compile(r"(.+?)_(\d+)")

_SEED = "seed_generator_state"

_Key = TypeVar("_Key", bound=Hashable)


class Mismatch(Exception):
    """What is not the same, in words: two names."""

    def __init__(self, own: str, saved: str) -> None:
        super().__init__(own, saved)
        self.own = own
        self.saved = saved


def matched(
    own: Sequence[str], saved: Sequence[str]
) -> tuple[list[int], tuple[str, str] | None]:
    """For each of a model's names its index among as many saved names.

    And two names that differ, the model's and the saved, if they were found by
    their order alone.

    Raises:
        Mismatch: If layers have other places.
    """
    mine, theirs = _without_model(own), _without_model(saved)
    found = _by_key(*map(_counted, _renumbered(mine, theirs)))
    if found is not None:
        return found, None
    in_order = [*range(len(own))]
    places = {name: i for i, name in enumerate(theirs)}
    for i, name in enumerate(mine):
        is_given = not any(map(_NUMBERED.fullmatch, name.split("/")))
        if is_given and places.get(name, i) != i and _SEED not in name:
            raise Mismatch(own[i], saved[i])
    pairs = zip(own, saved, mine, theirs)
    return in_order, next((a, b) for a, b, c, d in pairs if c != d)


def matched_slots(
    own: Sequence[str],
    saved: Sequence[str],
    own_weights: Sequence[str],
    saved_weights: Sequence[str],
    weights: Sequence[int],
) -> list[int]:
    """For each name in the model's optimizer its index among those saved.

    `weights` is what `matched` found for the variables of layers, of which the
    names are `own_weights` and `saved_weights`.

    Raises:
        Mismatch: If it is kept for other weights.
    """
    # (Index of the weight among those saved, what the slot is of it).
    mine = [
        (None if place is None else weights[place], kind)
        for place, kind in _slots(own, own_weights)
    ]
    theirs = _slots(saved, saved_weights)
    if (found := _by_key(_counted(mine), _counted(theirs))) is not None:
        return found
    for i, key in enumerate(mine):
        if key[0] is not None and key not in theirs:
            raise Mismatch(own[i], saved[i])
    return [*range(len(own))]  # of an optimizer with names of its own


def _by_key(own: Sequence[_Key], saved: Sequence[_Key]) -> list[int] | None:
    """For each its index, if both have the same."""
    places = {key: i for i, key in enumerate(saved)}
    return [places[k] for k in own] if places.keys() == {*own} else None


def _counted(keys: Iterable[_Key]) -> list[tuple[_Key, int]]:
    """Keys that differ: with how many equal ones come before each."""
    seen: collections.Counter[_Key] = collections.Counter()
    found = []
    for key in keys:
        found.append((key, seen[key]))
        seen[key] += 1
    return found


def _without_model(names: Sequence[str]) -> list[str]:
    """Names in a model, without its own name and those of models around it."""
    parts = [name.split("/") for name in names]
    inside = [p for p in parts if p[-1] != _SEED]
    while inside and all(len(p) > 2 and p[0] == inside[0][0] for p in inside):
        for part in inside:
            del part[0]
    return ["/".join(p) for p in parts]


def _renumbered(*lists: Sequence[str]) -> list[list[str]]:
    """Names with numbers of their own, where the given ones differ.

    These count from 0, in the order in which they come.
    """
    # dense_3, dense_7 -> dense#0, dense#1; the same numbers in all stay.
    by_stem = [_numbers(names) for names in lists]

    def renumbered(part: str, own: dict[str, dict[str, int]]) -> str:
        stem = _stem(part)
        if len({frozenset(other.get(stem, ())) for other in by_stem}) == 1:
            return part
        return f"{stem}#{own[stem][part]}"

    return [
        ["/".join(renumbered(p, own) for p in n.split("/")) for n in names]
        for names, own in zip(lists, by_stem)
    ]


def _numbers(names: Iterable[str]) -> dict[str, dict[str, int]]:
    """By a stem, by a part of a name, how many of its stem come before it."""
    found: dict[str, dict[str, int]] = {}
    for name in names:
        for part in name.split("/"):
            same = found.setdefault(_stem(part), {})
            same.setdefault(part, len(same))
    return found


def _stem(part: str) -> str:
    numbered = _NUMBERED.fullmatch(part)
    return numbered[1] if numbered else part


def _slots(
    names: Sequence[str], weights: Sequence[str]
) -> list[tuple[int | None, str]]:
    """Of each slot the index of its weight, or None, and what it is of it."""
    # The longest first, as one name may begin with another.
    starts = sorted(
        ((f"{w.replace('/', '_')}_", i) for i, w in enumerate(weights)),
        key=lambda one: -len(one[0]),
    )
    found: list[tuple[int | None, str]] = []
    for name in names:
        rest = name.partition("/")[2] or name
        for start, i in starts:
            if rest.startswith(start):
                found.append((i, rest[len(start) :]))
                break
        else:
            found.append((None, rest))
    return found
