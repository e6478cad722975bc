"""Models made to do harm, and what each command of lut4tool says of them.

    python tests/hostile.py FOLDER [CASE ...]

writes each model into FOLDER, runs every command on it in this process, and prints a line of JSON a command: case,
command, status, seconds of a processor, megabytes at the peak so far, what stood on stderr. Address space is limited.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from build import build

#: Bytes of address space for the process; seconds of a processor, and of the clock, for one command.
MEMORY, LIMIT, WAIT = 8 << 30, 10, 120
COMMANDS = {
    "inspect": ["inspect", "IN"],
    "rewrite": ["rewrite", "IN", "OUT", "--force"],
    "run": ["run", "IN", "--random", "--device", "cpu"],
    "run --rewrite": ["run", "IN", "--random", "--rewrite", "--device", "cpu"],
    "quantize": ["quantize", "IN", "OUT", "--force"],
    "expand": ["expand", "IN", "OUT", "--force"],
}
CASES: dict[str, Callable[[], onnx.ModelProto | bytes]] = {}


def case(make: Callable[[], onnx.ModelProto | bytes]) -> Callable[[], onnx.ModelProto | bytes]:
    CASES[make.__name__.strip("_")] = make
    return make


def value(name: str, shape: Sequence[int] | None = None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: Sequence[onnx.NodeProto], tensors: Sequence[TensorProto] = (), **parts: Any) -> onnx.ModelProto:
    """x [3, 6] -> y; parts: inputs, outputs, functions, domains."""
    inputs = [value(name, [3, 6]) for name in parts.get("inputs", ["x"])]
    outputs = [value(name) for name in parts.get("outputs", ["y"])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(tensors))
    imports = [helper.make_opsetid("", 17), *(helper.make_opsetid(domain, 1) for domain in parts.get("domains", []))]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=parts.get("functions", []))


def tensor(
    dims: Sequence[int], kind: int = TensorProto.FLOAT, name: str = "w", raw: bytes = b"", **external: Any
) -> TensorProto:
    made = TensorProto(name=name, data_type=kind, dims=dims)
    if external:
        made.data_location = TensorProto.EXTERNAL
        for key, entry in external.items():
            made.external_data.add(key=key, value=str(entry))
    else:
        made.raw_data = raw
    return made


def product(weight: TensorProto) -> onnx.ModelProto:
    return model([helper.make_node("MatMul", ["x", "w"], ["y"])], [weight])


def identity(graph: str = "b") -> onnx.GraphProto:
    return helper.make_graph([helper.make_node("Identity", ["x"], ["o"])], graph, [], [value("o")])


# Sizes and places of tensors

for _dims in ([1 << 40, 1 << 40], [1 << 62, 4], [-1], [0, 1 << 62, 1 << 62], [1 << 31, 0], [1 << 33], [1] * 70):
    _name = "x".join(map(str, _dims[:3]))
    CASES[f"dims {_name}"] = lambda dims=_dims: product(tensor(dims))
    CASES[f"external dims {_name}"] = lambda dims=_dims: product(tensor(dims, location="w.bin"))

PLACES: dict[str, dict[str, Any]] = {
    "offset -5": {"offset": -5},
    "offset 2^70": {"offset": 1 << 70},
    "length 2^70": {"length": 1 << 70},
    "length -1": {"length": -1},
    "offset text": {"offset": "abc"},
    "offset hex": {"offset": "0x10"},
    "offset of 6000 digits": {"offset": "9" * 6000},
    "absolute": {"location": "/etc/passwd"},
    "parent": {"location": "../../etc/passwd"},
    "device": {"location": "/dev/zero"},
    "link": {"location": "link"},
    "link to a device": {"location": "zero"},
    "link to itself": {"location": "loop"},
    "pipe": {"location": "pipe"},
    "folder": {"location": "."},
    "zero byte": {"location": "a\0b"},
    "empty": {"location": ""},
    "long": {"location": "x" * 5000},
    "its own model": {"location": "in.onnx", "offset": 1 << 20},
}
for _name, _entries in PLACES.items():
    CASES[f"place {_name}"] = lambda entries=_entries: product(tensor([6, 4], **{"location": "w.bin", **entries}))


@case
def overlapping_regions() -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Add", ["a", "b"], ["y"])]
    return model(nodes, [tensor([6, 4], location="w.bin"), tensor([4], name="b", location="w.bin", offset=3)])


def sparse(indices: Any, dims: Sequence[int]) -> onnx.ModelProto:
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])])
    values = numpy_helper.from_array(np.ones(2, np.float32), "w")
    places = numpy_helper.from_array(np.array(indices), "i")
    made.graph.sparse_initializer.append(onnx.SparseTensorProto(values=values, indices=places, dims=dims))
    return made


CASES["sparse index too large"] = lambda: sparse([5, 10**9], [6, 4])
CASES["sparse dims too large"] = lambda: sparse([5, 6], [1 << 40, 4])
CASES["sparse dims negative"] = lambda: sparse([[5, 6], [1, 2]], [-6, 4])


# Graphs


@case
def cycle() -> onnx.ModelProto:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Add", ["a", "x"], ["b"])]
    return model([*nodes, helper.make_node("Identity", ["a"], ["y"])])


@case
def identity_of_itself() -> onnx.ModelProto:
    return model([helper.make_node("Identity", ["y"], ["y"])])


@case
def a_name_twice() -> onnx.ModelProto:
    node = helper.make_node("Relu", ["x"], ["y"])
    return model([node, node], [tensor([1], name="y", raw=bytes(4))])


@case
def cycle_in_a_chain() -> onnx.ModelProto:
    made = build().model
    made.graph.node[0].input[0] = made.graph.node[-2].output[0]
    return made


@case
def branches_in_branches() -> onnx.ModelProto:
    inner = identity()
    for _ in range(28):  # protobuf reads 100 messages in each other, three a branch
        branches = {"then_branch": inner, "else_branch": identity()}
        inner = helper.make_graph([helper.make_node("If", ["c"], ["o"], **branches)], "b", [], [value("o")])
    made = model([helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=identity())])
    made.graph.input.append(value("c", [], TensorProto.BOOL))
    return made


def field(number: int, content: bytes | int) -> bytes:
    """A field of a protobuf message, by hand: onnx cannot write what it cannot read."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(number: int) -> bytes:
    written = b""
    while number > 127:
        written += bytes([number & 127 | 128])
        number >>= 7
    return written + bytes([number])


