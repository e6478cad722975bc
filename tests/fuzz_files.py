"""Coverage-guided fuzzing of model files: recognize, plan, rewrite, expand, quantize and run serve or refuse each.

    python tests/fuzz_files.py [libFuzzer's options] [CORPUS]     # -max_total_time=600 and so on

Needs atheris. A file is mutated as protobuf, field by field, and sometimes as bytes. What is no Lut4Error, takes more
than 10 seconds or more than 2 GB ends the process, and the file stays as crash-*, timeout-* or oom-*.
"""

from __future__ import annotations

import contextlib
import random
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

from build import Chain, build, build_many

# An editable install finds the package in its own way, where atheris cannot reach it; here it is found as any other.
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

with atheris.instrument_imports(include=["lut4tool"]):
    from lut4tool import produce, recognize, rewrite, storage
    from lut4tool.errors import Lut4Error
    from lut4tool.rewrite import expand
    from lut4tool.runtime import backend, plan, running, session

INTEGERS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 64, -1, -2, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63))
FLOATS = (0.0, -0.0, 1.0, -1.5, 1e-40, 3e38, float("inf"), float("nan"))
#: Operators whose work a file may make as long as it likes: such a model is not run.
ENDLESS = {"Loop", "Scan", "If"}
#: Elements that an input may have in a run.
ELEMENTS = 1 << 16


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

    tests = sorted(node_tests().items())
    models += [test.model for _, test in tests[:: len(tests) // 40] if test.model.ByteSize() < 5000]
    for model in list(models):
        with contextlib.suppress(Lut4Error):
            copy = onnx.ModelProto.FromString(model.SerializeToString())
            rewrite.rewrite_model(copy, storage.Tensors(None))
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


def mutate(data: bytes, size: int, seed: int) -> bytes:
    """Another file from one: a few fields set, removed, doubled or exchanged, or some bytes."""
    rng = random.Random(seed)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        return atheris.Mutate(data, size)
    if rng.random() < 0.15:
        return atheris.Mutate(data, size)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        with contextlib.suppress(TypeError, ValueError):  # a value that its field does not take
            _edit(rng.choice(list(_messages(model))), rng)
    written = model.SerializeToString()
    return written if len(written) <= size else data


def _messages(message: Message) -> Any:
    """A message and all in it, strings and numbers left out."""
    waiting = [message]
    for current in waiting:
        yield current
        for field, content in current.ListFields():
            if field.message_type is not None:
                waiting += list(content) if field.is_repeated else [content]


def _edit(message: Message, rng: random.Random) -> None:
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


def _other(value: Any, rng: random.Random) -> Any:
    """Another value of a field's type."""
    if isinstance(value, bool | int):
        return rng.choice((value + 1, value - 1, rng.choice(INTEGERS)))
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, str):
        return rng.choice(("", value + "_", "x", "y", "dec/packed", "MatMul", "Identity", "ai.onnx", "Gemm"))
    data = bytearray(value)
    for _ in range(rng.choice((1, 2, 8))):
        if data:
            data[rng.randrange(len(data))] = rng.choice((0, 1, 16, 127, 128, 255))
    return bytes(data) if rng.random() < 0.8 else bytes(data[: rng.randrange(len(data) + 1)])


def feeds(runtime: session.Runtime) -> dict[str, Any] | None:
    """Random inputs; None where there is none of a reasonable size."""
    for info in runtime.get_inputs():
        sizes = [dim for dim in info.shape or () if isinstance(dim, int)]
        if int(np.prod([float(size) for size in sizes])) > ELEMENTS:
            return None
    return running.random_feeds(runtime.get_inputs(), {}, 0)


def serve(data: bytes) -> None:
    """Everything that lut4tool does with a file; raises what is no Lut4Error."""
    with contextlib.suppress(Lut4Error):
        recognize.recognize(storage.parse_model(data))
        plan.check(storage.parse_model(data), backend.device("cpu"))
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
        nodes = {node.op_type for body in (model.graph, *model.functions) for node in body.node}
        if given is not None and not nodes & ENDLESS:
            runtime.run(None, given)


def main() -> None:
    warnings.simplefilter("ignore")
    options = [option for option in sys.argv[1:] if option.startswith("-")]
    places = [option for option in sys.argv[1:] if not option.startswith("-")]
    with tempfile.TemporaryDirectory() as scratch:
        for number, data in enumerate(seeds()):
            (Path(scratch) / f"seed{number}").write_bytes(data)
        bounds = ["-timeout=10", "-rss_limit_mb=2048", "-max_len=20000"]
        atheris.Setup([sys.argv[0], *bounds, *options, *places, scratch], serve, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
