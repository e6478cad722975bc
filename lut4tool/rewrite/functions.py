"""Bodies of the ai.lut4tool operators in standard ONNX: with them, any ONNX runtime runs a rewritten model.

Importing this module imports onnxscript (about half a second), so it is imported only where something is rewritten.
"""

# mypy: ignore-errors
# (onnxscript reads the bodies as graphs; as Python their calls have no types that fit)

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx
from onnxscript import opset13 as op
from onnxscript import script
from onnxscript.values import Opset

from lut4tool import formats
from lut4tool.rewrite.edit import RewriteError

#: The default-domain versions that the bodies are valid at.
FIRST_OPSET, LAST_OPSET = 13, 28


@script(Opset(formats.DOMAIN, formats.VERSION), default_opset=op)
def Lookup4MatMul(  # noqa: N802, the operator's name
    X,
    packed,
    scales,
    codebook,
    rows: int,
    cols: int,
    block_size: int,
    perm: Sequence[int],
    high_nibble_first: int,
    weight_dtype: int,
    dtype: int,
):
    """X times the weight decoded from 4-bit codes of a codebook, by blocks of the flattened weight."""
    # A 256 x 2 table: both codebook entries of a byte, in element order.
    entries = op.Cast(codebook, to=1)
    square = op.Constant(value_ints=[16, 16])
    high = op.Reshape(
        op.Expand(op.Reshape(entries, op.Constant(value_ints=[16, 1])), square), op.Constant(value_ints=[256, 1])
    )
    low = op.Reshape(
        op.Expand(op.Reshape(entries, op.Constant(value_ints=[1, 16])), square), op.Constant(value_ints=[256, 1])
    )
    one = op.Constant(value_ints=[1])
    second = op.Reshape(op.Constant(value_int=high_nibble_first), one)
    order = op.Concat(op.Sub(one, second), second, axis=0)
    pairs = op.Gather(op.Concat(high, low, axis=1), order, axis=1)

    # packed may end with the last element: pad it to whole blocks.
    row_count = op.Reshape(op.Constant(value_int=rows), one)
    col_count = op.Reshape(op.Constant(value_int=cols), one)
    size = op.Reshape(op.Constant(value_int=block_size), one)
    count = op.Mul(row_count, col_count)
    blocks = op.Shape(scales)
    whole = op.Div(op.Mul(blocks, size), op.Constant(value_ints=[2]))
    zero = op.Constant(value_ints=[0])
    padded = op.Pad(packed, op.Concat(zero, op.Sub(whole, op.Shape(packed)), axis=0))

    elements = op.Reshape(op.Gather(pairs, op.Cast(padded, to=6), axis=0), op.Concat(blocks, size, axis=0))
    product = op.Mul(elements, op.Unsqueeze(op.Cast(scales, to=1), one))
    rounded = op.Cast(op.Cast(product, to=weight_dtype), to=dtype)
    flat = op.Slice(op.Reshape(rounded, op.Constant(value_ints=[-1])), zero, count, zero)
    weight = op.Transpose(op.Reshape(flat, op.Concat(row_count, col_count, axis=0)), perm=perm)
    Y = op.MatMul(X, weight)
    return Y  # noqa: RET504, the output's name


@script(Opset(formats.DOMAIN, formats.VERSION), default_opset=op)
def QMM(  # noqa: N802, the operator's name
    X,
    packed,
    scales,
    zero_points,
    K: int,
    N: int,
    bits: int,
    block_size: int,
    weight_dtype: int,
    dtype: int,
):
    """X times the transposed 4-bit affine weight, by blocks along K."""
    # A 2^bits x 2^bits table of both codes of a byte, low nibble first.
    one = op.Constant(value_ints=[1])
    axis = op.Constant(value_ints=[-1])
    zero = op.Constant(value_int=0)
    levels = op.Pow(op.Constant(value_int=2), op.Constant(value_int=bits))
    codes = op.Cast(op.Range(zero, levels, op.Constant(value_int=1)), to=1)
    square = op.Concat(op.Reshape(levels, one), op.Reshape(levels, one), axis=0)
    low = op.Reshape(op.Expand(op.Unsqueeze(codes, op.Constant(value_ints=[0])), square), axis)
    high = op.Reshape(op.Expand(op.Unsqueeze(codes, one), square), axis)
    pairs = op.Concat(op.Unsqueeze(low, one), op.Unsqueeze(high, one), axis=1)

    columns = op.Reshape(op.Constant(value_int=K), one)
    rows = op.Reshape(op.Constant(value_int=N), one)
    size = op.Reshape(op.Constant(value_int=block_size), one)
    elements = op.Reshape(op.Gather(pairs, op.Cast(packed, to=6), axis=0), op.Concat(op.Shape(scales), size, axis=0))
    steps = op.Sub(elements, op.Unsqueeze(op.Cast(zero_points, to=1), axis))
    halves = op.Cast(op.Cast(steps, to=weight_dtype), to=1)
    product = op.Mul(halves, op.Unsqueeze(op.Cast(scales, to=1), axis))
    rounded = op.Cast(op.Cast(product, to=weight_dtype), to=dtype)
    padded = op.Reshape(rounded, op.Concat(rows, axis, axis=0))
    weight = op.Slice(padded, op.Reshape(zero, one), columns, one)
    Y = op.MatMul(X, op.Transpose(weight, perm=[1, 0]))
    return Y  # noqa: RET504, the output's name


_BODIES = {formats.LOOKUP4_MATMUL: Lookup4MatMul, formats.QMM: QMM}


@functools.cache
def _written(name: str) -> onnx.FunctionProto:
    return _BODIES[name].to_function_proto()


def body(name: str, opset: int) -> onnx.FunctionProto:
    """Return the body of ai.lut4tool::`name` for a model that imports the default domain at version `opset`.

    onnx.checker wants the versions of a model and its functions to be equal. Raises RewriteError outside 13 to 28.
    """
    if not FIRST_OPSET <= opset <= LAST_OPSET:
        raise RewriteError(
            f"the model imports opset {opset}; the body of {name} is valid at opset {FIRST_OPSET} to {LAST_OPSET}"
        )
    function = onnx.FunctionProto()
    function.CopyFrom(_written(name))
    function.opset_import[0].version = opset
    return function


def is_ours(function: onnx.FunctionProto) -> bool:
    """Whether a model's function of our domain is the body that this lut4tool writes, at the function's own opset."""
    versions = [entry.version for entry in function.opset_import if entry.domain in ("", "ai.onnx")]
    if function.name not in _BODIES or len(versions) != 1 or not FIRST_OPSET <= versions[0] <= LAST_OPSET:
        return False
    ours = body(function.name, versions[0])
    return function.SerializeToString(deterministic=True) == ours.SerializeToString(deterministic=True)
