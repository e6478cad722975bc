"""com.microsoft's MoE and QMoE against onnxruntime and, where its CPU lacks an option, NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contrib_cases import close, compare, contrib, feeds, ours
from places import place  # noqa: F401 - a fixture

from lut4tool.runtime.registry import Unsupported
from lut4tool.runtime.session import Runtime

pytestmark = pytest.mark.usefixtures("place")

RNG = np.random.default_rng(23)
EXPERTS, HIDDEN, INNER, TOKENS = 4, 32, 64, 7


def floats(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def moe(bias: bool, wide: int = 1, third: bool = False, dtype: type = np.float32) -> list[Any]:
    """Inputs of MoE; `wide` is 2 where the first layer holds gate and linear."""
    inputs = [floats(TOKENS, HIDDEN), floats(TOKENS, EXPERTS), floats(EXPERTS, wide * INNER, HIDDEN) / 6]
    inputs += [floats(EXPERTS, wide * INNER) if bias else None, floats(EXPERTS, HIDDEN, INNER) / 8]
    inputs += [floats(EXPERTS, HIDDEN) if bias else None]
    if third:
        inputs += [floats(EXPERTS, INNER, HIDDEN) / 6, floats(EXPERTS, INNER) if bias else None]
    return [None if part is None else part.astype(dtype) for part in inputs]


ACTIVATIONS = ["relu", "gelu", "silu", "identity"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("k", "normalize"), [(1, 0), (2, 0), (2, 1), (4, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_moe(activation, k, normalize, bias):
    options = {"activation_type": activation, "k": k, "normalize_routing_weights": normalize}
    compare("MoE", moe(bias), atol=1e-5, **options)


SWIGLU = [{}, {"activation_alpha": 1.702, "activation_beta": 1.0}, {"swiglu_limit": 0.5, "activation_beta": 0.5}]


@pytest.mark.parametrize("options", SWIGLU, ids=str)
def test_moe_with_a_gate(options):
    compare("MoE", moe(True, wide=2), activation_type="swiglu", swiglu_fusion=1, k=2, **options)


def test_moe_of_a_dense_batch():
    inputs = moe(True)
    inputs[0], inputs[1] = floats(2, 3, HIDDEN), floats(6, EXPERTS)
    compare("MoE", inputs, activation_type="relu", k=2)


# -- NumPy in float64, for layouts that onnxruntime's CPU refuses


def numpy_moe(
    inputs: list[Any], k: int, act: Any, mixing: np.ndarray | None = None, normalize: bool = True
) -> np.ndarray:
    """What MoE means: `act` takes layer 1 and layer 3 (None without one)."""
    x, router, w1, b1, w2, b2, w3, b3 = [None if v is None else v.astype(np.float64) for v in (*inputs, None, None)[:8]]
    y = np.zeros_like(x)
    for token, scores in enumerate(router):
        best = np.argsort(-scores)[:k]
        shares = (np.exp(scores) / np.exp(scores).sum() if mixing is None else mixing[token])[best]
        for expert, share in zip(best, shares / shares.sum() if normalize else shares, strict=True):
            first = w1[expert] @ x[token] + (0 if b1 is None else b1[expert])
            third = None if w3 is None else w3[expert] @ x[token] + (0 if b3 is None else b3[expert])
            y[token] += share * (w2[expert] @ act(first, third) + (0 if b2 is None else b2[expert]))
    return y


def swiglu(
    gate: np.ndarray, linear: np.ndarray, alpha: float = 1.3, beta: float = 0.5, limit: float = 0.7
) -> np.ndarray:
    gate = np.minimum(gate, limit)
    return gate / (1 + np.exp(-alpha * gate)) * (np.clip(linear, -limit, limit) + beta)


def halves(first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return first[: len(first) // 2], first[len(first) // 2 :]


def tanh_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def limited_after(gate: np.ndarray, linear: np.ndarray) -> np.ndarray:
    return np.minimum(gate / (1 + np.exp(-gate)), 0.3) * np.clip(linear, -0.3, 0.3)


LIMITED = {"activation_type": "swiglu", "activation_alpha": 1.3, "activation_beta": 0.5, "swiglu_limit": 0.7}
AFTER = {"activation_type": "swiglu", "swiglu_fusion": 2, "swiglu_limit": 0.3, "swiglu_limit_after_activation": 1}
GEGLU = {"activation_type": "geglu", "swiglu_fusion": 1}
LAYOUTS = [
    ({**LIMITED, "swiglu_fusion": 2}, 2, False, lambda first, third: swiglu(*halves(first))),
    ({**LIMITED, "swiglu_fusion": 0}, 1, True, swiglu),
    (AFTER, 2, False, lambda first, third: limited_after(*halves(first))),
    (GEGLU, 2, False, lambda first, third: tanh_gelu(first[::2]) * first[1::2]),
    ({"activation_type": "relu2"}, 1, False, lambda first, third: np.maximum(first, 0) ** 2),
    ({"activation_type": "silu"}, 1, True, lambda first, third: first / (1 + np.exp(-first)) * third),
]


@pytest.mark.parametrize(
    ("options", "wide", "third", "act"), LAYOUTS, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_moe_layouts(options, wide, third, act):
    inputs = moe(True, wide, third)
    (y,) = ours(contrib("MoE", inputs, k=2, normalize_routing_weights=1, **options), inputs)
    np.testing.assert_allclose(y, numpy_moe(inputs, 2, act), rtol=1e-4, atol=1e-5)


# -- QMoE


def quantized(
    weights: np.ndarray, bits: int, block: int, zeros: bool
) -> tuple[np.ndarray, np.ndarray, Any, np.ndarray]:
    """Packed weights [E, N, K * bits / 8], scales, packed zero points or None, and what they stand for."""
    experts, rows, depth = weights.shape
    count = depth // block if block else 1
    grouped = weights.reshape(experts, rows, count, -1)
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    scales = (np.abs(grouped).max(-1) / (middle - 0.5)).astype(np.float32)
    zero = RNG.integers(middle - 1, middle + 1, scales.shape) if zeros else np.full(scales.shape, middle)
    codes = np.clip(np.rint(grouped / scales[..., None]) + zero[..., None], 0, top).astype(np.uint8)
    meant = (codes - zero[..., None].astype(np.float64)) * scales[..., None]

    def pack(values: np.ndarray) -> np.ndarray:
        size = 8 // bits
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % size)])
        parts = values.reshape(*values.shape[:-1], -1, size).astype(np.uint8) << (bits * np.arange(size)).astype(
            np.uint8
        )
        return np.bitwise_or.reduce(parts, axis=-1).astype(np.uint8)

    packed_zero = pack(zero if block else zero[..., 0]) if zeros else None
    return (
        pack(codes.reshape(weights.shape)),
        scales if block else scales[..., 0],
        packed_zero,
        meant.reshape(weights.shape),
    )


def qmoe(bits: int, block: int, zeros: bool, wide: int = 1, third: bool = False) -> tuple[list[Any], list[Any]]:
    """Inputs of QMoE, and of the MoE with the weights that they stand for."""
    plain = moe(True, wide, third)
    layers = [quantized(plain[at], bits, block, zeros) for at in (2, 4, 6)[: 3 if third else 2]]
    inputs = plain[:2]
    for (packed, scales, _, _), bias in zip(layers, (plain[3], plain[5], plain[-1]), strict=False):
        inputs += [packed, scales, bias]
    inputs += [None] * (11 - len(inputs)) + [zero for _, _, zero, _ in layers]
    for at, (_, _, _, meant) in zip((2, 4, 6), layers, strict=False):
        plain[at] = meant
    return inputs, plain


CONSTANT = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)


def relu(first: np.ndarray, third: Any) -> np.ndarray:
    return np.maximum(first, 0)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [0, 16, 32])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("constant", [False, True])
def test_qmoe(bits, block, zeros, constant):
    inputs, plain = qmoe(bits, block, zeros)
    places = [at for at in CONSTANT if constant and at < len(inputs) and inputs[at] is not None]
    options = {
        "k": 2,
        "normalize_routing_weights": 1,
        "expert_weight_bits": bits,
        **({"block_size": block} if block else {}),
    }
    model = contrib("QMoE", inputs, constant=places, **options)
    runtime = Runtime(model, device="cpu")
    (y,) = runtime.run(None, feeds(model, inputs))
    np.testing.assert_allclose(y, numpy_moe(plain, 2, relu), rtol=1e-4, atol=1e-5)
    assert len(runtime.kernels) == (1 if bits == 4 and constant else 0)


@pytest.mark.parametrize(("bits", "block"), [(4, 0), (8, 0), (4, 32)])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity"])
def test_qmoe_against_onnxruntime(bits, block, activation):
    inputs, _ = qmoe(bits, block, False)
    places = [at for at in CONSTANT if at < len(inputs) and inputs[at] is not None]
    options = {"k": 2, "normalize_routing_weights": 1, "expert_weight_bits": bits, "activation_type": activation}
    compare(
        "QMoE", inputs, constant=places, rtol=2e-3, atol=2e-3, **options, **({"block_size": block} if block else {})
    )


def test_qmoe_with_layers_of_different_bits():
    eight, plain_eight = qmoe(8, 16, False)
    four, plain_four = qmoe(4, 16, False)
    inputs, plain = [*eight[:5], *four[5:]], [*plain_eight[:4], *plain_four[4:]]
    options = {"k": 1, "normalize_routing_weights": 1, "block_size": 16, "fc1_expert_weight_bits": 8}
    (y,) = ours(contrib("QMoE", inputs, **options), inputs)
    np.testing.assert_allclose(y, numpy_moe(plain, 1, relu), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("fusion", "third"), [(1, False), (2, False), (0, True)])
def test_qmoe_with_a_gate(fusion, third):
    inputs, plain = qmoe(4, 16, True, wide=1 if third else 2, third=third)
    acts = {0: swiglu, 1: lambda first, _: swiglu(first[::2], first[1::2]), 2: lambda first, _: swiglu(*halves(first))}
    options = {**LIMITED, "swiglu_fusion": fusion, "k": 2, "normalize_routing_weights": 1, "block_size": 16}
    (y,) = ours(contrib("QMoE", inputs, **options), inputs)
    np.testing.assert_allclose(y, numpy_moe(plain, 2, acts[fusion]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalize", [0, 1])
def test_qmoe_mixes_by_other_weights_than_it_chooses_by(normalize):
    inputs, plain = qmoe(4, 0, False)
    mixing = RNG.random((TOKENS, EXPERTS)).astype(np.float32)
    inputs = [*inputs, *[None] * (14 - len(inputs)), mixing]
    places = [at for at in CONSTANT if inputs[at] is not None]
    options = {"k": 2, "normalize_routing_weights": normalize}
    (y,) = ours(contrib("QMoE", inputs, constant=places, **options), inputs)
    np.testing.assert_allclose(y, numpy_moe(plain, 2, relu, mixing, bool(normalize)), rtol=1e-4, atol=1e-5)
    compare("QMoE", inputs, constant=places, rtol=2e-3, atol=2e-3, **options)


@pytest.mark.parametrize("op_type", ["MoE"])
def test_halves_are_rounded_once(op_type):
    inputs = moe(True, dtype=np.float16)
    (y,) = ours(contrib(op_type, inputs, k=2), inputs)
    close(y, numpy_moe(inputs, 2, relu, normalize=False).astype(np.float16), rtol=1e-3, atol=1e-3)


# -- refusals


@pytest.mark.parametrize(
    ("op_type", "options", "why"),
    [
        ("MoE", {"use_sparse_mixer": 1}, "use_sparse_mixer must be 0, not 1"),
        ("MoE", {"activation_type": "tanh"}, "activation_type must be relu or"),
        ("MoE", {"activation_type": "swiglu"}, "swiglu needs swiglu_fusion 1 or 2"),
        ("MoE", {"swiglu_limit_after_activation": 1}, "is for swiglu, not for relu"),
        ("MoE", {"third": True}, "fc3_experts_bias needs fc3_experts_weights"),
        ("QMoE", {"quant_type": "fp4"}, "quant_type must be int, not fp4"),
        ("QMoE", {"weights_prepacked": 1}, "weights_prepacked must be -1 or 0, not 1"),
        ("QMoE", {"expert_weight_bits": 3}, "a weight has 2, 4 or 8 bits, not 3"),
        ("QMoE", {"scale": 1.0}, "no attributes scale"),
    ],
)
def test_what_is_not_supported_is_refused_before_running(op_type, options, why):
    inputs = moe(False) if op_type == "MoE" else qmoe(4, 0, False)[0]
    options = dict(options)
    if options.pop("third", False):
        inputs += [None, floats(EXPERTS, INNER)]
    with pytest.raises(Unsupported, match=why):
        Runtime(contrib(op_type, inputs, **options), device="cpu")
