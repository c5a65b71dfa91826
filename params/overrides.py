"""Changes fields of an experiment by text, as a command line gives it."""

import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any

from params import names


def override(params: Any, assignments: Iterable[str]) -> Any:
    """Returns a copy of a frozen dataclass with some fields changed.

    Args:
        params: An `Experiment`, or any dataclass with dataclasses in it.
        assignments: Such as "epochs=3" or "model.num_filters=64". The value
            must be of the field's type; tuples are written "1,2" and an
            optional value may be "none".

    Raises:
        ValueError: If a field does not exist, with the nearest name, or a
            value is not of its type, or the dataclass refuses it.
    """
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(
                "`set` must be of the form field=value. "
                f"Received: set={assignment!r}. "
                "For example: --set=model.num_filters=64"
            )
        params = _replace(params, path.strip().split("."), text.strip(), path)
    return params


def _replace(params: Any, path: list[str], text: str, whole: str) -> Any:
    types_of_fields = _field_types(params)
    name, *rest = path
    if name not in types_of_fields:
        prefix = whole.removesuffix(".".join(path))
        known = [f"{prefix}{field}" for field in types_of_fields]
        raise ValueError(names.unknown("set", f"{prefix}{name}", known))
    current = getattr(params, name)
    if dataclasses.is_dataclass(current):
        if not rest:
            fields = ", ".join(_field_types(current))
            raise ValueError(
                f"`set` must name one field of {whole}: {fields}. "
                f"Received: set='{whole}={text}'. "
                f"Write --set={whole}.FIELD=VALUE"
            )
        value = _replace(current, rest, text, whole)
    elif rest:
        raise ValueError(
            f"`set` must name a field. Received: set='{whole}={text}', but "
            f"{name} is a value without fields: {current!r}."
        )
    else:
        value = _parse(types_of_fields[name], text, whole)
    return dataclasses.replace(params, **{name: value})


def _field_types(params: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(type(params))
    return {f.name: hints[f.name] for f in dataclasses.fields(params)}


def _parse(kind: Any, text: str, whole: str) -> Any:
    """Reads `text` as a value of the type `kind`."""
    try:
        return _value(kind, text)
    except ValueError:
        raise ValueError(
            f"`set` must give {whole} a value of type {_type_name(kind)}. "
            f"Received: set='{whole}={text}'."
        ) from None


def _value(kind: Any, text: str) -> Any:
    if isinstance(kind, types.UnionType):
        if text.lower() == "none" and type(None) in kind.__args__:
            return None
        (kind,) = (k for k in kind.__args__ if k is not type(None))
    if typing.get_origin(kind) is tuple:
        return tuple(_value(kind.__args__[0], t) for t in text.split(","))
    if kind is bool:
        return bool(("false", "true").index(text.lower()))
    value = kind(text)
    if value != value:
        raise ValueError("not a number")
    return value


def _type_name(kind: Any) -> str:
    plain = isinstance(kind, type) and typing.get_origin(kind) is None
    return kind.__name__ if plain else str(kind)
