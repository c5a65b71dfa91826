"""Says which cells XLA compiles: all of a model, or none.

Keras compiles its step where a device is an accelerator and all layers support
it. A `GPipe` does the same with its cells, by default. XLA draws other random
numbers from a seed than TensorFlow does: if only some cells were compiled, bits
would follow from the number of cells.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from tfgpipe import internals
from tfgpipe.arguments import Arguments
from tfgpipe.devices import names
from tfgpipe.failures import inform
from tfgpipe.graphs import NotCompilable
from tfgpipe.model.build import regrouped
from tfgpipe.model.description import Description


class Compilation(Description):
    """The part of `GPipe` that knows `jit_compile`."""

    def __init__(self, arguments: Arguments, **kwargs: object):
        super().__init__(arguments, **kwargs)
        self._jit_cells: bool | str = False
        self._is_refused_by_xla = False

    @property
    def jit_compile(self) -> bool:
        """Always False, as XLA must not compile the step as a whole.

        `compile(jit_compile=...)` says whether it compiles each cell: True,
        False, or "auto", the default: where a cell is on an accelerator and
        Keras would compile the model. On a TPU, cells are compiled in any
        case.
        """
        return False

    @jit_compile.setter
    def jit_compile(self, value: Any) -> None:
        # Not called with what it is, False, which `compile` says once more.
        self.compile_cells(value)

    def compile_cells(self, value: bool | str) -> None:
        """Takes the `jit_compile` that the user says."""
        self._jit_cells = value
        self._is_refused_by_xla = False
        if value is True and not internals.supports_jit(self):
            self._jit_cells = False
            warnings.warn(  # in Keras's words
                "Model doesn't support `jit_compile=True`. "
                "Proceeding with `jit_compile=False`.",
                stacklevel=2,
            )
        self.group_for(self.compiles)

    def group_for(self, compiles: bool) -> None:
        """Gives cells the groups of layers that XLA compiles, or others."""
        if self._built is not None and self._built.compiles != compiles:
            self._built = regrouped(self._arguments, self._built, compiles)

    @property
    def compiles(self) -> bool:
        """Returns whether XLA compiles the cells, as far as is known."""
        if self.compiles_by_default:
            return self.would_compile()
        return bool(self._jit_cells)

    @property
    def compiles_by_default(self) -> bool:
        """Returns whether nobody has said if XLA compiles the cells."""
        return self._jit_cells == "auto"

    def would_compile(self) -> bool:
        """Returns whether Keras would compile the model on its devices."""
        devices = (d for row in self._arguments.grid for d in row)
        return (
            names.has_accelerator(devices)
            and not self._is_refused_by_xla
            and internals.supports_jit(self)
        )

    def compiled_if_possible(
        self, make: Callable[[bool], Any], is_eager: bool
    ) -> Any:
        """Returns what a function makes that is told whether XLA compiles.

        `is_eager` is whether Python runs the model first: then it does not.
        By default, a model that XLA cannot compile is left as it is, as a whole
        and from then on: XLA draws other random numbers from a seed, so bits
        would follow from the cells that it compiles.
        """
        compiles = self.compiles and not is_eager
        self.group_for(compiles)
        try:
            return make(compiles)
        except NotCompilable as error:
            if not self.compiles_by_default:
                raise
            inform(
                f"XLA compiles no cell of '{self.name}'. {error.layer}: "
                f"{error.cause}."
            )
            self._is_refused_by_xla = True
            self.group_for(False)
            return make(False)