@case
def graphs_ten_thousand_deep() -> bytes:
    graph = field(1, field(4, b"Relu"))
    for _ in range(10_000):
        graph = field(1, field(4, b"If") + field(5, field(1, b"g") + field(6, graph) + field(20, 5)))
    return field(1, 8) + field(7, graph) + field(8, field(2, 17))


def attributes(count: int) -> onnx.ModelProto:
    made = model([helper.make_node("Relu", ["x"], ["y"])])
    made.graph.node[0].attribute.extend(AttributeProto(name=f"a{i}", type=2, i=i) for i in range(count))
    return made


CASES["100,000 attributes"] = lambda: attributes(100_000)
CASES["1,000,000 attributes"] = lambda: attributes(1_000_000)


@case
def one_attribute_many_times() -> onnx.ModelProto:
    made = model([helper.make_node("Softmax", ["x"], ["y"])])
    made.graph.node[0].attribute.extend([AttributeProto(name="axis", type=2, i=1)] * 50_000)
    return made


@case
def a_long_line_of_identities() -> onnx.ModelProto:
    names = ["x", *(f"v{index}" for index in range(20_000))]
    nodes = [helper.make_node("Identity", [a], [b]) for a, b in pairwise(names)]
    return model(nodes, outputs=[names[-1]])


@case
def a_long_line_behind_a_chain() -> onnx.ModelProto:
    made = build().model
    *nodes, last = made.graph.node
    names = [last.input[1], *(f"v{index}" for index in range(10_000))]
    last.input[1] = names[-1]
    nodes += [helper.make_node("Neg", [a], [b]) for a, b in pairwise(names)]
    del made.graph.node[:]
    made.graph.node.extend([*nodes, last])
    return made


@case
def many_inputs() -> onnx.ModelProto:
    return model([helper.make_node("Sum", ["x"] * 50_000, ["y"])])


@case
def many_inputs_of_the_graph() -> onnx.ModelProto:
    return model([helper.make_node("Relu", ["x"], ["y"])], inputs=["x", *(f"x{index}" for index in range(20_000))])


