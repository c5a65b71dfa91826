"""A profile as a table, for people."""

from __future__ import annotations

from typing import Any

_KINDS = ("forward", "recompute", "backward")


def table_of(profile: Any) -> str:
    """The table of a `Profile`: a line for each layer and micro-batch size.

    Seconds are lower quartiles, each with the cost of a call; `+-` is half of
    the distance of the quartiles, of all kinds the largest, as a share.
    """
    header = (
        "layer",
        "rows",
        "forward",
        "recompute",
        "backward",
        "+-",
        "outputs",
        "kept",
        "weights",
        "slots",
        "gradients",
    )
    rows: list[tuple[str, ...]] = [header]
    loss = [] if profile.loss is None else [profile.loss]
    for layer in [*profile.layers, *loss]:
        for own in layer.measured:
            spreads = [getattr(own, kind) for kind in _KINDS]
            is_first = own is layer.measured[0]
            held = (layer.weight_bytes, layer.slot_bytes, layer.gradient_bytes)
            rows.append(
                (
                    layer.name if is_first else "",
                    str(own.rows),
                    *map(_time, spreads),
                    f"{max(map(_width, spreads)):.0%}",
                    _size(own.output_bytes),
                    _size(own.kept_bytes),
                    *(_size(n) if is_first else "" for n in held),
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:])),
            ]
        ).rstrip()
        for row in rows
    ]
    compiled = ", compiled by XLA" if profile.jit_compile else ""
    lines.append(
        f"On {profile.device}{compiled}; slots of {profile.optimizer}; a call "
        f"takes {_seconds(profile.call_seconds)} of each."
    )
    return "\n".join(lines)


def _time(spread: Any) -> str:
    return "-" if spread is None else _seconds(spread.low)


def _width(spread: Any) -> float:
    if spread is None or not spread.low:
        return 0.0
    return (spread.high - spread.low) / 2 / spread.low


def _seconds(value: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def _size(value: float) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return f"{value / 1024**power:.3g} {unit}"
    return f"{value:.0f} B"
