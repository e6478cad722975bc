"""Chains with one random edit: whatever is still rewritten must compute what it did, and every refusal names a node.

    python tests/fuzz_chains.py --edits 20000 [--seed 0] [--first 0]

edits an attribute, a constant, an edge or a type of a model of every form, asks onnx.reference (onnxruntime for
vendor's operators) what the edited model gives, rewrites it without a witness, and compares bit for bit: x is the
identity, so that a product is its weight. A number
names an edit; test_fuzz_chains.py lets hypothesis draw them, which makes a fault small.
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import onnx
from build_affine import build_affine
from build_nbits import nbits
from build_product import product
from forms import FORMS, make
from forms_affine import AFFINE_FORMS, make_affine
from mutants_bnb4 import bnb4
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper
from rewriting import run_onnxruntime, run_reference
from spellings import AFFINE, CANONICAL

from build import Chain, build
from lut4tool.errors import Lut4Error
from lut4tool.recognize import Report, recognize
from lut4tool.rewrite import rewrite_model
from lut4tool.storage import Tensors

INTEGERS = (-16, -8, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 16, 17, 60, 64)
TYPES = (1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 16, 21, 22)
#: Operators that stand in for another of as many inputs.
STAND_INS = (
    ("Cast", "Identity", "Neg", "Abs", "Floor", "Transpose", "Flatten", "Relu", "BitwiseNot", "Shape"),
    ("Div", "Mod", "Mul", "Add", "Sub", "Pow", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Max", "Min"),
    (
        "Unsqueeze",
        "Squeeze",
        "Reshape",
        "Expand",
        "Gather",
        "Concat",
        "Tile",
        "GatherElements",
        "DequantizeLinear",
        "GatherND",
    ),
    ("Less", "LessOrEqual", "Greater", "Equal", "And", "Or"),
    ("Where", "ScatterND", "ScatterElements"),
    ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "MatMulBnb4"),
)
NAMES = ("axis", "perm", "to", "fmod", "direction", "allowzero", "saturate", "block_size", "output_dtype", "transB",
         "transA", "alpha", "beta", "K", "N", "bits", "accuracy_level", "quant_type", "round_mode")  # fmt: skip
WORDS = ("LEFT", "RIGHT", "down", "up", "")


@dataclass(frozen=True, eq=False)
class Base:
    """A model before it is edited, its feeds with an identity for x, and who says what it means."""

    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    judge: Callable[[onnx.ModelProto, dict[str, np.ndarray]], list[np.ndarray]]
    exact: bool


def base(model: onnx.ModelProto, feeds: dict[str, np.ndarray], depth: int, vendor: bool = False) -> Base:
    """depth: K, the size of the identity."""
    given = {**feeds, "x": np.eye(depth).astype(feeds["x"].dtype)}
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim if value.name == "x" else ():
            dim.Clear()  # of any size
    return Base(model, given, run_onnxruntime if vendor else reference, not vendor)


def reference(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """onnx.reference, which knows the standard's domain by its short name only."""
    short = onnx.ModelProto()
    short.CopyFrom(model)
    bodies: list[Any] = [short.graph, *short.functions]
    for body in bodies:
        for node in body.node:
            node.domain = "" if node.domain == "ai.onnx" else node.domain
            bodies += [entry.g for entry in node.attribute if entry.HasField("g")]
    for entry in (entry for owner in (short, *short.functions) for entry in owner.opset_import):
        entry.domain = "" if entry.domain == "ai.onnx" else entry.domain
    return run_reference(short, feeds)