def calls(nodes: Sequence[onnx.NodeProto], count: int, name: str = "") -> onnx.ModelProto:
    """A function of a to b, called `count` times."""
    function = helper.make_function("d", "f", ["a"], ["b"], nodes, [helper.make_opsetid("", 17)])
    made = [
        helper.make_node("f", ["x"], ["y" if index == 0 else f"y{index}"], name, domain="d") for index in range(count)
    ]
    return model(made, functions=[function], domains=["d"])


@case
def a_name_of_a_megabyte_before_thousands() -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", ["a"], [f"b{index}"]) for index in range(3000)]
    return calls([*nodes, helper.make_node("Relu", ["a"], ["b"])], 1, "n" * (1 << 20))


@case
def branches_in_a_name_of_a_megabyte() -> onnx.ModelProto:
    product = helper.make_node("MatMul", ["x", "w"], ["o"])
    branch = helper.make_graph([product], "b", [], [value("o")])
    inner = [
        helper.make_node("If", ["c"], [f"o{index}"], then_branch=branch, else_branch=branch) for index in range(1500)
    ]
    outer = helper.make_graph(inner, "g", [], [value("o0")])
    node = helper.make_node("If", ["c"], ["y"], "n" * (1 << 20), then_branch=outer, else_branch=identity())
    nibble = helper.make_node("Mod", ["x", "x"], ["m"])  # so that it is walked
    made = model([nibble, node], [tensor([6, 64], raw=bytes(1536))])
    made.graph.input.append(value("c", [], TensorProto.BOOL))
    return made


@case
def a_large_constant_in_a_function_that_is_called_often() -> onnx.ModelProto:
    large = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 18, 6], float_data=[1.0] * (6 << 18))
    constant = helper.make_node("Constant", [], ["c"], value=large)
    return calls([constant, helper.make_node("Shape", ["c"], ["s"]), helper.make_node("Identity", ["a"], ["b"])], 500)


def doubling(name: str, formals: Sequence[str], depth: int) -> list[onnx.FunctionProto]:
    """Functions that call the one before twice, down to `name`: 2^depth nodes."""
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
    made = []
    for level in range(depth):
        calls = [helper.make_node(name, formals, [f"t{index}"], domain="d") for index in range(2)]
        name = f"twice{level}"
        total = helper.make_node("Add", ["t0", "t1"], ["b"])
        made.append(helper.make_function("d", name, formals, ["b"], [*calls, total], imports))
    return made


