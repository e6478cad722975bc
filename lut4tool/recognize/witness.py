"""The witness: the producer's own nodes are run on the real bytes, and must give what the proof says, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from lut4tool import native
from lut4tool.errors import Lut4Error
from lut4tool.formats import DTYPE_NAME, FLOAT_DTYPES, Lookup4Weight
from lut4tool.recognize.proof import Proof, Witness
from lut4tool.storage import Tensors

#: Up to so many elements the whole chain is run; of more, sampled blocks.
WHOLE_ELEMENTS = 1 << 20
_SAMPLES = 16
#: Elements run at a time where every block is compared: onnx.reference's int64 temporaries stay near 20 MB.
_CHUNK_ELEMENTS = 1 << 18
#: A longer block than that is run in pieces of at most so many elements, all with its scale.
_PIECE_ELEMENTS = 1 << 12

Progress = Callable[[str, int, int], None]


class WitnessMismatch(Lut4Error):  # noqa: N818 - the command line's exit 4, not a fault of the user's input
    """The producer's nodes gave something else than a proof says: a fault in lut4tool, so nothing is rewritten."""


def check(proof: Proof, tensors: Tensors, *, full: bool = False, progress: Progress | None = None) -> Witness:
    """Run the proved chain in onnx.reference on its real constants and compare with lut4tool's decode, bit for bit.

    At most 2^20 elements: the whole chain, casts and Transpose included. More: the nodes up to the product by the
    scales, on the first, the last, a row-crossing and 16 random blocks (`full`: on every block, streamed); what comes
    after them is proved from literals. Blocks past 2^18 elements are run in pieces: the literal of the Reshape to
    blocks, proved too, says a piece's size then. A NaN equals a NaN. For a function's formal inputs, the first call's
    constants.
    progress: called now and then with (what, elements done, elements).
    Raises WitnessMismatch, and StorageError where the constants cannot be read.
    """
    weight = _weight(proof, tensors)
    elements = proof.rows * proof.cols
    if elements <= WHOLE_ELEMENTS and weight.blocks * weight.block_size <= 2 * WHOLE_ELEMENTS:
        evaluator = _evaluator(proof, proof.weight)
        _compare(proof, _run(proof, evaluator, weight.packed, weight.scales, weight), _decoded(proof, weight))
        return Witness(elements, elements)
    cut = weight.block_size > _CHUNK_ELEMENTS and len(set(proof.inputs[1:])) == 3
    size = math.gcd(weight.block_size, _PIECE_ELEMENTS) if cut else weight.block_size
    evaluator, compared = _evaluator(_in_pieces(proof, size) if cut else proof, proof.product.output[0]), 0
    for blocks in _chunks(proof, weight, size, full):
        part = _part(weight, blocks, size)
        products = _run(proof, evaluator, part.packed, part.scales, weight)
        _compare(proof, products, _products(weight, blocks, size))
        compared += sum(min((int(block) + 1) * size, elements) - int(block) * size for block in blocks)
        if progress:
            progress("checking weights", compared, elements)
    return Witness(compared, elements)


def _weight(proof: Proof, tensors: Tensors) -> Lookup4Weight:
    """The proved weight with its real constants, as the attributes of the new node describe it."""
    arrays = {role: tensors.array(tensor) for role, tensor in proof.tensors.items()}
    facts: Mapping[str, Any] = proof.attributes
    return Lookup4Weight(
        **arrays,
        rows=facts["rows"],
        cols=facts["cols"],
        block_size=facts["block_size"],
        perm=tuple(facts["perm"]),
        high_nibble_first=bool(facts["high_nibble_first"]),
        weight_dtype=DTYPE_NAME[facts["weight_dtype"]],
    )


def _decoded(proof: Proof, weight: Lookup4Weight) -> np.ndarray:
    """The matrix that the product multiplies by, in its type, decoded by lut4tool."""
    flat = native.decode_elements(weight, 0, weight.rows * weight.cols)
    facts: Mapping[str, Any] = proof.attributes
    dtype = FLOAT_DTYPES[DTYPE_NAME[facts["dtype"]]]
    return flat.reshape(weight.rows, weight.cols).astype(dtype, copy=False).transpose(weight.perm)


