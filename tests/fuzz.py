"""Models broken at random, from onnx's node tests: Runtime must refuse or run them, and never crash or hang.

    python tests/fuzz.py SEED FIRST COUNT [numpy|mlx]

runs COUNT mutants from number FIRST on in this process (mlx: with values as on a GPU) and prints a line before and
after each; what is no Lut4Error, or takes more than LIMIT seconds, is printed as a fault. A crash ends the process:
the last line says where.
"""

from __future__ import annotations

import random
import resource
import signal
import sys
import traceback
import warnings
from typing import Any

import numpy as np
import onnx
from backend_cases import node_tests, value
from onnx import AttributeProto, TensorProto

#: Seconds for one mutant, and bytes of address space for the process.
LIMIT, MEMORY = 10, 12 << 30
INTEGERS = (-(2**63), -(2**31), -100, -7, -3, -2, -1, 0, 1, 2, 3, 5, 17, 1000, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
FLOATS = (float("nan"), float("inf"), -float("inf"), -1e30, -1.0, 0.0, 1e-30, 0.5, 3.0, 1e30)
WORDS = (
    "",
    "?",
    "linear",
    "sum",
    "NOTSET",
    "SAME_UPPER",
    "a,b->c",
    "i...j,jk->ik",
    "\udcff".encode("utf-8", "replace").decode(),
)
DTYPES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 0, 99)


class Mutant:
    """A model and its feeds, broken in one or two places."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = random.Random(f"{seed} {number}")
        tests = list(node_tests().values())
        self.test = self.random.choice(tests)
        self.model = onnx.ModelProto()
        self.model.CopyFrom(self.test.model)
        names = [item.name for item in self.model.graph.input]
        inputs = self.test.data_sets[0][0]
        self.feeds: dict[str, Any] = {n: value(data) for n, data in zip(names, inputs, strict=False)}
        self.what = [self.mutate() for _ in range(self.random.choice((1, 1, 2)))]

    def mutate(self) -> str:
        how = self.random.choice(
            (self.attribute, self.attribute, self.attribute, self.no_attribute, self.input, self.shape, self.values,
             self.values, self.values, self.type, self.version, self.output, self.loose)
        )  # fmt: skip
        how()
        return how.__name__

    def node(self) -> onnx.NodeProto:
        return self.random.choice(self.model.graph.node)

    def attribute(self) -> None:
        """Another value for an attribute, or a new one of the schema's."""
        node = self.node()
        if not onnx.defs.has(node.op_type, node.domain):
            return
        entries = onnx.defs.get_schema(node.op_type, node.domain).attributes
        if not entries:
            return
        name = self.random.choice(sorted(entries))
        kept = [a for a in node.attribute if a.name != name]
        old = next((a for a in node.attribute if a.name == name), AttributeProto(name=name))
        attribute = AttributeProto()
        attribute.CopyFrom(old)
        kind = AttributeProto.AttributeType.Value(entries[name].type.name)
        attribute.type = kind if self.random.random() < 0.95 else self.random.randrange(1, 9)
        choose, count = self.random.choice, self.random.choice((0, 1, 2, 3, 5))
        if attribute.type == AttributeProto.INT:
            attribute.i = choose(INTEGERS)
        elif attribute.type == AttributeProto.FLOAT:
            attribute.f = choose(FLOATS)
        elif attribute.type == AttributeProto.STRING:
            attribute.s = choose(WORDS).encode()
        elif attribute.type == AttributeProto.INTS:
            if attribute.ints and self.random.random() < 0.6:
                attribute.ints[self.random.randrange(len(attribute.ints))] = choose(INTEGERS)
            else:
                attribute.ints[:] = [choose(INTEGERS) for _ in range(count)]
        elif attribute.type == AttributeProto.FLOATS:
            attribute.floats[:] = [choose(FLOATS) for _ in range(count)]
        elif attribute.type == AttributeProto.STRINGS:
            attribute.strings[:] = [choose(WORDS).encode() for _ in range(count)]
        elif attribute.type == AttributeProto.TENSOR and not attribute.HasField("t"):
            attribute.t.CopyFrom(onnx.numpy_helper.from_array(np.zeros(choose((0, 1, 3)), np.float32)))
        node.ClearField("attribute")
        node.attribute.extend([*kept, attribute])

    def no_attribute(self) -> None:
        node = self.node()
        if node.attribute:
            del node.attribute[self.random.randrange(len(node.attribute))]

    def input(self) -> None:
        """An input left out, doubled, replaced by another value, by a later one or by nothing that exists."""
        node = self.node()
        if not node.input:
            return
        place, names = self.random.randrange(len(node.input)), [item.name for item in self.model.graph.input]
        others = ["", "nowhere", *node.output, *names]
        if self.random.random() < 0.3:
            del node.input[place:]
        elif self.random.random() < 0.2:
            node.input.append(self.random.choice(others))
        else:
            node.input[place] = self.random.choice(others)

    def shape(self) -> None:
        """Another shape of a feed, declared by nobody."""
        for item in self.model.graph.input:
            if item.type.HasField("tensor_type"):
                item.type.tensor_type.ClearField("shape")
        name = self.tensor()
        if name is None:
            return
        data, choose = self.feeds[name], self.random.choice
        sizes = list(data.shape)
        change = choose(("drop", "add", "zero", "size", "scalar"))
        if change == "drop" and sizes:
            del sizes[self.random.randrange(len(sizes))]
        elif change == "add":
            sizes.insert(self.random.randrange(len(sizes) + 1), choose((1, 2)))
        elif change == "scalar":
            sizes = []
        elif sizes:
            sizes[self.random.randrange(len(sizes))] = 0 if change == "zero" else choose((1, 2, 3, 7))
        self.feeds[name] = np.resize(data, sizes) if data.size else np.zeros(sizes, data.dtype)

    def tensor(self) -> str | None:
        names = [name for name, data in self.feeds.items() if isinstance(data, np.ndarray)]
        return self.random.choice(names) if names else None

    def values(self) -> None:
        """Extreme numbers in a feed."""
        name = self.tensor()
        if name is None or not self.feeds[name].size:
            return
        data = np.array(self.feeds[name])
        flat, places = data.reshape(-1), self.random.choices(range(data.size), k=self.random.choice((1, 1, data.size)))
        for place in places:
            if data.dtype.kind in "iu":
                info = np.iinfo(data.dtype)
                flat[place] = min(max(self.random.choice(INTEGERS), info.min), info.max)
            elif data.dtype.kind == "f":
                flat[place] = self.random.choice(FLOATS)
            elif data.dtype.kind == "O":
                flat[place] = self.random.choice(WORDS)
        self.feeds[name] = data

    def type(self) -> None:
        """Another type of an input; half of the time the feed has it too."""
        items = [item for item in self.model.graph.input if item.type.HasField("tensor_type")]
        if not items:
            return
        item = self.random.choice(items)
        item.type.tensor_type.elem_type = self.random.choice(DTYPES)
        data = self.feeds.get(item.name)
        if (
            isinstance(data, np.ndarray)
            and data.dtype.kind in "iufb"
            and item.type.tensor_type.elem_type in range(1, 27)
        ):
            self.feeds[item.name] = data.astype(onnx.helper.tensor_dtype_to_np_dtype(item.type.tensor_type.elem_type))

    def version(self) -> None:
        self.random.choice(self.model.opset_import).version = self.random.choice((0, 1, 5, 6, 7, 9, 11, 13, 18, 23, 99))

    def output(self) -> None:
        """A name twice, none at all, or an output that nobody computes."""
        choice = self.random.choice(("twice", "none", "more", "nobody"))
        node = self.node()
        if choice == "twice" and node.output and node.input:
            node.output[0] = node.input[0]
        elif choice == "none":
            node.ClearField("output")
        elif choice == "more":
            node.output.append("one_more")
        else:
            self.model.graph.output.append(onnx.helper.make_tensor_value_info("nobody", TensorProto.FLOAT, None))

    def loose(self) -> None:
        """A feed or an input less, a node twice, or the nodes in another order."""
        choice = self.random.choice(("feed", "input", "node", "order"))
        if choice == "feed" and self.feeds:
            del self.feeds[self.random.choice(sorted(self.feeds))]
        elif choice == "input" and self.model.graph.input:
            del self.model.graph.input[self.random.randrange(len(self.model.graph.input))]
        elif choice == "node":
            self.model.graph.node.append(self.node())
        else:
            nodes = list(self.model.graph.node)
            self.random.shuffle(nodes)
            self.model.graph.ClearField("node")
            self.model.graph.node.extend(nodes)