@case
def functions_that_call_two() -> onnx.ModelProto:
    relu = helper.make_function(
        "d", "f", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    call = helper.make_node("twice39", ["x"], ["y"], domain="d")
    return model([call], functions=[relu, *doubling("f", ["a"], 40)], domains=["d"])


@case
def functions_that_call_two_with_a_chain() -> onnx.ModelProto:
    made = build(
        place=("function",), hold="packed", literals="constant", leaves="initializer initializer constant"
    ).model
    inner = made.functions[0]
    call = next(node for node in made.graph.node if node.op_type == inner.name)
    inner.domain, call.domain = "d", "d"
    made.opset_import.append(helper.make_opsetid("d", 1))
    made.functions.extend(doubling(inner.name, list(inner.input), 30))
    call.op_type = "twice29"
    return made


@case
def a_function_that_calls_itself() -> onnx.ModelProto:
    node = helper.make_node("f", ["a"], ["b"], domain="d")
    function = helper.make_function("d", "f", ["a"], ["b"], [node], [helper.make_opsetid("d", 1)])
    call = helper.make_node("f", ["x"], ["y"], domain="d")
    shaped = helper.make_node("SoftmaxCrossEntropyLoss", ["x", "y"], ["z"])  # asks for types, across functions
    return model([call, shaped], functions=[function], domains=["d"], outputs=["z"])


# Literals and attributes


def computed(node: onnx.NodeProto, **arrays: Any) -> onnx.ModelProto:
    return model([node], [numpy_helper.from_array(np.array(array), name) for name, array in arrays.items()])


CASES["Expand to 2^51 elements"] = lambda: computed(
    helper.make_node("Expand", ["x", "s"], ["y"]), s=[1 << 20, 1 << 27, 3, 6]
)
CASES["Tile to 2^54 elements"] = lambda: computed(helper.make_node("Tile", ["x", "s"], ["y"]), s=[1 << 20, 1 << 30])
CASES["Slice on axis 2^28"] = lambda: computed(
    helper.make_node("Slice", ["x", "s", "e", "a"], ["y"]), s=[0], e=[1], a=[1 << 28]
)
CASES["Gather on axis 2^28"] = lambda: computed(helper.make_node("Gather", ["x", "i"], ["y"], axis=1 << 28), i=0)
CASES["a constant of 2^50 elements"] = lambda: computed(helper.make_node("ConstantOfShape", ["s"], ["y"]), s=[1 << 50])
CASES["a Range of 2^50 elements"] = lambda: computed(
    helper.make_node("Range", ["a", "b", "c"], ["y"]), a=0, b=1 << 50, c=1
)


def packed(**attributes: int) -> onnx.ModelProto:
    facts = {"rows": 8, "cols": 6, "block_size": 8, "high_nibble_first": 1, "weight_dtype": 1, "dtype": 1}
    node = helper.make_node(
        "Lookup4MatMul", ["x", "p", "s", "c"], ["y"], domain="ai.lut4tool", perm=[1, 0], **{**facts, **attributes}
    )
    tensors = [
        tensor([24], 2, "p", bytes(24)),
        tensor([6], name="s", raw=bytes(24)),
        tensor([16], name="c", raw=bytes(64)),
    ]
    return model([node], tensors, domains=["ai.lut4tool"])


for _rows, _cols, _block in (
    (-1, 6, 8), (0, 0, 0), (8, 6, 0), (8, 6, -8), (8, 6, 1 << 62), (1 << 62, 1 << 62, 8), (8, 6, 7), (1 << 40, 6, 8),
):  # fmt: skip
    CASES[f"a weight of {_rows} x {_cols}, block {_block}"] = lambda rows=_rows, cols=_cols, block=_block: packed(
        rows=rows, cols=cols, block_size=block
    )


@case
def nbits_of_2_to_the_40_rows() -> onnx.ModelProto:
    facts = {"K": 6, "N": 1 << 40, "bits": 4, "block_size": 16}
    node = helper.make_node("MatMulNBits", ["x", "p", "s"], ["y"], domain="com.microsoft", **facts)
    return model(
        [node], [tensor([4, 1, 8], 2, "p", bytes(32)), tensor([4], name="s", raw=bytes(16))], domains=["com.microsoft"]
    )


def chain(edit: Callable[[onnx.ModelProto], None]) -> onnx.ModelProto:
    made = build(literals="constant").model
    edit(made)
    return made


def literal(made: onnx.ModelProto, old: Sequence[int], new: Sequence[int]) -> None:
    for node in made.graph.node:
        if node.op_type == "Constant" and numpy_helper.to_array(node.attribute[0].t).tolist() == list(old):
            node.attribute[0].t.CopyFrom(numpy_helper.from_array(np.array(new)))


def enlarge(made: onnx.ModelProto) -> None:
    next(entry for entry in made.graph.initializer if entry.name.endswith("packed")).dims[:] = [1 << 40]


CASES["a chain whose packed is 2^40 bytes"] = lambda: chain(enlarge)
CASES["a chain with block 2^40"] = lambda: chain(lambda made: literal(made, [-1, 8], [-1, 1 << 40]))
CASES["a chain of 2^62 rows"] = lambda: chain(lambda made: literal(made, [6, 10], [1 << 62, 10]))


def reference(name: str, kind: int, to: str) -> AttributeProto:
    return AttributeProto(name=name, type=kind, ref_attr_name=to)


@case
def a_product_with_its_callers_attributes() -> onnx.ModelProto:
    made = model([helper.make_node("Gemm", ["x", "w"], ["y"])], [tensor([6, 64], raw=bytes(1536))])
    made.graph.node[0].attribute.append(reference("transB", AttributeProto.INT, "t"))
    return made


def given(op: str, name: str, kind: int, written: Any) -> onnx.ModelProto:
    """An operator in a function, one attribute of which is a reference to what the call gives: of another type."""
    inner = helper.make_node(op, ["a", "a"] if op == "Loop" else ["a"], ["b"])
    inner.attribute.append(reference(name, kind, "given"))
    function = helper.make_function("d", "f", ["a"], ["b"], [inner], [helper.make_opsetid("", 17)], ["given"])
    return model([helper.make_node("f", ["x"], ["y"], domain="d", given=written)], functions=[function], domains=["d"])


CASES["an axis that its caller gives as a text"] = lambda: given("Softmax", "axis", AttributeProto.INT, "x")
CASES["a body that its caller gives as a number"] = lambda: given("Loop", "body", AttributeProto.GRAPH, 1)
CASES["a permutation that its caller gives as a graph"] = lambda: given(
    "Transpose", "perm", AttributeProto.INTS, identity()
)


@case
def a_concat_of_nothing() -> onnx.ModelProto:
    return model([helper.make_node("Concat", [], ["y"], axis=0)])


@case
def a_product_of_constant_bytes_and_a_sequence() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Cast", ["w"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("SequenceEmpty", [], ["s"]),
        helper.make_node("Mul", ["c", "s"], ["m"]),
        helper.make_node("MatMul", ["x", "m"], ["y"]),
    ]
    return model(nodes, [tensor([6, 4], TensorProto.INT8, raw=bytes(24))])


