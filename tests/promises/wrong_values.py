"""What is given by mistake in place of an argument, and what came of it."""

import collections
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# By the words that tests name them with.
VALUES = {
    "None": None,
    "True": True,
    "0": 0,
    "-1": -1,
    "10**30": 10**30,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "empty text": "",
    "text": "wrong",
    "bytes": b"wrong",
    "[]": [],
    "[None]": [None],
    "['wrong']": ["wrong"],
    "[-1, 0]": [-1, 0],
    "{}": {},
    "{'wrong': -1}": {"wrong": -1},
    "array": np.zeros((2, 2)),
    "tensor": tf.constant([1.5, -1.0]),
    "function": lambda *args: "wrong",
    "class": collections.OrderedDict,
    "object": object(),
}


class Outcome(NamedTuple):
    """What a call with a wrong argument came to.

    Attributes:
        is_accepted: Whether nothing was said.
        unclear: Why the error is none that helps; None if it does.
        error: What was raised, or None.
    """

    is_accepted: bool
    unclear: str | None
    error: Exception | None


def outcome(call: Any, argument: str) -> Outcome:
    """Runs a call one of whose arguments is wrong.

    An error helps if it is one of a wrong value, which names the argument and
    says what was received.
    """
    try:
        call()
    except Exception as error:
        return Outcome(False, _unclear(error, argument), error)
    return Outcome(True, None, None)


def _unclear(error: Exception, argument: str) -> str | None:
    kinds = (ValueError, TypeError, OSError)
    if not isinstance(error, kinds) or isinstance(error, UnicodeError):
        return f"a {type(error).__name__}"
    text = str(error)
    if f"`{argument}`" not in text and f"{argument}=" not in text:
        return "without the argument's name"
    if "eceived" not in text:
        return "without what was received"
    return None
