"""Coverage-guided fuzzing of model files: recognize, plan, rewrite, expand, quantize and run serve or refuse each.

    python tests/fuzz_files.py [libFuzzer's options] [CORPUS]     # -max_total_time=600 and so on
    python tests/fuzz_files.py FILE ...                           # each once: what a run has found

Needs atheris. A file is mutated as protobuf: fields are set, parts of other models put in, nodes moved into a branch or
a loop; and sometimes as bytes. What is no Lut4Error, takes more than 10 seconds or more than 2 GB ends the process, and
the file stays as crash-*, timeout-* or oom-*. A run of a model with a loop, which may take years, gets a Ctrl-C after a
moment, and has to end then.
"""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris
import hostile
import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message
from onnx import parser

from build import Chain, build, build_many

# An editable install finds the package in its own way, where atheris cannot reach it; here it is found as any other.
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

with atheris.instrument_imports(include=["lut4tool"]):
    from lut4tool import produce, recognize, rewrite, storage
    from lut4tool.errors import Lut4Error
    from lut4tool.rewrite import expand
    from lut4tool.runtime import backend, planning, session

INTEGERS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 64, -1, -2, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63))
WORDS = ("", "x", "y", "dec/packed", "MatMul", "Identity", "ai.onnx", "Gemm", "com.microsoft", "ai.lut4tool", "body")
FLOATS = (0.0, -0.0, 1.0, -1.5, 1e-40, 3e38, float("inf"), float("nan"))
#: Elements that a random input may have; seconds of a processor before a Ctrl-C; bytes for what a model asks for.
ELEMENTS, PATIENCE, ROOM = 1 << 16, 0.3, 3 << 29
#: A test of the standard is a seed where it has fewer bytes.
WHOLE = 5000

#: Bodies in bodies, with captured values, scan outputs, sequences, optionals, functions and their attributes.
TEXTS = (
    """g (bool c, float[2,3] x) => (float[2,3] y, float[N,2,3] rows) {
        t = Mul (x, x)
        y = If (c) <then_branch = a () => (float[2,3] p) { p = Add (t, x) },
                    else_branch = b () => (float[2,3] q) { q = local.scaled <alpha: float = 0.5> (x) }>
        m = Constant <value_int = 5> ()
        last, rows = Loop (m, c, x) <body = d (int64 i, bool go, float[2,3] s)
                => (bool on, float[2,3] u, float[2,3] v) {
            on = Identity (go)
            u = Mul (s, t)
            one = Constant <value_int = 1> ()
            n = Add (i, one)
            v = Loop (n, , u) <body = e (int64 j, bool k, float[2,3] w) => (bool l, float[2,3] z) {
                l = Less (j, i)  z = Neg (w) }>
        }>
    }
    <domain: "local", opset_import: ["" : 17]> scaled <alpha> (a) => (b) {
        f = Constant <value_float: float = @alpha> ()  b = Mul (a, f) }""",
    """g (float[2,3] x, float[4,2,3] z) => (float[2,3] y, float[4,2,3] rows) {
        y, rows = Scan <num_scan_inputs = 1, scan_input_directions = [1], scan_output_axes = [0],
            body = b (float[2,3] s, float[2,3] e) => (float[2,3] t, float[2,3] o) { t = Add (s, e)  o = Mul (t, x) }>
            (x, z)
    }""",
    """g (float[2,3] x) => (seq(float[2,3]) y, float[N,3] z) {
        s = SequenceEmpty ()
        m = Constant <value_int = 3> ()  t = Constant <value = bool {1}> ()
        y = Loop (m, t, s) <body = b (int64 i, bool c, seq(float[2,3]) v) => (bool d, seq(float[2,3]) w) {
            d = Identity (c)  w = SequenceInsert (v, x) }>
        parts = SplitToSequence <axis = 1> (x)
        mapped = SequenceMap (parts) <body = f (float[2,1] p) => (float[2,1] q) { q = Exp (p) }>
        z = ConcatFromSequence <axis = 0> (y)
    }""",
    """g (float[2,3] x, int64[2] w) => (float l) {
        o = Optional (x)  h = OptionalHasElement (o)
        v = If (h) <then_branch = a () => (float[2,3] p) { p = OptionalGetElement (o) },
                    else_branch = b () => (float[2,3] q) { q = Neg (x) }>
        l = SoftmaxCrossEntropyLoss (v, w)
    }""",
)