@case
def an_output_that_maps_nothing() -> onnx.ModelProto:
    made = model([helper.make_node("Identity", ["x"], ["y"])])
    made.graph.output[0].type.map_type.SetInParent()
    return made


# Bytes


@case
def a_name_that_is_not_utf_8() -> bytes:
    return product(tensor([6, 4], raw=bytes(96), name="www")).SerializeToString().replace(b"www", b"w\xffw")


@case
def random_bytes() -> bytes:
    return np.random.default_rng(0).bytes(100_000)


@case
def an_unknown_type() -> onnx.ModelProto:
    return product(tensor([6, 4], 77, raw=bytes(96)))


@case
def a_string_that_is_not_utf_8() -> onnx.ModelProto:
    return model(
        [helper.make_node("Identity", ["w"], ["y"])],
        [TensorProto(name="w", data_type=8, dims=[1], string_data=[b"\xff"])],
    )


@case
def a_name_of_a_megabyte() -> onnx.ModelProto:
    return model([helper.make_node("Relu", ["x"], ["y"], name="n" * (1 << 20))])


@case
def names_for_a_terminal() -> onnx.ModelProto:
    return model([helper.make_node("No\n\x1b[31mSuch", ["x"], ["y"], name="a\nb\x07")])


def surround(folder: Path) -> None:
    """What the models' external data may meet in their folder."""
    (folder / "w.bin").write_bytes(bytes(range(256)))
    for name, target in (("link", "/etc/passwd"), ("zero", "/dev/zero"), ("loop", "loop")):
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe")


def late(*_: object) -> None:
    raise TimeoutError(f"it takes more than {LIMIT} s of a processor")


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """One command line in this process."""
    from lut4tool import cli

    stdout, stderr, start = io.StringIO(), io.StringIO(), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    signal.alarm(WAIT)
    status: int | str | None = 0
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            sys.argv = ["lut4tool", *arguments]
            cli.main()
    except SystemExit as end:
        status = end.code
    except BaseException as error:  # noqa: BLE001 - a traceback is what it looks for
        status = f"{type(error).__name__}: {error}"
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)
    seconds = time.process_time() - start
    return {"status": status or 0, "seconds": seconds, "peak": peak(), "stderr": stderr.getvalue()}


def peak() -> float:
    """Megabytes that this process ever held; getrusage would count its parent's too on Linux."""
    held = Path("/proc/self/status")
    if held.exists():
        return int(held.read_text().partition("VmHWM:")[2].split()[0]) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    folder = Path(sys.argv[1])
    names = sys.argv[2:] or list(CASES)
    surround(folder)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGPROF, late)
    signal.signal(signal.SIGALRM, late)
    for name in names:
        made = CASES[name]()
        (folder / "in.onnx").write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
        for title, command in COMMANDS.items():
            places = {"IN": str(folder / "in.onnx"), "OUT": str(folder / "out.onnx")}
            print(json.dumps({"case": name, "command": title, "begin": True}), file=sys.__stdout__, flush=True)
            result = run([places.get(word, word) for word in command])
            print(json.dumps({"case": name, "command": title, **result}), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
