"""Profiles that nobody has measured."""

from tfgpipe.profiles import Profile
from tfgpipe.profiles.profile_record import LayerProfile, Spread, TaskSeconds


def tasks(rows, forward, recompute=None, last=None, backward=None, halves=()):
    """The tasks of a layer, in seconds; 10 bytes go out a row, 20 are kept."""
    seconds = [forward, recompute, last, backward, *(halves or (None, None))]
    return TaskSeconds(
        rows,
        10 * rows,
        20 * rows,
        *(s if s is None else Spread(s * 1.1, s, s * 1.2) for s in seconds),
    )


def layer(name, *measured, key=None, weights=8):
    """A layer; its weights take so many bytes."""
    return LayerProfile(
        name, key or name, weights // 4, weights, 2 * weights, weights, measured
    )


def profile(*layers, loss=None, call_seconds=0.0):
    """A profile of these layers."""
    return Profile(
        layers,
        loss,
        "/device:CPU:0",
        call_seconds,
        False,
        "Adam",
        {"keras": "3"},
    )
