"""A function cut out of a graph, see `subgraph.py`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells.bundle import Bundle


class Subfunction:
    """A function cut out of a graph.

    Args:
        concrete: The function.
        inputs: What it takes of the graph.
        fetches: What it returns.
        captures: Tensors outside of the graph, by the reference of the graph's
            own.
    """

    def __init__(
        self,
        concrete: Any,
        inputs: list[tf.Tensor | Bundle],
        fetches: Sequence[tf.Tensor | Bundle],
        captures: Mapping[Any, Any],
    ):
        self._call = internals.Call(concrete, as_written=True)
        self.inputs = inputs
        self._fetches = fetches
        self._captures = captures

    def __call__(
        self, values: Mapping[Any, Any], sums: Sequence[tf.Tensor] = ()
    ) -> list[Any]:
        """Calls the function.

        Args:
            values: By the references of the graph's tensors; those of a
                bundle, packed, by the bundle.
            sums: The sums so far, packed.

        Returns:
            The fetches' values; for a bundle, a list of what is packed.
        """
        arguments: list[tf.Tensor] = []
        for one in self.inputs:
            if isinstance(one, Bundle):
                arguments += values[one]
            elif one.ref() in values:
                arguments.append(values[one.ref()])
            else:
                arguments.append(self._captures[one.ref()])
        results = iter(self._call([*arguments, *sums]))
        return [
            list(itertools.islice(results, fetch.num_packed))
            if isinstance(fetch, Bundle)
            else next(results)
            for fetch in self._fetches
        ]
