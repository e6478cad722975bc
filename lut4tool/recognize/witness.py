"""The witness: a chain's own nodes are run on the real bytes, and must give what the new node decodes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from lut4tool import native
from lut4tool.errors import Lut4Error
from lut4tool.formats import DTYPE_NAME, FLOAT_DTYPES, Lookup4Weight
from lut4tool.recognize.layout import Cut, Layout
from lut4tool.recognize.proof import Proof, Witness
from lut4tool.storage import Tensors

#: Up to so many elements the whole chain is run; of more, sampled units.
WHOLE_ELEMENTS = 1 << 20
_SAMPLES = 16
#: Elements run at a time where every unit is compared: onnx.reference's int64 temporaries stay near 20 MB.
_CHUNK_ELEMENTS = 1 << 18

Progress = Callable[[str, int, int], None]


class WitnessMismatch(Lut4Error):  # noqa: N818 - the command line's exit 4, not a fault of the user's input
    """The chain's nodes gave something else than a proof says: a fault in lut4tool, so nothing is rewritten."""


def check(proof: Proof, tensors: Tensors, *, full: bool = False, progress: Progress | None = None) -> Witness:
    """Run the proved chain in onnx.reference on its real constants and compare with lut4tool's decode, bit for bit.

    Decoded is what the new node will hold: the bytes as they are laid out, where they are laid out anew.
    At most 2^20 elements: the whole chain, casts and Transpose included. More: the first, the last, a row-crossing and
    16 random units of proof.cut (`full`: every unit, streamed); what comes after Cut.output is proved from literals.
    A NaN equals a NaN. For a function's formal inputs, the first call's constants.
    progress: called now and then with (what, elements done, elements).
    Raises WitnessMismatch, LayoutError, and StorageError where the constants cannot be read.
    """
    layout, cut = Layout(proof, tensors), proof.cut
    elements = proof.rows * proof.cols
    padded = -(-elements // proof.block_size) * proof.block_size
    if cut is None or (elements <= WHOLE_ELEMENTS and padded <= 2 * WHOLE_ELEMENTS):
        _compare(proof, _run(proof, _evaluator(proof, proof.weight), layout.arrays), _decoded(layout))
        return Witness(elements, elements)
    folded = {value: _run(proof, _evaluator(proof, value), layout.arrays) for value in cut.folded}
    for value, (role, rows) in cut.folded.items():
        held = layout.role(role).reshape(-1)
        _compare(proof, folded[value].reshape(rows, -1).T.reshape(-1), held, held.size)
    evaluator, compared = _evaluator(proof, cut.output, cut), 0
    for units in _chunks(proof, cut, full):
        found = _run(proof, evaluator, layout.cut({**layout.arrays, **folded}, units))
        done = min((int(units[-1]) + 1) * cut.size, elements) - (int(units[-1]) - len(units) + 1) * cut.size
        _compare(proof, found, _decoded(layout, units), done)
        compared += done
        if progress:
            progress("checking weights", compared, elements)
    return Witness(compared, elements)


def _decoded(layout: Layout, units: np.ndarray | None = None) -> np.ndarray:
    """The chain's value, in its type and shape, decoded by lut4tool from what the new node will hold.

    Of some units: the weight's rows, or where the chain is run to an earlier value the flat elements.
    """
    proof, weight = layout.proof, layout.weight(units)
    facts: Mapping[str, Any] = proof.attributes
    if isinstance(weight, Lookup4Weight):
        flat = native.decode_elements(weight, 0, weight.rows * weight.cols)
        if units is not None and proof.cut is not None and proof.cut.output != proof.weight:
            return flat
        matrix = flat.reshape(weight.rows, weight.cols).transpose(weight.perm)
    else:
        matrix = native.decode_qmm(weight).T
    matrix = matrix.astype(FLOAT_DTYPES[DTYPE_NAME[facts["dtype"]]], copy=False)
    return matrix.T if proof.flipped else matrix


def _chunks(proof: Proof, cut: Cut, full: bool) -> Iterator[np.ndarray]:
    """Indices of the units to compare, a bounded number at a time."""
    if full:
        step = max(1, _CHUNK_ELEMENTS // cut.size)
        for start in range(0, cut.count, step):
            yield np.arange(start, min(start + step, cut.count))
        return
    crossing = min(proof.cols // cut.size, cut.count - 1)  # row 1 begins in this block
    samples = min(_SAMPLES, WHOLE_ELEMENTS // cut.size)
    yield np.unique([0, crossing, cut.count - 1, *np.random.default_rng(0).integers(0, cut.count, samples)])


def _evaluator(proof: Proof, output: str, cut: Cut | None = None) -> Any:
    """onnx.reference on the chain's nodes up to one value, for sources whole or cut; sources are its inputs."""
    from onnx.reference import ReferenceEvaluator

    given = {*proof.sources, *(cut.folded if cut else ())}
    shapes = cut.shapes if cut else {}
    wanted, nodes = {output}, []
    for node in reversed(proof.chain):
        if wanted.intersection(node.output) and not given.issuperset(node.output):
            node = _standard(node)
            if node.output[0] in shapes:
                node.input[1] = f"{node.output[0]}: shape"
            wanted.update(node.input)
            nodes.append(node)
    literals = [_named(tensor, name) for name, tensor in proof.literals.items() if name in wanted]
    targets = [numpy_helper.from_array(np.array(shape, np.int64), f"{name}: shape") for name, shape in shapes.items()]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in sorted(given) if name in wanted
    ]
    graph = helper.make_graph(nodes[::-1], "chain", inputs, [onnx.ValueInfoProto(name=output)], literals + targets)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", proof.opset)])
    try:
        return ReferenceEvaluator(model)
    except Exception as error:
        raise WitnessMismatch(f"the chain of '{proof.site.name}' cannot be run in onnx.reference: {error}") from error


def _run(proof: Proof, evaluator: Any, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    try:
        with np.errstate(all="ignore"):  # Inf * 0 and overflow are the producer's values
            return np.asarray(evaluator.run(None, {name: arrays[name] for name in evaluator.input_names})[0])
    except Exception as error:
        raise WitnessMismatch(f"the chain of '{proof.site.name}' fails in onnx.reference: {error}") from error


def _compare(proof: Proof, found: np.ndarray, expected: np.ndarray, least: int = 0) -> None:
    """Raise WitnessMismatch unless type, shape and bits are equal, a NaN for a NaN.

    least: flat elements that must be there, in any shape; the padding after them may be missing.
    """
    name = proof.site.name
    if expected.ndim == 1 and least <= found.size <= expected.size:
        found, expected = found.reshape(-1), expected[: found.size]
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
