"""What multiplies x by one random 4-bit weight here: our Runtime, dense products, and onnxruntime and bitsandbytes.

Peers are imported here, where they are installed, and nowhere else: none is a dependency.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lut4tool import native
from lut4tool.errors import Lut4Error
from lut4tool.formats import DOMAIN, FLOAT_DTYPES, LOOKUP4_MATMUL, ONNX_DTYPE, QMM, Lookup4Weight, QmmWeight
from lut4tool.runtime import backend  # it readies MLX, so kernels are imported later
from lut4tool.runtime.backend import mx
from lut4tool.runtime.dtypes import to_mx, to_numpy
from lut4tool.runtime.session import Runtime
from lut4tool.storage import PROTO_LIMIT, size_text

OURS, DENSE, DECODE = "lut4tool", "dense", "decode + dense"
ORT_DENSE, ORT_BNB4, ORT_NBITS = "onnxruntime dense", "onnxruntime MatMulBnb4", "onnxruntime MatMulNBits"
ONNXRUNTIME, BITSANDBYTES = "onnxruntime", "bitsandbytes"

#: A weight that would be larger once dense is not made dense: a few copies of it are in memory at a time.
MOST_DENSE_BYTES = 1 << 30
#: What bitsandbytes.functional.quantize_4bit takes.
_BITSANDBYTES_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)

Weight = Lookup4Weight | QmmWeight
Call = Callable[[], Any]


class EngineError(Lut4Error):
    """An engine that is not timed, and why."""


@dataclass(frozen=True)
class Engine:
    """What makes a product.

    load: puts x [M, K] where the engine reads it, and returns a call that makes y and waits for it.
    kernel: what serves: our kernel, or a peer's version. result: y as a NumPy array.
    """

    name: str
    kernel: str
    load: Callable[[np.ndarray], Call]
    result: Callable[[Any], np.ndarray] = np.asarray


@dataclass(frozen=True, eq=False)
class Product:
    """A product by `weight`, x and y of type `dtype`, to be made on a device by so many threads where it is a CPU."""

    weight: Weight
    dtype: str
    device: str
    threads: int

    @property
    def kind(self) -> str:
        """The device's kind: "metal", "cuda" or "cpu"."""
        return kind_of(self.device)

    @cached_property
    def matrix(self) -> np.ndarray:
        """The dense matrix [K, N]. Raises EngineError where it would be large."""
        weight = self.weight
        elements = weight.N * weight.K if isinstance(weight, QmmWeight) else weight.rows * weight.cols
        size = elements * FLOAT_DTYPES[self.dtype].itemsize
        if size > MOST_DENSE_BYTES:
            raise EngineError(f"not made: {size_text(size)} of dense weight, over {size_text(MOST_DENSE_BYTES)}")
        if isinstance(weight, QmmWeight):
            return np.ascontiguousarray(native.decode_qmm(weight).T)
        flat = native.decode_elements(weight, 0, elements)
        return np.ascontiguousarray(flat.reshape(weight.rows, weight.cols).transpose(weight.perm))


def kind_of(device: str) -> str:
    """The kind of the device that a name means: "metal", "cuda" or "cpu"."""
    return backend.kind(backend.device(device))


def engines_of(product: Product) -> tuple[list[Engine], dict[str, str]]:
    """The engines that make a product here, ours first, and by name why others do not."""
    made, missing = [_ours(product)], dict[str, str]()
    makers = dict(_MAKERS["affine" if isinstance(product.weight, QmmWeight) else "lookup"])
    try:
        _require_onnxruntime(product)
    except EngineError as error:  # said once, not for each of its kernels
        missing[ONNXRUNTIME] = str(error)
        makers = {name: make for name, make in makers.items() if not name.startswith(ONNXRUNTIME)}
    for name, make in makers.items():
        try:
            made.append(make(product))
        except EngineError as error:
            missing[name] = str(error)
        except Exception as error:  # noqa: BLE001 - a peer may raise anything, and the others go on
            missing[name] = _failure(error)
    return made, missing


def call_of(engine: Engine, x: np.ndarray) -> tuple[Call, np.ndarray]:
    """What makes the product of x, and the first result. Raises EngineError where the engine fails."""
    try:
        call = engine.load(x)
        return call, engine.result(call())
    except Exception as error:
        raise EngineError(_failure(error)) from error