def _part(weight: Lookup4Weight, blocks: np.ndarray, size: int) -> Lookup4Weight:
    """Some blocks of a weight, or pieces of `size` elements, as a float32 weight of a row each."""
    return replace(
        weight,
        packed=weight.packed.reshape(-1, size // 2)[blocks].reshape(-1),
        scales=weight.scales[blocks * size // weight.block_size],
        rows=len(blocks),
        cols=size,
        block_size=size,
        weight_dtype="float32",
    )


def _products(weight: Lookup4Weight, blocks: np.ndarray, size: int) -> np.ndarray:
    """Entries times scales of the same blocks or pieces, float32 [blocks, size], decoded by lut4tool."""
    return native.decode_elements(_part(weight, blocks, size), 0, len(blocks) * size).reshape(-1, size)


def _in_pieces(proof: Proof, size: int) -> Proof:
    """The proof whose chain's literal [-1, block], the shape of the Reshape to blocks, says [-1, size]."""
    before, after = [-1, proof.block_size], numpy_helper.from_array(np.array([-1, size]))

    def is_shape(tensor: TensorProto) -> bool:
        return tensor.data_type == TensorProto.INT64 and numpy_helper.to_array(tensor).tolist() == before

    chain = []
    for node in proof.chain:
        held = node.attribute[0] if node.op_type == "Constant" else None
        if held is not None and (list(held.ints) == before or (held.HasField("t") and is_shape(held.t))):
            node = helper.make_node("Constant", [], node.output, node.name, value=after)
        chain.append(node)
    literals = {name: after if is_shape(tensor) else tensor for name, tensor in proof.literals.items()}
    return replace(proof, chain=tuple(chain), literals=literals)


def _chunks(proof: Proof, weight: Lookup4Weight, size: int, full: bool) -> Iterator[np.ndarray]:
    """Indices of the blocks (or pieces) of `size` elements to compare, a bounded number at a time."""
    count = -(-weight.rows * weight.cols // size)
    if len(set(proof.inputs[1:])) < 3:  # one tensor serves as scales and codebook: it cannot be cut
        yield np.arange(count)
    elif full:
        step = max(1, _CHUNK_ELEMENTS // size)
        for start in range(0, count, step):
            yield np.arange(start, min(start + step, count))
    else:
        crossing = weight.cols // size  # row 1 begins in this block
        drawn = np.random.default_rng(0).integers(0, count, _SAMPLES)
        yield np.unique([0, crossing, count - 1, *drawn])


def _evaluator(proof: Proof, output: str) -> Any:
    """onnx.reference on the chain's nodes up to one value; packed, scales and codebook are its inputs."""
    from onnx.reference import ReferenceEvaluator

    wanted, nodes = {output}, []
    for node in reversed(proof.chain):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            nodes.append(_standard(node))
    literals = [_named(tensor, name) for name, tensor in proof.literals.items() if name in wanted]
    inputs = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in set(proof.inputs[1:])]
    graph = helper.make_graph(nodes[::-1], "chain", inputs, [onnx.ValueInfoProto(name=output)], literals)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", proof.opset)])
    try:
        return ReferenceEvaluator(model)
    except Exception as error:
        raise WitnessMismatch(f"the chain of '{proof.site.name}' cannot be run in onnx.reference: {error}") from error


def _run(proof: Proof, evaluator: Any, packed: np.ndarray, scales: np.ndarray, weight: Lookup4Weight) -> np.ndarray:
    feeds = dict(zip(proof.inputs[1:], (packed, scales, weight.codebook), strict=True))
    try:
        with np.errstate(all="ignore"):  # Inf * 0 and overflow are the producer's values
            return np.asarray(evaluator.run(None, feeds)[0])
    except Exception as error:
        raise WitnessMismatch(f"the chain of '{proof.site.name}' fails in onnx.reference: {error}") from error


def _compare(proof: Proof, found: np.ndarray, expected: np.ndarray) -> None:
    """Raise WitnessMismatch unless type, shape and bits are equal, a NaN for a NaN."""
    name = proof.site.name
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise WitnessMismatch(
            f"the weight of '{name}' is {found.dtype} {list(found.shape)} in onnx.reference, "
            f"but was proved to be {expected.dtype} {list(expected.shape)}; nothing is rewritten"
        )
    bits = np.dtype(f"u{found.dtype.itemsize}")
    differ = np.ascontiguousarray(found).view(bits) != np.ascontiguousarray(expected).view(bits)
    differ &= ~(np.isnan(found) & np.isnan(expected))
    if differ.any():
        raise WitnessMismatch(
            f"{np.count_nonzero(differ)} of {differ.size} elements of the weight of '{name}' differ between "
            f"onnx.reference and the proof; nothing is rewritten"
        )


def _standard(node: NodeProto) -> NodeProto:
    """A copy of the node in the domain's short name, the only one that onnx.reference knows."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.domain = ""
    return copy


def _named(tensor: TensorProto, name: str) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(tensor)
    copy.name = name
    return copy
