"""The demonstration: a transformer block with 4-bit chains, forward and adjoint, rewritten and run side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lut4tool.errors import Lut4Error
from lut4tool.formats import NF4
from lut4tool.measure import FOLDING_OFF, LUT4TOOL, ONNXRUNTIME, Measured, difference, measure

if TYPE_CHECKING:
    import onnx

Progress = Callable[[str, int, int], None]

ORIGINAL, REWRITTEN = "original", "rewritten"
_ROWS = 8  # of x in the demonstration


class DemoError(Lut4Error):
    """The demonstration could not be built or run on this machine."""


class _Block:
    """Writes operators into an onnx-graphsurgeon graph; each method returns the value it makes."""

    def __init__(self, dim: int, hidden: int, heads: int, seed: int) -> None:
        try:
            import onnx_graphsurgeon as gs
        except ImportError as error:
            raise DemoError("the demo model is built with onnx-graphsurgeon: pip install onnx-graphsurgeon") from error
        self.gs, self.heads, self.width = gs, heads, dim // heads
        self.graph = gs.Graph(opset=17, name="transformer_block", ir_version=8)
        shapes = {"q": (dim, dim), "k": (dim, dim), "v": (dim, dim), "o": (dim, dim)}
        shapes |= {"gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}
        random = np.random.default_rng(seed)
        self.weights = {
            name: gs.Constant(f"{name}.weight", random.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5))
            for name, shape in shapes.items()
        }

    def op(self, op: str, *inputs: Any, name: str = "", **attrs: Any) -> Any:
        given = [np.array(value, np.float32) if isinstance(value, float) else value for value in inputs]
        return self.graph.layer(op=op, inputs=given, outputs=[name or op.lower()], name=name, attrs=attrs)[0]

    def project(self, x: Any, weight: str) -> Any:  # [rows, in] -> [rows, out]
        return self.op("MatMul", x, self.weights[weight], name=f"{weight}/forward")

    def pull_back(self, gradient: Any, weight: str) -> Any:  # [rows, out] -> [rows, in]
        transposed = self.op("Transpose", self.weights[weight], perm=[1, 0])
        return self.op("MatMul", gradient, transposed, name=f"{weight}/adjoint")

    def split(self, x: Any) -> Any:  # [rows, dim] -> [heads, rows, width]
        parts = self.op("Reshape", x, np.array([0, self.heads, self.width]))
        return self.op("Transpose", parts, perm=[1, 0, 2])

    def join(self, x: Any) -> Any:  # [heads, rows, width] -> [rows, dim]
        return self.op("Reshape", self.op("Transpose", x, perm=[1, 0, 2]), np.array([0, self.heads * self.width]))

    def swap(self, x: Any) -> Any:
        return self.op("Transpose", x, perm=[0, 2, 1])

    def mean(self, x: Any) -> Any:
        return self.op("ReduceMean", x, axes=[-1], keepdims=1)

    def norm(self, x: Any) -> tuple[Any, Any]:  # RMSNorm, and the factor of each row
        factor = self.op("Reciprocal", self.op("Sqrt", self.op("Add", self.mean(self.op("Mul", x, x)), 1e-6)))
        return self.op("Mul", x, factor), factor

    def norm_back(self, gradient: Any, x: Any, factor: Any) -> Any:
        unit = self.op("Mul", x, factor)
        along = self.op("Mul", unit, self.mean(self.op("Mul", gradient, unit)))
        return self.op("Mul", self.op("Sub", gradient, along), factor)


def build_block(
    dim: int = 1024,
    hidden: int = 2816,
    block_size: int = 64,
    codebook: np.ndarray = NF4,
    seed: int = 0,
    heads: int = 8,
    rounding: str | None = "float16",
) -> onnx.ModelProto:
    """Build a transformer block and its gradient, with seven weights as 4-bit chains, each used forward and adjoint.

    Inputs x and dy, float32 [rows, dim]; outputs y = x + attention + gated MLP, with RMSNorm before each and no
    mask, and dx, the gradient of sum(y * dy) by x. Weights are random. `rounding` is that of produce.quantize.
    Raises DemoError without onnx-graphsurgeon.
    """
    from lut4tool.produce import quantize
    from lut4tool.storage import Tensors

    if dim % heads:
        raise DemoError(f"dim {dim} is not a multiple of {heads} heads")
    block = _Block(dim, hidden, heads, seed)
    op, scale = block.op, float(block.width**-0.5)
    x, dy = (block.gs.Variable(name, np.float32, ["rows", dim]) for name in ("x", "dy"))

    normed, factor = block.norm(x)
    q, k, v = (block.split(block.project(normed, name)) for name in "qkv")
    weights = op("Softmax", op("Mul", op("MatMul", q, block.swap(k)), scale), axis=-1)  # [heads, rows, rows]
    middle = op("Add", x, block.project(block.join(op("MatMul", weights, v)), "o"))
    middle_normed, middle_factor = block.norm(middle)
    gate, up = block.project(middle_normed, "gate"), block.project(middle_normed, "up")
    open_ = op("Sigmoid", gate)
    active = op("Mul", gate, open_)
    y = op("Add", middle, block.project(op("Mul", active, up), "down"))

    d_product = block.pull_back(dy, "down")
    slope = op("Mul", open_, op("Add", op("Mul", gate, op("Sub", 1.0, open_)), 1.0))
    d_gate = block.pull_back(op("Mul", op("Mul", d_product, up), slope), "gate")
    d_up = block.pull_back(op("Mul", d_product, active), "up")
    d_middle = op("Add", dy, block.norm_back(op("Add", d_gate, d_up), middle, middle_factor))
    d_context = block.split(block.pull_back(d_middle, "o"))
    d_weights = op("MatMul", d_context, block.swap(v))
    total = op("ReduceSum", op("Mul", d_weights, weights), np.array([-1]), keepdims=1)
    d_scores = op("Mul", op("Mul", weights, op("Sub", d_weights, total)), scale)
    d_q, d_k = op("MatMul", d_scores, k), op("MatMul", block.swap(d_scores), q)
    d_v = op("MatMul", block.swap(weights), d_context)
    d_heads = zip("qkv", (d_q, d_k, d_v), strict=True)
    by_q, by_k, by_v = (block.pull_back(block.join(value), name) for name, value in d_heads)
    dx = op("Add", d_middle, block.norm_back(op("Add", op("Add", by_q, by_k), by_v), x, factor))

    for value, name in ((y, "y"), (dx, "dx")):
        value.name, value.dtype, value.shape = name, np.dtype(np.float32), ["rows", dim]
    block.graph.inputs, block.graph.outputs = [x, dy], [y, dx]
    model = block.gs.export_onnx(block.graph)
    quantize(model, Tensors(None), codebook=codebook, block_size=block_size, rounding=rounding)
    return model


@dataclass(frozen=True)
class DemoRow:
    """One model in one engine; `difference` is the largest from the first row, over the largest magnitude there."""

    model: str
    engine: str
    measured: Measured
    difference: float


@dataclass(frozen=True)
class DemoReport:
    """The demonstration's figures: file and weight sizes in bytes, a row a model and engine, and why one is missing."""

    dim: int
    hidden: int
    sites: int
    witness_elements: int
    original_bytes: int
    rewritten_bytes: int
    dense_bytes: int
    rows: tuple[DemoRow, ...]
    missing: Mapping[str, str]

    @property
    def largest_difference(self) -> float:
        """The largest of all rows."""
        return max(row.difference for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The report as plain lists, numbers and strings."""
        rows = [
            {"model": row.model, "engine": row.engine, "difference": row.difference} | row.measured.to_json()
            for row in self.rows
        ]
        return vars(self) | {
            "rows": rows,
            "missing": dict(self.missing),
            "largest_difference": self.largest_difference,
        }


def demo(folder: Path, progress: Progress | None = None, dim: int = 1024, hidden: int = 2816) -> DemoReport:
    """Build the block in `folder`, rewrite it with every block compared, and measure both models.

    Each measurement runs in a process of its own, so that its peak memory is its own. onnxruntime runs where it is
    installed: both models as it comes, which folds every weight dense, and the rewritten one with that folding off.
    Raises DemoError, MeasureError and the errors of rewrite.
    """
    from lut4tool.rewrite import rewrite

    folder.mkdir(parents=True, exist_ok=True)
    paths = {ORIGINAL: folder / "block.onnx", REWRITTEN: folder / "block.lut4.onnx"}
    report = progress or (lambda what, done, total: None)
    report("build", 0, 1)
    paths[ORIGINAL].write_bytes(build_block(dim, hidden).SerializeToString(deterministic=True))
    report("build", 1, 1)
    result = rewrite(paths[ORIGINAL], paths[REWRITTEN], verify=True, force=True, progress=progress)
    if result.refused:
        raise DemoError(result.refused[0].reason)
    random = np.random.default_rng(1)
    feeds = {name: random.standard_normal((_ROWS, dim), np.float32) for name in ("x", "dy")}

    steps, missing = [(ORIGINAL, LUT4TOOL), (REWRITTEN, LUT4TOOL)], {}
    if find_spec(ONNXRUNTIME) is None:
        missing[ONNXRUNTIME] = "not installed, so it is not compared with; pip install onnxruntime"
    else:
        steps = [(ORIGINAL, ONNXRUNTIME), (REWRITTEN, ONNXRUNTIME), (REWRITTEN, FOLDING_OFF), *steps]
    rows: list[DemoRow] = []
    expected: dict[str, np.ndarray] = {}
    for number, (model, engine) in enumerate(steps):
        report("measure", number, len(steps))
        measured = measure(paths[model], feeds, engine)
        expected = expected or dict(measured.outputs)
        rows.append(DemoRow(model, engine, measured, difference(measured.outputs, expected)))
    report("measure", len(steps), len(steps))
    return DemoReport(
        dim,
        hidden,
        sites=len(result.rewritten),
        witness_elements=sum(witness.compared for _, witness in result.rewritten if witness),
        original_bytes=paths[ORIGINAL].stat().st_size,
        rewritten_bytes=paths[REWRITTEN].stat().st_size,
        dense_bytes=result.dense_bytes,
        rows=tuple(rows),
        missing=missing,
    )