@functools.cache
def bases() -> dict[str, Base]:
    """A small model of every form and product, and some in subgraphs and functions."""
    found = {}
    for name, spelling in CANONICAL.items():
        built = build(**spelling)
        found[f"canonical: {name}"] = base(built.model, built.feeds, built.oracle.shape[0])
    for name in FORMS:
        form = make(name)
        found[f"lookup: {name}"] = base(form.model, form.feeds, form.oracle.shape[0])
    for name in AFFINE_FORMS:
        form = make_affine(name)
        found[f"affine form: {name}"] = base(form.model, form.feeds, form.oracle.shape[0])
    for name, spelling in AFFINE.items():
        affine = build_affine(**spelling)
        found[f"affine: {name}"] = base(affine.model, affine.feeds, affine.affine.k)
    for place in (["If"], ["Loop"], ["function"]):
        constants = {"literals": "constant", "leaves": "constant"} if place == ["function"] else {}
        built, affine = build(place=place, **constants), build_affine(place=place, **constants)
        found[f"canonical in {place[0]}"] = base(built.model, built.feeds, built.oracle.shape[0])
        found[f"affine in {place[0]}"] = base(affine.model, affine.feeds, affine.affine.k)
    for name, op, size, options in (
        ("Gemm", "Gemm", (3, 6), {"alpha": 0.5, "beta": 2.0, "bias": (10,)}),
        ("Gemm turned", "Gemm", (6, 3), {"transA": 1, "alpha": 0.3}),
        ("weight on the left", "MatMul", (10, 3), {"left": True}),
    ):
        model, feeds, _ = product(op, Chain(rows=6, cols=10, block=8), size, **options)
        found[name] = base(model, feeds, 10 if "left" in options else 6)
    for name, options in (("plain", {}), ("typed", {"zeros": "typed"}), ("flat", {"flat": "scales", "bias": True})):
        model, feeds, _ = nbits(k=40, **options)
        found[f"MatMulNBits: {name}"] = base(model, feeds, 40, vendor=True)
    for kind in (0, 1):
        model, feeds, _ = bnb4(24, 10, 16, kind)
        found[f"MatMulBnb4: {kind}"] = base(model, feeds, 24, vendor=True)
    return found