def seeds() -> list[bytes]:
    """Models of all kinds of chains, and rewritten ones."""
    models = [build(check=False, **options).model for options in (
        {}, {"literals": "constant"}, {"literals": "mixed", "scalar": True, "swap": True}, {"rounding": "float16"},
        {"rounding": "bfloat16", "adjoint": True, "perm": "written"}, {"identities": ("*",), "leaves": "typed"},
        {"place": ("If",)}, {"place": ("function",), "literals": "constant", "leaves": "constant"},
        {"place": ("Loop",)}, {"products": 3}, {"ir": 3},
    )]  # fmt: skip
    models.append(build_many([Chain(prefix="a/", seed=1), Chain(prefix="b/", seed=2, rows=8)]).model)
    floats = hostile.tensor([6, 64], raw=np.ones(384, np.float32).tobytes())
    models += [hostile.packed(), nbits(), hostile.product(floats)]
    from backend_cases import node_tests  # it imports lut4tool, which must be instrumented first

    models += [parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17, "local" : 1]> {text}') for text in TEXTS]
    tests = sorted((test.model for test in node_tests().values()), key=onnx.ModelProto.ByteSize, reverse=True)
    models += {
        tuple(node.op_type for node in test.graph.node): test
        for test in tests
        if len(test.graph.node) == 1 and test.ByteSize() < WHOLE
    }.values()
    models += [test for test in tests[::40] if test.ByteSize() < WHOLE]
    for model in list(models):
        with contextlib.suppress(Lut4Error):
            copy = onnx.ModelProto.FromString(model.SerializeToString())
            if rewrite.rewrite_model(copy, storage.Tensors(None)).rewritten:
                models.append(copy)
    return [model.SerializeToString() for model in models]


def nbits() -> onnx.ModelProto:
    """A vendor's product, x [3, 6] by [6, 4]."""
    facts = {"K": 6, "N": 4, "bits": 4, "block_size": 16}
    node = onnx.helper.make_node("MatMulNBits", ["x", "p", "s"], ["y"], domain="com.microsoft", **facts)
    tensors = [
        hostile.tensor([4, 1, 8], onnx.TensorProto.UINT8, "p", bytes(range(32))),
        hostile.tensor([4], name="s", raw=np.ones(4, np.float32).tobytes()),
    ]
    return hostile.model([node], tensors, domains=["com.microsoft"])


#: Messages of the seeds, by type: parts for other models.
PARTS: dict[str, list[Message]] = {}


def collect(models: list[bytes]) -> None:
    for data in models:
        for message in _messages(onnx.ModelProto.FromString(data)):
            PARTS.setdefault(message.DESCRIPTOR.name, []).append(message)


def mutate(data: bytes, size: int, seed: int) -> bytes:
    """Another file from one: some of its parts changed, or some bytes."""
    rng = random.Random(seed)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        return atheris.Mutate(data, size)
    if rng.random() < 0.15:
        return atheris.Mutate(data, size)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        with contextlib.suppress(TypeError, ValueError, IndexError):  # it does not fit, or there is none
            rng.choices((_edit, _put, _enclose, _rename), (8, 2, 1, 2))[0](model, rng)
    written = model.SerializeToString()
    return written if len(written) <= size else data


def _messages(message: Message) -> list[Message]:
    """A message and all in it, strings and numbers left out."""
    waiting = [message]
    for current in waiting:
        for field, content in current.ListFields():
            if field.message_type is not None:
                waiting += list(content) if field.is_repeated else [content]
    return waiting


def _edit(model: onnx.ModelProto, rng: random.Random) -> None:
    """Change, remove, double or exchange a field, mostly one that is there."""
    message = rng.choice(_messages(model))
    fields = list(message.DESCRIPTOR.fields) if rng.random() < 0.2 else [field for field, _ in message.ListFields()]
    if not fields:
        return
    field = rng.choice(fields)
    content = getattr(message, field.name)
    if not field.is_repeated:
        if rng.random() < 0.1:
            message.ClearField(field.name)
        elif field.message_type is None:
            setattr(message, field.name, _other(content, rng))
        else:
            content.CopyFrom(rng.choice(PARTS.get(field.message_type.name, [content])))
        return
    how = rng.choice(("remove", "double", "exchange", "set", "set"))
    place = rng.randrange(len(content)) if len(content) else 0
    if how == "remove" and len(content):
        del content[place]
    elif how == "double" and len(content):
        content.extend([content[place]])
    elif how == "exchange" and len(content):
        other = rng.randrange(len(content))
        if field.message_type is None:
            content[place], content[other] = content[other], content[place]
        else:
            content[place].CopyFrom(content[other])
    elif field.message_type is None:
        if len(content):
            content[place] = _other(content[place], rng)
        else:
            content.append(rng.choice(INTEGERS))


def _put(model: onnx.ModelProto, rng: random.Random) -> None:
    """A part of another model in the place of one of its type."""
    message = rng.choice(_messages(model)[1:])
    message.CopyFrom(rng.choice(PARTS.get(message.DESCRIPTOR.name, [message])))


def _enclose(model: onnx.ModelProto, rng: random.Random) -> None:
    """A node's work in the branches of an If or the body of a Loop or a Scan, which capture what it reads."""
    body = rng.choice([message for message in _messages(model) if isinstance(message, onnx.GraphProto)])
    node = rng.choice(body.node)
    inner = onnx.GraphProto(name="enclosed", node=[node])
    inner.output.extend(onnx.ValueInfoProto(name=name) for name in node.output)
    kind = rng.choice(("If", "Loop", "Scan"))
    first = list(node.input[:1]) or ["x"]
    if kind == "If":
        made = onnx.helper.make_node("If", first, node.output, then_branch=inner, else_branch=inner)
    else:
        inputs = ["i", "c"] if kind == "Loop" else ["e"]
        inner.input.extend(onnx.ValueInfoProto(name=name) for name in inputs)
        if kind == "Loop":
            inner.output.insert(0, onnx.ValueInfoProto(name="c"))
        extra = {"num_scan_inputs": 1} if kind == "Scan" else {}
        made = onnx.helper.make_node(kind, first, node.output, body=inner, **extra)
    node.CopyFrom(made)


