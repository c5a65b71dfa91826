"""What the instructions of a function refer to, for `code_reading.py`."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from tfgpipe import internals

# Packages whose functions depend on their arguments alone, or on TensorFlow's
# state, which is the same for all layers.
_PACKAGES = set(
    "__future__ abc bisect cmath collections contextlib copy dataclasses "
    "decimal enum fractions functools heapq itertools keras logging math "
    "numbers numpy operator re statistics string tensorflow tfgpipe types "
    "typing typing_extensions warnings".split()
)
_UNKNOWN_MODULES = ("numpy.random",)
# By which code could get at a name, an identity, or what Keras notes.
_TELLING = set(
    "_name path __dict__ __format__ __getattr__ __getattribute__ __globals__ "
    "__hash__ __repr__ __str__ attrgetter format format_map get_layer get_uid "
    "input losses methodcaller output to_json".split()
)
# What runs while an object is made, saved or shown.
MAKING = set(
    "__delattr__ __hash__ __init__ __reduce__ __repr__ __setattr__ __str__ "
    "build build_from_config compute_output_shape compute_output_spec "
    "from_config get_build_config get_config load_own_variables "
    "save_own_variables".split()
)
_TELLING |= MAKING | internals.NOTES_ON_LAYERS
_TELLING -= {"__init__", "build", "built"}
_FORMATS = {"FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
_NAMES = {"LOAD_GLOBAL", "LOAD_NAME"}
_REJECTED = {
    "DELETE_GLOBAL",
    "LOAD_BUILD_CLASS",
    "MATCH_CLASS",
    "STORE_GLOBAL",
}
_ENDS = {"FOR_ITER", "RETURN_CONST", "RETURN_VALUE"}


class Facts(NamedTuple):
    """What the instructions of a function say.

    Attributes:
        reason: Why they are not understood, or None.
        chains: The global names, each with the attributes that follow.
        mentioned: Attributes that are read, and texts.
        stored: Attributes that are set.
        rebound: Variables of outer functions that are set.
    """

    reason: str | None
    chains: frozenset[tuple[str, ...]]
    mentioned: frozenset[str]
    stored: frozenset[str]
    rebound: frozenset[str]


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of those inside it."""
    waiting = [code]
    while waiting:
        one = waiting.pop()
        yield one
        waiting.extend(
            c for c in one.co_consts if isinstance(c, types.CodeType)
        )


@functools.lru_cache(maxsize=4096)
def facts_of(code: types.CodeType) -> Facts:
    """What a function's own instructions say."""
    found = list(_without_raising(list(dis.get_instructions(code))))
    chains: set[tuple[str, ...]] = set()
    reasons: list[str] = []
    for i, one in enumerate(found):
        if one.opname in _NAMES:
            chains.add((one.argval, *_attributes(found[i + 1 :])))
        if reason := _reason(one, found[max(i - 1, 0)], found[i + 1 : i + 9]):
            reasons.append(reason)

    def named(*opnames: str) -> frozenset[str]:
        return frozenset(i.argval for i in found if i.opname in opnames)

    texts = {
        i.argval
        for i in found
        if i.opname == "LOAD_CONST" and isinstance(i.argval, str)
    }
    return Facts(
        reasons[0] if reasons else None,
        frozenset(chains),
        named(*_ATTRIBUTES) | texts,
        named("STORE_ATTR"),
        named("STORE_DEREF", "DELETE_DEREF"),
    )


def _reason(
    one: dis.Instruction,
    before: dis.Instruction,
    after: list[dis.Instruction],
) -> str | None:
    """Why an instruction is not understood, or None."""
    kind, value = one.opname, one.argval
    if kind in _FORMATS or (kind == "LOAD_CONST" and "%" in _text(value)):
        return "makes a text of an object"
    if one.argrepr in ("%", "%=") and before.opname == "BUILD_TUPLE":
        return "makes a text of an object"
    if kind in _ATTRIBUTES and value in _TELLING:
        return f"reads `{value}`"
    if kind in _REJECTED:
        return f"runs {kind}"
    if kind == "IMPORT_NAME" and not is_known(value):
        return f"imports {value}"
    if kind in _NAMES and value == "getattr":
        name = _text(_second_constant(after))
        if not name or name in _TELLING:
            return "calls `getattr`"
    return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _second_constant(following: list[dis.Instruction]) -> Any:
    """The constant that a call has after a first argument `a.b.c`, or None."""
    loads = 0
    for one in following:
        if one.opname == "LOAD_CONST":
            return one.argval if loads == 1 else None
        if one.opname in ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL"):
            loads += 1
        elif one.opname not in ("LOAD_ATTR", "PUSH_NULL"):
            break
    return None


def _attributes(instructions: list[dis.Instruction]) -> Iterator[str]:
    """The attributes that are read of what was loaded just before."""
    for one in instructions:
        if one.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return
        yield one.argval


def _without_raising(
    instructions: list[dis.Instruction],
) -> Iterator[dis.Instruction]:
    """The instructions, but those that come to nothing but a `raise`."""
    if any(one.opname == "PUSH_EXC_INFO" for one in instructions):
        yield from instructions  # what is raised may be caught
        return
    block: list[dis.Instruction] = []
    for one in instructions:
        if one.is_jump_target:
            yield from block
            block = []
        block.append(one)
        if one.opname == "RAISE_VARARGS":
            block = []
        elif "JUMP" in one.opname or one.opname in _ENDS:
            yield from block
            block = []
    yield from block


def is_known(module: Any) -> bool:
    """Whether functions of a module depend on their arguments alone."""
    if not isinstance(module, str) or module.startswith(_UNKNOWN_MODULES):
        return False
    return module.split(".")[0].lstrip("_") in _PACKAGES
