"""The witness: a chain's own nodes are run on the real bytes, and must give what the new node decodes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
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
#: Elements of one part, where every unit is compared by several processes.
_PART_ELEMENTS = 1 << 23

Progress = Callable[[str, int, int], None]


class WitnessMismatch(Lut4Error):  # noqa: N818 - the command line's exit 4, not a fault of the user's input
    """The chain's nodes gave something else than a proof says: a fault in lut4tool, so its sites stay as they are."""


def check(proof: Proof, tensors: Tensors, *, full: bool = False, progress: Progress | None = None) -> Witness:
    """Run the proved chain in onnx.reference on its real constants and compare with lut4tool's decode, bit for bit.

    Decoded is what the new node will hold: the bytes as they are laid out, where they are laid out anew.
    At most 2^20 elements: the whole chain, casts and Transpose included. More: the first, the last, a row-crossing and
    16 random units of proof.cut (`full`: every unit, streamed); what comes after Cut.output is proved from literals.
    A NaN equals a NaN. For a function's formal inputs, the first call's constants.
    progress: called now and then with (what, elements done, elements).
    Raises WitnessMismatch, LayoutError, and StorageError where the constants cannot be read.
    """
    chain, compared = Chain(proof, tensors), 0
    if not full:
        chain.layout.require_values()  # those that no sample meets too
    for units in chain.every_unit() if full else chain.some_units():
        compared += chain.compare(units)
        if progress:
            progress("checking weights", compared, chain.elements)
    return Witness(compared, chain.elements)


