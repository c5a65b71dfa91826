"""What crosses devices in a step."""

import tensorflow as tf
from tensorflow.python.eager import context

RESOURCE = tf.resource.as_datatype_enum


def short(device):
    return device.removeprefix("/job:localhost/replica:0/task:0")


def sent_tensors(model, x, y):
    """All that crosses devices in one step: (from, to, shape, name).

    Read from the graphs that TensorFlow's executors run, one a device. They
    do not know the shapes of what they send, so those are looked up in the
    graph that was traced. The functions that the step calls must stay on the
    device that calls them.
    """
    model.prepare(tf.constant(x), tf.constant(y), None, True)
    traced = tf.function(model.train_step, autograph=False)
    concrete = traced.get_concrete_function((tf.constant(x), tf.constant(y)))
    context.enable_graph_collection()
    try:
        concrete(tf.constant(x), tf.constant(y))
        graphs = context.context().export_run_metadata().function_graphs
    finally:
        context.disable_graph_collection()
    _check_calls(concrete.graph)
    (step,) = graphs
    found = []
    for partition in step.partition_graphs:
        nodes = {node.name: node for node in partition.node}
        for node in partition.node:
            if node.op not in ("_Send", "_HostSend"):
                continue
            name, _, index = node.input[0].partition(":")
            found.append(
                (
                    node.attr["send_device"].s.decode()[-5:],
                    node.attr["recv_device"].s.decode()[-5:],
                    _shape(concrete.graph, nodes[name], int(index or 0)),
                    name,
                )
            )
    return found


def _check_calls(graph):
    """What the step calls names no device, but a host's CPU, any.

    Else it would run there, whoever calls it. These graphs are not among those
    that TensorFlow shows.
    """
    definition = graph.as_graph_def()
    functions = {f.signature.name: f for f in definition.library.function}
    calls = {
        node.attr["f"].func.name
        for nodes in (
            definition.node,
            *(f.node_def for f in functions.values()),
        )
        for node in nodes
        if "PartitionedCall" in node.op
    }
    assert calls
    for name in calls:
        devices = {node.device for node in functions[name].node_def}
        assert devices <= {"", "/device:CPU:*"}, name


_OF_OPTIMIZER = ("RealDiv", "Sum", "Mul", "AddV2", "All", "ReadVariableOp")


def _shape(graph, node, index):
    if node.op == "Const":
        return tuple(d.size for d in node.attr["value"].tensor.tensor_shape.dim)
    name = node.name.split("/cond/then/_0/")[-1]
    for candidate in (node.name, name):
        try:
            outputs = graph.get_operation_by_name(candidate).outputs
        except KeyError:
            continue
        num_left = len(node.attr["Tout"].list.type)
        if 0 < num_left < len(outputs):  # those that nothing takes are gone
            outputs = [t for t in outputs if t.consumers()]
            assert len(outputs) == num_left
        return tuple(outputs[index].shape)
    shapes = node.attr["_output_shapes"].list.shape
    if shapes:
        return tuple(d.size for d in shapes[index].dim)
    if "PartitionedCall" in node.op or node.op in _OF_OPTIMIZER:
        return ()  # inside a branch of the optimizer: checked by its bytes
    raise AssertionError(f"unknown shape: {node.name} ({node.op})")


def partitions(function, *args):
    """The graphs that run when a function is called for the first time.

    One for each device, as dicts of nodes by name.
    """
    context.enable_graph_collection()
    try:
        function(*args)
        graphs = context.context().export_run_metadata().function_graphs
    finally:
        context.disable_graph_collection()
    return [
        {node.name: node for node in partition.node}
        for graph in graphs
        for partition in graph.partition_graphs
    ]


def loop_sends(function, *args):
    """What crosses devices inside of loops, and outside.

    Each as the nodes of the device that it is sent from, the name of what
    computes it, and its dtype.
    """
    inside, outside = [], []
    for nodes in partitions(function, *args):
        for node in nodes.values():
            if node.op in ("_Send", "_HostSend"):
                source = node.input[0].removeprefix("^").partition(":")[0]
                found = nodes, source, tf.as_dtype(node.attr["T"].type)
                (inside if "while" in source else outside).append(found)
    return inside, outside


def sent_weights(function, *args):
    """What crosses devices and is made of variables alone: (sends, names)."""
    found, count = [], 0
    for nodes in partitions(function, *args):
        for node in nodes.values():
            if node.op in ("_Send", "_HostSend"):
                count += 1
                ops = ancestors(nodes, node.input[0])
                if "ReadVariableOp" in ops and not ops & {"_Recv", "_HostRecv"}:
                    found.append(node.input[0])
    return count, found


def ancestors(nodes, name):
    """The kinds of operations that a tensor is computed by, on its device.

    What comes as an argument is data, as what comes from other devices is,
    unless it is a variable.
    """
    ops = set()
    for node in map(nodes.get, reached(nodes, [name], controls=False)):
        is_data = node.op == "_Arg" and node.attr["T"].type != RESOURCE
        ops.add("_Recv" if is_data else node.op)
    return ops


def reached(nodes, names, controls=True):
    """Names of nodes that come before some, or are waited for, and of these."""
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name.startswith("^") and not controls:
            continue
        name = name.removeprefix("^").partition(":")[0]
        if name not in seen and name in nodes:
            seen.add(name)
            waiting += nodes[name].input
    return seen