def _rename(model: onnx.ModelProto, rng: random.Random) -> None:
    """An input of a node is another value of the model; or an operator another one."""
    nodes = [message for message in _messages(model) if isinstance(message, onnx.NodeProto)]
    node = rng.choice(nodes)
    if node.input and rng.random() < 0.8:
        node.input[rng.randrange(len(node.input))] = rng.choice(
            [name for other in nodes for name in (*other.input, *other.output)]
        )
    else:
        node.op_type = rng.choice(PARTS["NodeProto"]).op_type


def _other(value: Any, rng: random.Random) -> Any:
    """Another value of a field's type."""
    if isinstance(value, bool | int):
        return rng.choice((value + 1, value - 1, rng.choice(INTEGERS)))
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, str):
        return rng.choice((value + "_", *WORDS))
    data = bytearray(value)
    for _ in range(rng.choice((1, 2, 8))):
        if data:
            data[rng.randrange(len(data))] = rng.choice((0, 1, 16, 127, 128, 255))
    return bytes(data) if rng.random() < 0.8 else bytes(data[: rng.randrange(len(data) + 1)])


def feeds(runtime: session.Runtime) -> dict[str, Any] | None:
    """Random inputs; None where there is none of a reasonable size."""
    rng = np.random.default_rng(0)
    try:
        return {info.name: draw(info.proto, rng) for info in runtime.get_inputs()}
    except (KeyError, OverflowError, RecursionError):
        return None


def draw(proto: onnx.TypeProto, rng: np.random.Generator) -> Any:
    """A value of a type. Raises KeyError where it has none, OverflowError for one that is large."""
    if proto.HasField("optional_type"):
        return draw(proto.optional_type.elem_type, rng) if rng.random() < 0.5 else None
    if proto.HasField("sequence_type"):
        return [draw(proto.sequence_type.elem_type, rng) for _ in range(rng.integers(3))]
    if proto.HasField("map_type"):
        return {1: 0.5}
    shape = [dim.dim_value if dim.HasField("dim_value") else 2 for dim in proto.tensor_type.shape.dim]
    if (
        min(shape, default=0) < 0
        or np.prod([float(size) for size in shape]) > ELEMENTS
        or max(shape, default=0) > ELEMENTS
    ):
        raise OverflowError(shape)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(proto.tensor_type.elem_type)
    numbers = rng.integers(0, 3, shape)
    return np.asarray(numbers).astype(str).astype(object) if dtype.hasobject else np.asarray(numbers).astype(dtype)


class Patience:
    """A Ctrl-C for what takes longer, and another one after as long again until it has ended."""

    waiting = False

    def __enter__(self) -> None:
        self.waiting = True
        signal.signal(signal.SIGVTALRM, self.interrupt)
        signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE, PATIENCE)

    def interrupt(self, *_: object) -> None:
        if self.waiting:
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.waiting = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return kind is KeyboardInterrupt


def serve(data: bytes) -> None:
    """Everything that lut4tool does with a file; raises what is no Lut4Error."""
    with contextlib.suppress(Lut4Error):
        recognize.recognize(storage.parse_model(data))
        planning.check(storage.parse_model(data), backend.device("cpu"))
    tensors = storage.Tensors(None)
    edits: tuple[Callable[[onnx.ModelProto], object], ...] = (
        lambda model: rewrite.rewrite_model(model, tensors, vendor=True),
        lambda model: produce.quantize(model, tensors),
        expand.expand_model,
    )
    for edit in edits:
        with contextlib.suppress(Lut4Error):
            model = storage.parse_model(data)
            edit(model)
            storage.parse_model(model.SerializeToString())
    with contextlib.suppress(Lut4Error):
        model = storage.parse_model(data)
        runtime = session.Runtime(model, "cpu")
        given = feeds(runtime)
        if given is not None:
            loops = b"Loop" in data or b"Scan" in data
            with Patience() if loops else contextlib.nullcontext():
                runtime.run(None, given)


def main() -> None:
    warnings.simplefilter("ignore")
    options = [option for option in sys.argv[1:] if option.startswith("-")]
    places = [option for option in sys.argv[1:] if not option.startswith("-")]
    if files := [place for place in map(Path, places) if place.is_file()]:
        for file in files:
            print(file, flush=True)
            serve(file.read_bytes())
        return
    with tempfile.TemporaryDirectory() as scratch:
        models = seeds()
        collect(models)
        for number, data in enumerate(models):
            (Path(scratch) / f"seed{number}").write_bytes(data)
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + ROOM,) * 2)  # what does not fit is refused
        bounds = ["-timeout=10", "-report_slow_units=60", "-rss_limit_mb=2048", "-max_len=20000"]
        atheris.Setup([sys.argv[0], *bounds, *options, *places, scratch], serve, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
