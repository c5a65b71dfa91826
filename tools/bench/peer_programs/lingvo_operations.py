"""Lets Lingvo be imported where its library of operations cannot be loaded.

The wheel of Lingvo 0.14.2 was built for glibc 2.38, and for a libstdc++ of GCC
13, which some systems do not have yet. `lingvo.core.ops` looks for a module of
the operations before it opens the library, so a module of that name is taken
for them. Of all the operations a pipeline uses two, which check shapes; these
do nothing then, as with Lingvo's own flag `--noenable_asserts`.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys
import types
from typing import Any

_CHECKS = ("assert_shape_match", "assert_same_dim0")
_MODULE = "lingvo.core.ops.gen_x_ops"


class Absent(types.ModuleType):
    """Has every operation, and computes none."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(_call, name)


def _call(name: str, *arguments: Any, **options: Any) -> Any:
    if name not in _CHECKS:
        raise NotImplementedError(
            f"Lingvo's operation `{name}` is in its native library, which "
            "cannot be loaded on this system."
        )
    import tensorflow as tf

    return tf.no_op()


def replace_if_absent() -> bool:
    """To be called before Lingvo is imported."""
    import tensorflow as tf

    # Finds the package without importing what is in it.
    (package,) = importlib.util.find_spec("lingvo").submodule_search_locations
    try:
        tf.load_op_library(str(pathlib.Path(package) / "core/ops/x_ops.so"))
    except (tf.errors.NotFoundError, OSError):
        sys.modules[_MODULE] = Absent(_MODULE)
        return True
    return False