def fault(seed: int, number: int) -> str | None:
    """Run one mutant; None where it ran or was refused in words."""
    from lut4tool.errors import Lut4Error
    from lut4tool.runtime.session import Runtime

    mutant = Mutant(seed, number)
    try:
        Runtime(mutant.model, device="cpu").run(None, mutant.feeds)
    except Lut4Error:
        return None
    except Exception as error:  # noqa: BLE001 - what it looks for
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rsplit('/', 1)[-1]}:{place.lineno}"
        return (
            f"{mutant.test.name} {mutant.what}: {type(error).__name__} at {where}: {' '.join(str(error).split())[:200]}"
        )
    return None


def _late(*_: object) -> None:
    raise TimeoutError(f"it takes more than {LIMIT} s")


def main() -> None:
    from lut4tool.runtime import dtypes
    from lut4tool.runtime.backend import mx

    seed, first, count = map(int, sys.argv[1:4])
    if "mlx" in sys.argv[4:]:
        dtypes.HOST = mx.gpu
    warnings.simplefilter("ignore")
    node_tests()
    if not mx.cuda.is_available():  # CUDA reserves more addresses than any bound
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, _late)
    for number in range(first, first + count):
        print(f"start {number}", flush=True)
        signal.alarm(LIMIT)
        try:
            found = fault(seed, number)
        except TimeoutError as error:
            found = str(error)
        signal.alarm(0)
        print(f"fault {number} {found}" if found else f"done {number}", flush=True)


if __name__ == "__main__":
    main()