def _failure(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


# -- models


def _model(op: str, domain: str, leaves: Mapping[str, np.ndarray], attributes: Any, dtype: str) -> onnx.ModelProto:
    node = helper.make_node(op, ["x", *leaves], ["y"], "product", domain=domain, **attributes)
    ends = [helper.make_tensor_value_info(name, ONNX_DTYPE[dtype], [None, None]) for name in ("x", "y")]
    weights = [numpy_helper.from_array(array, name) for name, array in leaves.items()]
    graph = helper.make_graph([node], "product", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _dense_model(product: Product) -> onnx.ModelProto:
    return _model("MatMul", "", {"w": product.matrix}, {}, product.dtype)


# -- ours


def _ours(product: Product) -> Engine:
    weight = product.weight
    leaves = {"packed": weight.packed, "scales": weight.scales}
    if isinstance(weight, QmmWeight):
        name, leaves["zero_points"] = QMM, weight.zero_points
    else:
        name, leaves["codebook"] = LOOKUP4_MATMUL, weight.codebook
    return _in_runtime(OURS, _model(name, DOMAIN, leaves, weight.attributes(product.dtype), product.dtype), product)


def _in_runtime(name: str, model: onnx.ModelProto, product: Product) -> Engine:
    runtime = Runtime(model, product.device)
    kernel = "".join(str(choice.name) for choice in runtime.kernels.values())
    if product.kind == "cpu":
        return Engine(name, kernel, lambda x: lambda: runtime.run(None, {"x": x})[0])
    return Engine(name, kernel, partial(_load_on_device, runtime), lambda y: np.array(to_numpy(y)))


def _load_on_device(runtime: Runtime, x: np.ndarray) -> Call:
    """Put x on the device; y stays there."""
    with mx.stream(runtime.device):
        feeds = {"x": to_mx(x)}
        mx.eval(feeds["x"])
    return lambda: runtime.evaluate(None, feeds)[0]


def _dense(product: Product) -> Engine:
    return _in_runtime(DENSE, _dense_model(product), product)


def _decode_and_dense(product: Product) -> Engine:
    """The whole weight decoded in every run, then a dense product: NumPy's on a CPU, MLX's on a GPU."""
    weight = product.weight
    assert isinstance(weight, Lookup4Weight)
    _ = product.matrix.nbytes  # or it is too large
    if product.kind != "cpu":
        return _decode_on_device(product, weight)
    if product.dtype != "float32":
        raise EngineError("on a CPU timed in float32 only: NumPy has no quick product of halves")
    elements = np.empty(weight.rows * weight.cols, np.float32)
    matrix = elements.reshape(weight.rows, weight.cols).transpose(weight.perm)

    def run(x: np.ndarray) -> np.ndarray:
        native.decode_elements(weight, 0, elements.size, elements)
        y: np.ndarray = x @ matrix
        return y

    return Engine(DECODE, "", lambda x: partial(run, x))


def _decode_on_device(product: Product, weight: Lookup4Weight) -> Engine:
    from lut4tool.kernels import choose

    choice, device = choose(weight, product.dtype, product.kind), backend.device(product.device)

    def load(x: np.ndarray) -> Call:
        with mx.stream(device):
            data = to_mx(x)
            mx.eval(data)

        def run() -> Any:
            with mx.stream(device):
                y = mx.matmul(data, choice.module.lookup4_decode(weight).transpose(weight.perm))
                mx.eval(y)
            return y

        return run

    return Engine(DECODE, choice.name, load, lambda y: np.array(to_numpy(y)))


# -- onnxruntime


def _require_onnxruntime(product: Product) -> None:
    if not importlib.util.find_spec(ONNXRUNTIME):
        raise EngineError("not installed")
    if product.kind != "cpu" or product.dtype != "float32":
        raise EngineError("timed on a CPU in float32 only")


def _onnxruntime(name: str, make: Callable[[Product], onnx.ModelProto], product: Product) -> Engine:
    import onnxruntime

    model = make(product)
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) > PROTO_LIMIT - (1 << 20):
        raise EngineError("not made: protobuf holds no weight of 2 GiB")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = product.threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Engine(name, onnxruntime.__version__, lambda x: lambda: session.run(None, {"x": x})[0])


def _nbits_model(product: Product) -> onnx.ModelProto:
    weight = product.weight
    assert isinstance(weight, QmmWeight)
    zeros = np.full((weight.N, (weight.scales.shape[1] + 1) // 2), 0x88, np.uint8)
    leaves = {"b": weight.packed, "scales": weight.scales.reshape(-1), "zeros": zeros.reshape(-1)}
    sizes = {"K": weight.K, "N": weight.N, "bits": 4, "block_size": _power(weight.block_size), "accuracy_level": 0}
    return _model("MatMulNBits", "com.microsoft", leaves, sizes, product.dtype)


def _bnb4_model(product: Product) -> onnx.ModelProto:
    weight = _stored_by_outputs(product.weight)
    sizes = {"K": weight.cols, "N": weight.rows, "block_size": _power(weight.block_size), "quant_type": 1}
    return _model("MatMulBnb4", "com.microsoft", {"b": weight.packed, "absmax": weight.scales}, sizes, product.dtype)


def _power(block_size: int) -> int:
    if block_size < 16 or block_size & (block_size - 1):
        raise EngineError(f"its blocks are powers of two from 16 on, not {block_size}")
    return block_size


def _stored_by_outputs(weight: Weight) -> Lookup4Weight:
    """A weight that lies as bitsandbytes has it. Raises EngineError for another."""
    if isinstance(weight, QmmWeight):
        raise EngineError("it has no affine weights")
    if tuple(weight.perm) != (1, 0):
        raise EngineError("it multiplies by weights that lie as [N, K] only")
    return weight


# -- bitsandbytes


def _bitsandbytes(product: Product) -> Engine:
    """matmul_4bit of NF4 weights; bfloat16 on a CPU by an evaluated Linear4bit, which is how it has its own kernel.

    The packed bytes and scales are ours: its layout is the same. torch has product.threads threads from then on.
    """
    library, torch = _imported(BITSANDBYTES, "torch"), importlib.import_module("torch")
    if product.kind == "metal":
        raise EngineError("timed on a CPU and with CUDA only")
    if product.kind == "cuda" and not torch.cuda.is_available():
        raise EngineError("the torch that is installed sees no CUDA device")
    weight = _stored_by_outputs(product.weight)
    if weight.block_size not in _BITSANDBYTES_BLOCKS:
        raise EngineError(f"its blocks are powers of two from 32 to 4096, not {weight.block_size}")
    torch.set_num_threads(product.threads)
    place, kind = torch.device(product.kind), getattr(torch, product.dtype)
    state = library.functional.QuantState(
        absmax=torch.from_numpy(weight.scales).to(place),
        shape=torch.Size((weight.rows, weight.cols)),
        code=library.functional.get_4bit_type("nf4", device=place),
        blocksize=weight.block_size,
        quant_type="nf4",
        dtype=kind,
    )
    packed = torch.from_numpy(weight.packed).reshape(-1, 1).to(place)
    multiply = partial(library.matmul_4bit, B=packed.t(), quant_state=state)
    if (
        product.kind == "cpu"
        and product.dtype == "bfloat16"
        and not (weight.rows % 32 or weight.cols % weight.block_size)
    ):
        multiply = _linear_4bit(library, weight, packed, state, kind)

    def load(x: np.ndarray) -> Call:
        data = torch.from_numpy(x.astype(np.float32)).to(place, kind)

        def run() -> Any:
            with torch.no_grad():
                y = multiply(data)
            if product.kind == "cuda":
                torch.cuda.synchronize()
            return y

        return run

    versions = f"{library.__version__}, torch {torch.__version__}"
    return Engine(BITSANDBYTES, versions, load, lambda y: np.asarray(y.float().cpu().numpy()))


def _linear_4bit(library: Any, weight: Lookup4Weight, packed: Any, state: Any, kind: Any) -> Any:
    layer = library.nn.Linear4bit(
        weight.cols, weight.rows, bias=False, compute_dtype=kind, quant_type="nf4", device="meta"
    )
    layer.weight = library.nn.Params4bit(
        packed, quant_state=state, blocksize=weight.block_size, quant_type="nf4", bnb_quantized=True, module=layer
    )
    return layer.eval()


def _imported(name: str, needs: str) -> Any:
    """A peer's module. Raises EngineError where it is not installed or does not import."""
    if importlib.util.find_spec(name) is None:
        raise EngineError("not installed")
    if importlib.util.find_spec(needs) is None:
        raise EngineError(f"{needs}, which it needs, is not installed")
    logging.getLogger(name).setLevel(logging.ERROR)  # it warns of kernels that it could fetch
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise EngineError(f"installed, but does not import: {' '.join(str(error).split())[:200]}") from error


#: What is tried beside ours, in the order of the table.
_MAKERS: Mapping[str, Mapping[str, Callable[[Product], Engine]]] = {
    "lookup": {
        DENSE: _dense,
        DECODE: _decode_and_dense,
        ORT_DENSE: partial(_onnxruntime, ORT_DENSE, _dense_model),
        ORT_BNB4: partial(_onnxruntime, ORT_BNB4, _bnb4_model),
        BITSANDBYTES: _bitsandbytes,
    },
    "affine": {
        DENSE: _dense,
        ORT_DENSE: partial(_onnxruntime, ORT_DENSE, _dense_model),
        ORT_NBITS: partial(_onnxruntime, ORT_NBITS, _nbits_model),
        BITSANDBYTES: _bitsandbytes,
    },
}
