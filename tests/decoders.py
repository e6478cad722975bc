"""Small language models with caches: one concatenates past and new keys, one leaves the cache to an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, WIDTH, HEADS, GROUPS, SIZE, LAYERS = 96, 64, 4, 2, 16, 2
ROOM = 1100  # positions that the rotary tables have

#: What each input carries from the run before.
CARRY = {f"past_{what}_{layer}": f"present_{what}_{layer}" for layer in range(LAYERS) for what in ("key", "value")}


class _Decoder:
    """A graph under construction; `name = decoder("Op", inputs...)` appends a node."""

    def __init__(self, dtype: type) -> None:
        self.dtype, self.nodes, self.weights = np.dtype(dtype), [], []
        self.random = np.random.default_rng(5)

    def __call__(self, op: str, *inputs: str, out: str = "", domain: str = "", **attributes: Any) -> str:
        out = out or f"{op}_{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(op, inputs, [out], name=f"node_{len(self.nodes)}", domain=domain, **attributes)
        )
        return out

    def weight(self, name: str, *shape: int) -> str:
        values = self.random.standard_normal(shape) / np.sqrt(shape[0])
        return self.constant(name, values.astype(self.dtype))

    def constant(self, name: str, values: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(values), name))
        return name


def decoder(attention: Callable[[_Decoder, str, int], str], dtype: type = np.float32) -> onnx.ModelProto:
    """Layers of attention and a feed-forward part: input_ids and attention_mask [B, *] and caches in, logits out."""
    g = _Decoder(dtype)
    g.constant("one", np.array([1]))
    g.constant("axis", np.array(1, np.int64))
    shape = g("Shape", "attention_mask")
    g("Gather", shape, "axis", out="total")
    kept = g("ReduceSum", "attention_mask", "one", keepdims=0)
    g("Cast", g("Sub", kept, "one"), to=TensorProto.INT32, out="last")
    g("Cast", "total", to=TensorProto.INT32, out="total_32")
    angles = np.arange(ROOM)[:, None] / 100 ** (np.arange(SIZE // 2) / (SIZE // 2))
    g.constant("cos", np.cos(angles).astype(dtype))
    g.constant("sin", np.sin(angles).astype(dtype))
    g.constant("norm", np.ones(WIDTH, dtype))

    x = g("Gather", g.weight("embedding", VOCABULARY, WIDTH), "input_ids")
    for layer in range(LAYERS):
        y = attention(g, g("LayerNormalization", x, "norm"), layer)
        x = g("Add", x, g("MatMul", y, g.weight(f"o_{layer}", HEADS * SIZE, WIDTH)))
        wide = g("Relu", g("MatMul", g("LayerNormalization", x, "norm"), g.weight(f"up_{layer}", WIDTH, 2 * WIDTH)))
        x = g("Add", x, g("MatMul", wide, g.weight(f"down_{layer}", 2 * WIDTH, WIDTH)))
    g("MatMul", x, g.weight("head", WIDTH, VOCABULARY), out="logits")

    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

    def value(name: str, elem: int, *shape: Any) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, elem, shape)

    inputs = [
        value("input_ids", TensorProto.INT64, "batch", "steps"),
        value("attention_mask", TensorProto.INT64, "batch", "total"),
    ]
    inputs += [value(name, kind, "batch", GROUPS, "past", SIZE) for name in CARRY]
    outputs = [value("logits", kind, "batch", "steps", VOCABULARY)]
    outputs += [value(name, kind, "batch", GROUPS, "total", SIZE) for name in CARRY.values()]
    graph = helper.make_graph(g.nodes, "decoder", inputs, outputs, g.weights)
    versions = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=9)


def _projections(g: _Decoder, x: str, layer: int) -> list[str]:
    sizes = {"q": HEADS, "k": GROUPS, "v": GROUPS}
    return [g("MatMul", x, g.weight(f"{what}_{layer}", WIDTH, heads * SIZE)) for what, heads in sizes.items()]


def gqa(g: _Decoder, x: str, layer: int) -> str:
    """GroupQueryAttention with rotary positions, which writes the cache itself."""
    past = [f"past_key_{layer}", f"past_value_{layer}"]
    inputs = [*_projections(g, x, layer), *past, "last", "total_32", "cos", "sin"]
    outputs = [f"y_{layer}", f"present_key_{layer}", f"present_value_{layer}"]
    options = {"num_heads": HEADS, "kv_num_heads": GROUPS, "do_rotary": 1}
    g.nodes.append(helper.make_node("GroupQueryAttention", inputs, outputs, domain="com.microsoft", **options))
    return outputs[0]


def concat(g: _Decoder, x: str, layer: int) -> str:
    """Attention in the standard's operators: Concat of past and new keys, a causal mask by position, no rotation."""
    parts = []
    for what, projected, heads in zip("qkv", _projections(g, x, layer), (HEADS, GROUPS, GROUPS), strict=True):
        split = g.constant(f"{what}_split_{layer}", np.array([0, 0, heads, SIZE]))
        parts.append(g("Transpose", g("Reshape", projected, split), perm=[0, 2, 1, 3]))
    key = g("Concat", f"past_key_{layer}", parts[1], axis=2, out=f"present_key_{layer}")
    value = g("Concat", f"past_value_{layer}", parts[2], axis=2, out=f"present_value_{layer}")
    groups = g.constant(f"groups_{layer}", np.array([0, GROUPS, -1, SIZE]))
    g.constant(f"scale_{layer}", np.array(SIZE**-0.5, g.dtype))
    grouped = g("Mul", g("Reshape", parts[0], groups), f"scale_{layer}")  # [B, G, N / G * S, H]
    scores = g("MatMul", grouped, g("Transpose", key, perm=[0, 1, 3, 2]))
    weights = g("Softmax", g("Add", scores, _causal(g, parts[0], layer)))
    back = g.constant(f"heads_{layer}", np.array([0, HEADS, -1, SIZE]))
    y = g("Transpose", g("Reshape", g("MatMul", weights, value), back), perm=[0, 2, 1, 3])
    return g("Reshape", y, g.constant(f"join_{layer}", np.array([0, 0, HEADS * SIZE])))


