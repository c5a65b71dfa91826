"""Every operation of a step has a kernel for GPUs, by TensorFlow's registry.

It knows them on any machine. What it says nothing of: which arguments a kernel
wants in the host's memory, and how fast it is.
"""

import collections

import compiled_device
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

import tfgpipe

KERNELS = collections.defaultdict(list)
for _kernel in kernels.get_all_registered_kernels().kernel:
    KERNELS[_kernel.op].append(_kernel)
# The runtime runs them itself, on any device.
RUNTIME = {
    "Case",
    "Const",
    "Identity",
    "IdentityN",
    "If",
    "NoOp",
    "PartitionedCall",
    "Placeholder",
    "StatefulPartitionedCall",
    "StatelessCase",
    "StatelessIf",
    "StatelessWhile",
    "While",
}
# Placed on the host by name.
ON_HOST = {"VariableV2"}
QUICK = ("dense", "zero_bubble", "masks", "recurrent", "convolution")


def has_kernel(node):
    """Whether a GPU, or any device, has one for the types of a node."""
    if node.op in RUNTIME | ON_HOST:
        return True
    return any(
        kernel.device_type in ("GPU", "DEFAULT")
        and all(
            node.attr[one.name].type in one.allowed_values.list.type
            for one in kernel.constraint
            if node.attr[one.name].type
        )
        for kernel in KERNELS[node.op]
    )


def without_kernels(function, *arguments):
    """The operations of a function, and of those it calls, that have none."""
    traced = tf.function(function, autograph=False)
    concrete = traced.get_concrete_function(*arguments)
    definition = concrete.graph.as_graph_def()
    nodes = [*definition.node]
    nodes += [n for f in definition.library.function for n in f.node_def]
    assert len(nodes) > 20
    return {node.op for node in nodes if not has_kernel(node)}


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in compiled_device.CASES
        if name != "saved"
    ],
)
def test_gpus_run_every_operation(name):
    make, x, optimizer, options = compiled_device.CASES[name]
    arguments = {"num_micro_batches": 2, **options, "devices": ["CPU:0"]}
    if options.get("devices") != [0]:
        arguments["devices"] = ["CPU:0", "CPU:1"]
    model = tfgpipe.GPipe(make(), len(arguments["devices"]), **arguments)
    model.compile(optimizer(), "mse", metrics=["mae"], jit_compile=False)
    batch = tf.constant(x[:4]), tf.constant(compiled_device.Y[:4])
    model.fit(*map(np.asarray, batch), batch_size=4, verbose=0)
    model.prepare(*batch, None, True)
    found = without_kernels(model.train_step, batch)
    found |= without_kernels(model.test_step, batch)
    found |= without_kernels(model.predict_step, (batch[0],))
    assert not found


def test_what_has_no_kernel_is_found():
    node = tf.compat.v1.NodeDef(op="StringLength")
    assert not has_kernel(node)
    node = tf.compat.v1.NodeDef(op="MatMul")
    node.attr["T"].type = tf.float32.as_datatype_enum
    assert has_kernel(node)
    node.attr["T"].type = tf.string.as_datatype_enum
    assert not has_kernel(node)
