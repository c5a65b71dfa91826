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
    names = dict.fromkeys(_names(config))
    return _renamed(config, {name: f"#{i}" for i, name in enumerate(names)})


def _names(value: Any) -> list[str]:
    """The names in a configuration, in the order of its layers."""
    if isinstance(value, dict):
        name = value.get("name")
        own = [name] if isinstance(name, str) else []
        return own + [n for k in sorted(value) for n in _names(value[k])]
    if isinstance(value, (list, tuple)):
        return [name for one in value for name in _names(one)]
    return []


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """The same, with other names wherever they stand."""
    if isinstance(value, dict):
        return {key: _renamed(own, names) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(own, names) for own in value]
    return names.get(value, value) if isinstance(value, str) else value
