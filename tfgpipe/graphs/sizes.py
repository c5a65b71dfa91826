"""The sizes in a model's graph that follow from those of its inputs.

A graph is made for any number of rows, and says little behind operations that
turn one row into several. In a copy of it whose inputs have sizes, TensorFlow
infers all others. Nothing runs, and no Python of the model.
"""

from __future__ import annotations

import tensorflow as tf

from tfgpipe.graphs.traced_model import TracedModel


def operations_for(
    traced: TracedModel, rows: int, size: int | None
) -> dict[str, tf.Operation] | None:
    """The operations by their names, in a copy for so many rows.

    Sizes that are not known become `size`, or stay unknown if that is None.
    None if the operations do not take these sizes.
    """
    graph = tf.Graph()
    given = {}
    with graph.as_default(), tf.name_scope("inputs_with_sizes"):
        for tensor in traced.x:
            if tensor is None or not tensor.shape.rank:
                continue
            first, *others = tensor.shape.as_list()
            shape = [first or rows, *(n or size for n in others)]
            given[tensor.name] = tf.compat.v1.placeholder(tensor.dtype, shape)
    try:
        with graph.as_default():
            # With what Python said of shapes, by `set_shape`.
            definition = traced.graph.as_graph_def(add_shapes=True)
            tf.graph_util.import_graph_def(definition, given, name="")
    except (ValueError, tf.errors.OpError):
        return None
    return {op.name: op for op in graph.get_operations()}