def _causal(g: _Decoder, query: str, layer: int) -> str:
    """0 where a key is not after its query, else -1e4: [N / G * S, T]."""
    steps = g("Gather", g("Shape", query), g.constant(f"two_{layer}", np.array(2)))
    zero, step = g.constant(f"zero_{layer}", np.array(0)), g.constant(f"step_{layer}", np.array(1))
    queries = g("Range", g("Sub", "total", steps), "total", step)
    column = g("Unsqueeze", queries, g.constant(f"last_{layer}", np.array([-1])))
    seen = g("LessOrEqual", g("Range", zero, "total", step), column)
    dark = g.constant(f"dark_{layer}", np.array([-1e4, 0], g.dtype))
    added = g("Gather", dark, g("Cast", seen, to=TensorProto.INT64))
    return g("Tile", added, g.constant(f"repeats_{layer}", np.array([HEADS // GROUPS, 1])))


def greedy(
    step: Callable[[Mapping[str, np.ndarray]], np.ndarray], prompt: np.ndarray, lengths: Sequence[int], tokens: int
) -> np.ndarray:
    """The likeliest token each time, of those that the last twelve were not: [B, tokens].

    step: runs a model on input_ids and attention_mask and returns its logits; prompt: [B, S], each row padded on the
    right from its length on.
    """
    rows, ends = np.arange(len(lengths)), np.asarray(lengths)
    ids, at, found = prompt, ends - 1, np.zeros((len(lengths), 0), np.int64)
    for past in range(tokens):
        total = prompt.shape[1] + past
        mask = (np.arange(total) < (ends + past)[:, None]).astype(np.int64)
        logits = np.array(step({"input_ids": ids, "attention_mask": mask}), np.float32)[rows, at]
        np.put_along_axis(logits, found[:, -12:], -np.inf, axis=1)
        ids, at = logits.argmax(-1)[:, None], 0 * at
        found = np.concatenate([found, ids], axis=1)
    return found