class Chain:
    """A proved chain on its real constants, ready to be run and compared, whole or in units of proof.cut."""

    def __init__(self, proof: Proof, tensors: Tensors) -> None:
        self.proof, self.layout = proof, Layout(proof, tensors)
        self.elements = proof.rows * proof.cols
        padded = -(-self.elements // proof.block_size) * proof.block_size
        small = self.elements <= WHOLE_ELEMENTS and padded <= 2 * WHOLE_ELEMENTS
        self._cut = None if small else proof.cut

    def compare(self, units: np.ndarray | None) -> int:
        """Compare some units, ascending, or the whole chain; return how many elements. Raises WitnessMismatch."""
        proof, cut = self.proof, self._cut
        if cut is None or units is None:
            expected = _decoded(self.layout)  # first, for what it says of constants that have no layout
            _compare(proof, _run(proof, proof.weight, self.layout.arrays), expected)
            return self.elements
        expected = _decoded(self.layout, units)
        found = _run(proof, cut.output, self.layout.cut({**self.layout.arrays, **self._folded}, units), cut)
        done = min((int(units[-1]) + 1) * cut.size, self.elements) - (int(units[-1]) - len(units) + 1) * cut.size
        _compare(proof, found, expected, done)
        return done

    def some_units(self) -> Iterator[np.ndarray | None]:
        """What is compared by default: all of a small weight, samples of another."""
        if (cut := self._cut) is None:
            yield None
            return
        crossing = min(self.proof.cols // cut.size, cut.count - 1)  # row 1 begins in this block
        samples = min(_SAMPLES, WHOLE_ELEMENTS // cut.size)
        yield np.unique([0, crossing, cut.count - 1, *np.random.default_rng(0).integers(0, cut.count, samples)])

    def every_unit(self, part: int | None = None) -> Iterator[np.ndarray | None]:
        """Every unit, a bounded number at a time; or those of one of so many `parts`."""
        if (cut := self._cut) is None:
            yield None
            return
        step = max(1, _CHUNK_ELEMENTS // cut.size)
        starts = range(0, cut.count, step)
        if part is not None:
            starts = starts[len(starts) * part // self.parts : len(starts) * (part + 1) // self.parts]
        for start in starts:
            yield np.arange(start, min(start + step, cut.count))

    @property
    def parts(self) -> int:
        """Into how many parts the check of every unit is divided, to be spread over processes."""
        return 1 if self._cut is None else max(1, self.elements // _PART_ELEMENTS)

    @cached_property
    def _folded(self) -> dict[str, np.ndarray]:
        """Values inside the chain that a role holds, run and compared whole."""
        proof, folded = self.proof, self.proof.cut.folded if self.proof.cut else {}
        arrays = {value: _run(proof, value, self.layout.arrays) for value in folded}
        for value, (role, rows) in folded.items():
            held = self.layout.role(role).reshape(-1)
            _compare(proof, arrays[value].reshape(rows, -1).T.reshape(-1), held, held.size)
        return arrays


def _decoded(layout: Layout, units: np.ndarray | None = None) -> np.ndarray:
    """The chain's value, in its type and shape, decoded by lut4tool from what the new node will hold.

    Of some units: the weight's rows, or where the chain is run to an earlier value the flat elements.
    """
    proof, weight = layout.proof, layout.weight(units)
    facts: Mapping[str, Any] = proof.attributes
    if isinstance(weight, Lookup4Weight):
        flat = native.decode_elements(weight, 0, weight.rows * weight.cols)
        if units is not None and proof.cut is not None and not proof.cut.rows:
            return flat
        matrix = flat.reshape(weight.rows, weight.cols).transpose(weight.perm)
    else:
        matrix = native.decode_qmm(weight).T
    matrix = matrix.astype(FLOAT_DTYPES[DTYPE_NAME[facts["dtype"]]], copy=False)
    return matrix.T if proof.flipped else matrix


def _run(proof: Proof, output: str, arrays: Mapping[str, np.ndarray], cut: Cut | None = None) -> np.ndarray:
    """One value of the chain by onnx.reference, from its sources, whole or cut."""
    try:
        model, names = _renamed(proof, output, cut)
        with np.errstate(all="ignore"):  # Inf * 0 and overflow are the producer's values
            return np.asarray(_reference(model).run(None, {short: arrays[name] for short, name in names.items()})[0])
    except Exception as error:
        raise WitnessMismatch(f"the chain of '{proof.site.name}' cannot be run in onnx.reference: {error}") from error


@lru_cache(maxsize=256)
def _reference(model: bytes) -> Any:
    """onnx.reference for a chain: made once for all that differ in names and weights only."""
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(onnx.load_from_string(model))


def _renamed(proof: Proof, output: str, cut: Cut | None) -> tuple[bytes, dict[str, str]]:
    """The chain's nodes up to one value as a model, its values v0, v1, ...; and which of its inputs is which source."""
    given = {*proof.sources, *(cut.folded if cut else ())}
    shapes = cut.shapes if cut else {}
    names: dict[str, str] = {"": ""}
    nodes = [NodeProto(op_type="Identity", input=[_short(output, names)], output=["result"])]
    for node in reversed(proof.chain):
        if given.issuperset(node.output) or names.keys().isdisjoint(node.output):
            continue
        inputs = list(node.input)
        if node.output[0] in shapes:
            inputs[1] = f"{node.output[0]}: shape"
        outputs = [_short(name, names) for name in node.output]
        inputs = [_short(name, names) for name in inputs]
        nodes.append(NodeProto(op_type=node.op_type, input=inputs, output=outputs, attribute=node.attribute))
    literals = [_named(tensor, names[name]) for name, tensor in proof.literals.items() if name in names]
    targets = {f"{name}: shape": np.array(shape, np.int64) for name, shape in shapes.items()}
    literals += [numpy_helper.from_array(shape, names[name]) for name, shape in targets.items() if name in names]
    sources = {names[name]: name for name in sorted(given) if name in names}
    inputs = [onnx.ValueInfoProto(name=name) for name in sources]
    graph = helper.make_graph(nodes[::-1], "chain", inputs, [onnx.ValueInfoProto(name="result")], literals)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", proof.opset)])
    return model.SerializeToString(deterministic=True), sources


def _short(name: str, names: dict[str, str]) -> str:
    return names.setdefault(name, f"v{len(names)}")


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
            f"but was proved to be {expected.dtype} {list(expected.shape)}"
        )
    bits = np.dtype(f"u{found.dtype.itemsize}")
    differ = np.ascontiguousarray(found).view(bits) != np.ascontiguousarray(expected).view(bits)
    differ &= ~(np.isnan(found) & np.isnan(expected))
    if differ.any():
        raise WitnessMismatch(
            f"{np.count_nonzero(differ)} of {differ.size} elements of the weight of '{name}' differ between "
            f"onnx.reference and the proof"
        )


def _named(tensor: TensorProto, name: str) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(tensor)
    copy.name = name
    return copy