class Edit:
    """One edit of a copy of a model: `model`, and in words `what`."""

    def __init__(self, random: Random, model: onnx.ModelProto) -> None:
        self.random, self.model = random, onnx.ModelProto()
        self.model.CopyFrom(model)
        self.bodies: list[Any] = [self.model.graph, *self.model.functions]
        for body in self.bodies:
            self.bodies += [entry.g for node in body.node for entry in node.attribute if entry.HasField("g")]
        self.what = random.choice((self.attribute, self.constant, self.constant, self.edge, self.type, self.around))()

    def node(self) -> NodeProto:
        """Any node."""
        return self.random.choice([node for body in self.bodies for node in body.node])

    def attribute(self) -> str:
        """Change, remove or add an attribute."""
        node = self.node()
        if not node.attribute or self.random.random() < 0.2:
            name = self.random.choice(NAMES)
            words = name in ("direction", "round_mode")
            value: Any = self.random.choice(WORDS) if words else self.random.choice(INTEGERS)
            value = float(value) if name in ("alpha", "beta") else [0, value] if name == "perm" else value
            node.attribute.append(helper.make_attribute(name, value))
            return f"{node.op_type} gets {name} {value}"
        written = self.random.choice(list(node.attribute))
        if self.random.random() < 0.2:
            node.attribute.remove(written)
            return f"{node.op_type} loses {written.name}"
        if written.type == AttributeProto.INT:
            pool = TYPES if written.name == "to" else INTEGERS
            written.i = self.random.choice((written.i + 1, written.i - 1, -written.i, self.random.choice(pool)))
        elif written.type == AttributeProto.FLOAT:
            written.f = self.random.choice((-written.f, 1.0, 0.0, 0.3, float("nan")))
        elif written.type == AttributeProto.INTS and written.ints:
            self.number(written.ints)
        elif written.type == AttributeProto.STRING:
            written.s = self.random.choice(WORDS).encode()
        elif written.type == AttributeProto.TENSOR:
            return f"{node.op_type}: {self.tensor(written.t)}"
        else:
            written.name = self.random.choice(NAMES)
        return f"{node.op_type} with another {written.name}"

    def number(self, values: Any) -> None:
        """Change, drop, add or swap a number of a list."""
        index, how = self.random.randrange(len(values)), self.random.random()
        if how < 0.6:
            values[index] = self.random.choice((values[index] + 1, values[index] - 1, self.random.choice(INTEGERS)))
        elif how < 0.75:
            del values[index]
        elif how < 0.9:
            values.insert(index, self.random.choice(INTEGERS))
        else:
            values.reverse()

    def constant(self) -> str:
        """Change an initializer: a value, its shape or its type."""
        tensors = [tensor for body in self.bodies if hasattr(body, "initializer") for tensor in body.initializer]
        if not tensors:
            return self.attribute()
        tensor = self.random.choice(tensors)
        if self.random.random() < 0.05:
            self.model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
            return f"{tensor.name} can be overridden"
        return f"{tensor.name}: {self.tensor(tensor)}"

    def tensor(self, tensor: TensorProto) -> str:
        """Change a tensor's values, shape or type."""
        array, name = numpy_helper.to_array(tensor), tensor.name
        array, how = array.copy(), self.random.random()
        if how < 0.5 and array.size:
            at = self.random.randrange(array.size)
            number = self.random.choice(INTEGERS)
            if self.random.random() < 0.5:
                number = int(np.nan_to_num(float(array.reshape(-1)[at]))) + self.random.choice((-1, 1))
            with np.errstate(all="ignore"):
                array.reshape(-1)[at] = np.array(number % 16 if array.dtype.itemsize == 1 else number).astype(
                    array.dtype
                )
            text = f"element {at} is {number}"
        elif how < 0.8:
            shapes = [array.shape[::-1], (*array.shape, 1), (1, *array.shape), (array.size,), array.shape[:-1]]
            shape = self.random.choice(shapes)
            array = np.resize(array, shape) if self.random.random() < 0.8 else array[:-1] if array.ndim else array
            text = f"shape {list(array.shape)}"
        else:
            kind = helper.tensor_dtype_to_np_dtype(self.random.choice(TYPES))
            with np.errstate(all="ignore"):
                array = array.astype(np.float32).astype(kind)
            text = f"type {array.dtype}"
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(array), name))
        return text

    def edge(self) -> str:
        """Let an input be another value, or none; or swap inputs."""
        node = self.node()
        if len(node.input) > 1 and self.random.random() < 0.3:
            first, second = self.random.sample(range(len(node.input)), 2)
            node.input[first], node.input[second] = node.input[second], node.input[first]
            return f"{node.op_type}: inputs {first} and {second} swapped"
        names = [name for body in self.bodies for each in body.node for name in (*each.input, *each.output)]
        name = self.random.choice([*names, ""])
        index = self.random.randrange(len(node.input) + 1)
        if index < len(node.input):
            node.input[index] = name
        else:
            node.input.append(name)
        return f"{node.op_type}: input {index} is '{name}'"

    def type(self) -> str:
        """Another operator, domain or opset."""
        how, node = self.random.random(), self.node()
        if how < 0.1:
            entry = self.random.choice(list(self.model.opset_import))
            entry.version = self.random.choice((12, 13, 14, 17, 18, 19, 21, 23, 24, 25, 28, 29, entry.version + 1))
            return f"opset {entry.version} of '{entry.domain}'"
        old = node.op_type
        if how < 0.2:
            node.domain = self.random.choice(("", "ai.onnx", "com.microsoft", "other"))
            return f"{old} of '{node.domain}'"
        groups = [group for group in STAND_INS if old in group] or list(STAND_INS)
        node.op_type = self.random.choice(self.random.choice(groups))
        return f"{old} is {node.op_type}"

    def around(self) -> str:
        """Put a node before an input, or take one out."""
        body = self.random.choice(self.bodies)
        if not body.node:
            return self.edge()
        position = self.random.randrange(len(body.node))
        node = body.node[position]
        if self.random.random() < 0.3 and node.input:
            (output,), source = list(node.output)[:1], node.input[0]
            for other in body.node:
                other.input[:] = [source if name == output else name for name in other.input]
            return f"{node.op_type} taken out"
        if not node.input:
            return self.edge()
        index = self.random.randrange(len(node.input))
        op = self.random.choice(STAND_INS[0])
        attributes = {"to": self.random.choice(TYPES)} if op == "Cast" else {}
        body.node.insert(position, helper.make_node(op, [node.input[index]], ["new"], "new", **attributes))
        body.node[position + 1].input[index] = "new"
        return f"{op} before input {index} of {node.op_type}"


