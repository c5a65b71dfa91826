"""Counts the floating-point operations (FLOPs) of a TensorFlow graph.

| operation | FLOPs |
| --- | --- |
| matrix products, einsum, convolutions | 2 per multiply-add, padding included |
| pooling | the window, per output element |
| sums and other reductions | 1 per input element |
| softmax | 5 per element |
| moving, copying, casting, looking up | 0 |
| everything else on floats | 1 per output element |
| loops | the number of iterations times the body |
| branches | the most expensive one |

Only operations that the graph's outputs need are counted. What
`tf.compat.v1.profiler` knows it counts alike, except for a few elementwise
operations and the borders of transposed convolutions; it does not know einsum,
loops, branches, called functions and unknown dimensions.

Limits: an unknown dimension counts as 1, and so does a loop whose number of
iterations is unknown; what Python or NumPy compute inside a `tf.numpy_function`
is not seen. What cannot be read, such as functions of TensorFlow's old kind,
counts as 1 per output element: a count never fails. FLOPs are not seconds:
where that matters, measure.

Cost: one visit of every operation.

Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), sections 2.1
and 2.2, balances cells by such an estimate of each layer.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfgpipe import internals

_MOVES = frozenset(
    """
    BatchToSpaceND Bitcast BroadcastTo Cast CheckNumerics Concat ConcatV2 Const
    DepthToSpace DynamicPartition DynamicStitch Empty EnsureShape ExpandDims
    ExtractImagePatches Fill Gather GatherNd GatherV2 Identity IdentityN
    LinSpace MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV2
    MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixSetDiag MatrixSetDiagV3
    MirrorPad OneHot OnesLike Pack Pad PadV2 Placeholder PreventGradient Print
    PrintV2 Range ReadVariableOp Reshape ResizeNearestNeighbor ResourceGather
    ResourceGatherNd Reverse ReverseSequence ReverseV2 Roll Shape ShapeN Size
    Slice SpaceToBatchND SpaceToDepth Split SplitV Squeeze StopGradient
    StridedSlice TensorListFromTensor TensorListGather TensorListGetItem
    TensorListReserve TensorListSetItem TensorListStack TensorScatterUpdate Tile
    Transpose Unpack ZerosLike
    """.split()
)

_REDUCTIONS = frozenset(
    """
    All Any ArgMax ArgMin EuclideanNorm L2Loss Max Mean Min Prod SegmentMax
    SegmentMean SegmentMin SegmentProd SegmentSum Sum TopKV2 UnsortedSegmentMax
    UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum
    """.split()
)

# By type: the attribute that transposes the first matrix.
_MATRIX_PRODUCTS = {
    "MatMul": "transpose_a",
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), "adj_x"),
}

# By type: how many of the filter's dimensions are summed over per output; or
# how many of them each input of a transposed one is multiplied by.
_CONVOLUTIONS = {
    "Conv2D": 3,
    "Conv3D": 4,
    "DepthwiseConv2dNative": 2,
    "Conv2DBackpropInput": 3,
    "Conv3DBackpropInput": 4,
    "Conv3DBackpropInputV2": 4,
    "DepthwiseConv2dNativeBackpropInput": 3,
}

_CALLED = ("f", "then_branch", "else_branch", "branches")


def graph_flops(graph: tf.Graph) -> float:
    """Counts the FLOPs that the outputs of a concrete function's graph need.

    Those of one run; unknown dimensions count as 1.

    Example:

    >>> @tf.function(input_signature=[tf.TensorSpec((2, 3))])
    ... def product(x):
    ...     return tf.matmul(x, tf.ones((3, 5)))
    >>> graph_flops(product.get_concrete_function().graph)
    60.0
    """
    needed = internals.ancestors(graph.outputs, controls=lambda _: True)
    return sum(map(operation_flops, needed.values()), start=0.0)


def operation_flops(op: tf.Operation) -> float:
    """Counts FLOPs of one operation; unknown dimensions count as 1."""
    try:
        return _flops(op)
    except Exception:  # no training fails for what it costs
        return float(sum(map(num_values, op.outputs)))


def _flops(op: tf.Operation) -> float:
    if op.type in ("StatelessWhile", "While"):
        functions = [op.get_attr("cond"), op.get_attr("body")]
        condition, body = _function_graphs(op, functions)
        counts = _iterations(op, condition.outputs[0], condition)
        each = graph_flops(condition) + graph_flops(body)
        return min(counts, default=1) * each
    attributes = op.node_def.attr
    called = [op.get_attr(name) for name in _CALLED if name in attributes]
    if called:
        return max(map(graph_flops, _function_graphs(op, called)))
    kinds = [t.dtype for t in [*op.inputs, *op.outputs]]
    if op.type in _MOVES or not any(
        kind.is_floating or kind.is_complex for kind in kinds
    ):
        return 0.0
    return float(_float_flops(op))


def _float_flops(op: tf.Operation) -> int:
    if op.type in _MATRIX_PRODUCTS:
        # (m, n) x (n, k): a product and a sum for each of m, n and k.
        rows_and_columns = (_dims(op.inputs[0]) or [1, 1])[-2:]
        transposed = op.get_attr(_MATRIX_PRODUCTS[op.type])
        return 2 * num_values(op.outputs[0]) * rows_and_columns[not transposed]
    if op.type == "Einsum":
        return _einsum_flops(op)
    if op.type in _CONVOLUTIONS:
        # Inputs of transposed ones: shape, filter (..., out, in), images.
        window = _dims(op.inputs[1])[: _CONVOLUTIONS[op.type]]
        each = op.inputs[2] if "Backprop" in op.type else op.outputs[0]
        return 2 * num_values(each) * math.prod(window)
    if op.type.startswith("CudnnRNN"):
        # inputs: (time, batch, in), states, all weights in one vector
        steps = math.prod(_dims(op.inputs[0])[:2])
        return 2 * steps * num_values(op.inputs[3])
    if op.type in ("AvgPool", "AvgPool3D", "MaxPool", "MaxPool3D"):
        return num_values(op.outputs[0]) * math.prod(op.get_attr("ksize"))
    if op.type in ("LogSoftmax", "Softmax"):
        return 5 * num_values(op.outputs[0])
    if op.type in _REDUCTIONS:
        return num_values(op.inputs[0])
    if op.type == "AddN":
        return (len(op.inputs) - 1) * num_values(op.outputs[0])
    return num_values(op.outputs[0]) if op.outputs else 0


def _einsum_flops(op: tf.Operation) -> int:
    terms, result = op.get_attr("equation").decode().split("->")
    # Labels that the result lacks are summed over: b, of "ab,bc->ac".
    summed: dict[str, int] = {}
    for term, tensor in zip(terms.split(","), op.inputs):
        # Before an ellipsis axes count from the front, after it from the end.
        left, _, right = term.partition("...")
        dims = _dims(tensor)
        sizes = dict(zip(left, dims)) | dict(zip(right[::-1], dims[::-1]))
        for label, size in sizes.items():
            if label not in result:
                summed[label] = max(size, summed.get(label, 1))
    products = num_values(op.outputs[0]) * math.prod(summed.values())
    if len(op.inputs) == 1:
        return products if summed else 0  # a sum, or a transposition
    return 2 * products if summed else products


def _iterations(op: tf.Operation, test: tf.Tensor, condition: Any) -> list[int]:
    """Upper bounds of a loop's iterations: one per known `counter < limit`.

    Counters are taken to grow by 1.
    """
    test = behind_identities(test)
    if test.op.type == "LogicalAnd":
        sides = [_iterations(op, t, condition) for t in test.op.inputs]
        return sides[0] + sides[1]
    if test.op.type != "Less" or not test.op.inputs[0].dtype.is_integer:
        return []
    given = {id(t): taken for t, taken in zip(condition.inputs, op.inputs)}
    sides = [behind_identities(t) for t in test.op.inputs]
    start, stop = (_static(given.get(id(t), t)) for t in sides)
    if start is None or stop is None or id(sides[0]) not in given:
        return []
    return [max(0, int(stop - start))]


def behind_identities(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that this one is an identity of; or itself."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _static(tensor: tf.Tensor) -> Any:
    """The value of a scalar, if that is known while tracing."""
    value = tf.get_static_value(tensor)
    if value is None and tensor.op.type == "Max":
        # The largest length of several sequences, which Keras's RNNs run for.
        value = tf.get_static_value(tensor.op.inputs[0])
        return None if value is None else value.max()
    return value


def _dims(tensor: tf.Tensor) -> list[int]:
    if tensor.shape.rank is None:
        return []
    return [1 if size is None else size for size in tensor.shape]


def num_values(tensor: tf.Tensor) -> int:
    """Numbers in a tensor, of which unknown sizes count as 1."""
    return math.prod(_dims(tensor))


# Where their number is unknown, and so counts as 1.
LIKELY_ROWS = 32


def _function_graphs(op: tf.Operation, called: list[Any]) -> list[Any]:
    """The graphs of the functions that an operation calls."""
    functions = tf.nest.flatten(called)
    return [internals.function_graph(op, one.name) for one in functions]
