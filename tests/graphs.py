"""Looks into traced graphs: the calls in a step, and what is called."""

import tensorflow as tf

from tfgpipe import internals


def step_graph(model, x, y):
    """The traced training step of a compiled model."""
    x, y = tf.constant(x), tf.constant(y)
    model.prepare(x, y, None, True)
    step = tf.function(model.train_step, autograph=False)
    return step.get_concrete_function((x, y)).graph


def is_task(op):
    """Whether an operation calls a task of a cell.

    TensorFlow's graph optimiser is off there and in updates, which take
    variables or scalars.
    """
    if "PartitionedCall" not in op.type or is_of_update(op):
        return False
    config = tf.compat.v1.ConfigProto.FromString(op.get_attr("config_proto"))
    return config.graph_options.rewrite_options.disable_meta_optimizer


def is_of_update(op):
    """Whether an operation calls a part of an update."""
    return any(t.dtype == tf.resource for t in op.inputs)


def tasks(graph):
    """The calls of the tasks of all cells, in the order of their tracing."""
    return [op for op in graph.get_operations() if is_task(op)]


def called(op):
    """The name of the function that a call calls."""
    return op.get_attr("f").name


def operations(graph):
    """The operations of a graph and of all functions that it calls."""
    found, waiting = [], [graph]
    while waiting:
        for op in waiting.pop().get_operations():
            found.append(op)
            if "PartitionedCall" in op.type:
                waiting.append(internals.function_graph(op, called(op)))
    return found


def types(graph):
    """Types of all these operations but those that only call or hand on."""
    handing_on = {"Identity", "NoOp", "Placeholder"}
    return [
        op.type
        for op in operations(graph)
        if op.type not in handing_on and "PartitionedCall" not in op.type
    ]
