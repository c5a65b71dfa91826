"""A text that equal layers share, in this program and in others."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def layer_key(layer: Any, step: Any = None) -> str:
    """What layers of one class, configuration and shapes of weights share.

    Names are left out, those of layers inside it too: Keras counts layers on
    where they are made again. Of a layer without a configuration that a file
    can hold, only class and weights are compared.

    Args:
        layer: The layer, built.
        step: The `cells.GraphStep` that calls it; None for a layer of a list.
    """
    called = layer if step is None else step.operation
    weights = [(list(v.shape), v.dtype, v.trainable) for v in layer.weights]
    wiring = None if step is None else str((step.args, step.kwargs))
    cls = type(called)
    facts = [cls.__module__, cls.__qualname__, _config(called), weights, wiring]
    text = json.dumps(facts, sort_keys=True)
    return f"{cls.__name__} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _config(called: Any) -> Any:
    try:
        config = called.get_config()
        json.dumps(config)
    except Exception:  # a user's method may raise anything
        return None
    return _unnamed(config, {})


def _unnamed(value: Any, numbers: dict[str, str]) -> Any:
    """The same, with numbers for names, in the order in which they come."""
    if isinstance(value, dict):
        name = value.get("name")
        if isinstance(name, str):
            numbers.setdefault(name, f"#{len(numbers)}")
        return {k: _unnamed(value[k], numbers) for k in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_unnamed(own, numbers) for own in value]
    return numbers.get(value, value) if isinstance(value, str) else value