class Fault(AssertionError):  # noqa: N818 - what the fuzzer looks for
    """A rewrite that changed what a model computes, a refusal that names no node, or a crash."""


def outcome(name: str, edit: Edit) -> str:
    """What became of an edited model, in a word or two. Raises Fault."""
    start, model = bases()[name], edit.model
    report = recognize(model, vendor=True)
    for refusal in report.refusals:
        if not (refusal.node and refusal.at and "'" in refusal.reason and refusal.at in refusal.reason):
            raise Fault(f"{name}, {edit.what}: a refusal names no node: {refusal}")
    if not report.proofs:
        return "refused" if report.refusals else "no chain"
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            expected = start.judge(model, start.feeds)
        except Exception:  # noqa: BLE001 - any edit may break the model for its judge
            expected = None
        after = onnx.ModelProto()
        after.CopyFrom(model)
        try:
            rewrite_model(after, Tensors(None), vendor=True, witness=False)
        except Lut4Error:
            return "an error in words"
        try:
            found = reference(after, start.feeds)
        except Exception as error:
            if expected is None or not is_typed(model):
                return "proved, and the product fails or is no valid one, before as after"
            raise Fault(f"{name}, {edit.what}: fails once it is rewritten: {error}") from error
    if expected is None:
        return "proved, though the judge takes it no more"
    compare(f"{name}, {edit.what}", expected, found, start.exact, report)
    return "proved and equal"


def is_typed(model: onnx.ModelProto) -> bool:
    """Whether onnx's type rules hold: onnx.reference's Gemm and others take types that no ONNX operator may mix."""
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError:
        return False
    return True


def compare(what: str, expected: list[np.ndarray], found: list[np.ndarray], exact: bool, report: Report) -> None:
    """Raise Fault unless the outputs are the same: to the bit, or where the judge sums in its own way nearly."""
    for one, other in zip(expected, found, strict=True):
        same = one.dtype == other.dtype and one.shape == other.shape
        if same and exact:
            same = np.array_equal(one.astype(np.float64), other.astype(np.float64), equal_nan=True)
        elif same:
            scale = float(np.nan_to_num(np.abs(one)).max(initial=0))
            same = np.allclose(one, other, rtol=1e-5, atol=1e-5 * scale, equal_nan=True)
        if not same:
            raise Fault(f"{what}: {report.proofs[0].chain_name} changes the output:\n{one}\n{other}")


def fuzz(first: int, edits: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Run edits by number: what became of how many, and the faults."""
    counts: Counter[str] = Counter()
    faults = []
    for number in range(first, first + edits):
        random = Random(f"{seed} {number}")
        name = random.choice(sorted(bases()))
        edit = Edit(random, bases()[name].model)
        try:
            counts[outcome(name, edit)] += 1
        except Exception as error:  # noqa: BLE001 - a crash of the recognizer is a fault too
            faults.append(f"edit {number}: {type(error).__name__}: {error}")
            print(faults[-1], flush=True)
    return counts, faults


def main() -> int:
    """Fuzz as the command line says, print the counts; 1 where there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first edit")
    options = parser.parse_args()
    counts, faults = fuzz(options.first, options.edits, options.seed)
    for what, count in counts.most_common():
        print(f"{count:8,} {what}")
    verdict = f"{len(faults)} faults" if faults else "no rewrite changed an output, every refusal names a node"
    print(f"{options.edits:8,} edits of {len(bases())} models: {verdict}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
