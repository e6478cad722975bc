"""com.microsoft's fused activations, products and convolution, and its normalizations, against onnxruntime."""

from __future__ import annotations

import itertools
from math import erf

import ml_dtypes
import numpy as np
import pytest
from contrib_cases import close, compare, contrib, ours
from places import place  # noqa: F401 - a fixture

from lut4tool.runtime.registry import Unsupported
from lut4tool.runtime.session import Runtime

pytestmark = pytest.mark.usefixtures("place")

RNG = np.random.default_rng(17)


def floats(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(
    ("op_type", "bias"), [("Gelu", False), ("BiasGelu", True), ("FastGelu", True), ("FastGelu", False)]
)
def test_gelu(op_type, bias):
    compare(op_type, [3 * floats(2, 3, 16), floats(16)][: 2 if bias else 1], atol=1e-6)


@pytest.mark.parametrize("alpha", [None, 1.0, 0.3])
def test_quick_gelu(alpha):
    compare("QuickGelu", [3 * floats(2, 3, 16)], **({} if alpha is None else {"alpha": alpha}))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("op_type", ["Gelu", "BiasGelu", "FastGelu", "QuickGelu"])
def test_a_half_is_rounded_once(op_type, dtype):
    x, bias = 3 * floats(64, dtype=np.float32), floats(64)
    inputs = [x.astype(dtype), bias.astype(dtype)][: 2 if op_type == "BiasGelu" else 1]
    wide = [part.astype(np.float64) for part in inputs]
    data = wide[0] + wide[1] if op_type == "BiasGelu" else wide[0]
    exact = {
        "FastGelu": 0.5 * data * (1 + np.tanh(np.sqrt(2 / np.pi) * (data + 0.044715 * data**3))),
        "QuickGelu": data / (1 + np.exp(-1.702 * data)),
    }.get(op_type, 0.5 * data * (1 + np.vectorize(erf)(data / np.sqrt(2))))
    (y,) = ours(contrib(op_type, inputs), inputs)
    close(y, exact.astype(dtype), rtol=2 * float(ml_dtypes.finfo(dtype).eps), atol=1e-6)


# -- products

FLAGS = list(itertools.product([0, 1], repeat=4))


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_fused_matmul(flags):
    """a is [2, 3, 4, 5] once transposed and b [2, 3, 5, 6]."""
    trans_a, trans_b, batch_a, batch_b = flags
    a, b = floats(2, 3, 4, 5), floats(2, 3, 5, 6)

    def undo(x, matrix, batch):
        x = x.swapaxes(-1, -2) if matrix else x
        return np.ascontiguousarray(np.moveaxis(x, -2, 0) if batch else x)

    inputs = [undo(a, trans_a, batch_a), undo(b, trans_b, batch_b)]
    compare("FusedMatMul", inputs, transA=trans_a, transB=trans_b, transBatchA=batch_a, transBatchB=batch_b, alpha=0.5)


@pytest.mark.parametrize("shapes", [((5,), (5, 3)), ((4, 5), (5,)), ((5,), (5,))], ids=str)
def test_fused_matmul_of_vectors(shapes):
    compare("FusedMatMul", [floats(*shape) for shape in shapes], alpha=2.0)


@pytest.mark.parametrize(("trans_a", "trans_b"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_transpose_matmul(trans_a, trans_b):
    a, b = floats(2, 4, 5), floats(2, 5, 6)
    inputs = [a.swapaxes(1, 2).copy() if trans_a else a, b.swapaxes(1, 2).copy() if trans_b else b]
    compare("TransposeMatMul", inputs, transA=trans_a, transB=trans_b, alpha=0.5)


CONV_ACTIVATIONS = [
    {},
    {"activation": "Relu"},
    {"activation": "Tanh"},
    {"activation": "Sigmoid"},
    {"activation": "LeakyRelu", "activation_params": [0.2]},
    {"activation": "Clip", "activation_params": [-0.5, 1.0]},
    {"activation": "HardSigmoid", "activation_params": [0.3, 0.4]},
]


@pytest.mark.parametrize("activation", CONV_ACTIVATIONS, ids=str)
@pytest.mark.parametrize(("bias", "added"), [(False, False), (True, False), (True, True)])
def test_fused_conv(activation, bias, added):
    inputs = [
        floats(2, 4, 7, 8),
        floats(6, 2, 3, 3),
        floats(6) if bias else None,
        floats(2, 6, 4, 4) if added else None,
    ]
    compare("FusedConv", inputs, group=2, strides=[2, 2], pads=[1, 1, 1, 1], kernel_shape=[3, 3], **activation)


GEMM_ACTIVATIONS = [
    {"activation": "Relu"},
    {"activation": "Tanh"},
    {"activation": "Sigmoid"},
    {"activation": "Softplus"},
    {"activation": "Softsign"},
    {"activation": "LeakyRelu", "activation_alpha": 0.2},
    {"activation": "Elu", "activation_alpha": 0.7},
    {"activation": "HardSigmoid", "activation_alpha": 0.3, "activation_beta": 0.4},
    {"activation": "Selu", "activation_alpha": 1.5, "activation_gamma": 1.2},
    {"activation": "ThresholdedRelu", "activation_alpha": 0.4},
]


@pytest.mark.parametrize("activation", GEMM_ACTIVATIONS, ids=str)
@pytest.mark.parametrize(
    ("bias", "options"), [(False, {}), (True, {"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1})]
)
def test_fused_gemm(activation, bias, options):
    a, b = floats(4, 5), floats(5, 6)
    inputs = [a.T.copy(), b.T.copy(), floats(6)] if bias else [a, b]
    compare("FusedGemm", inputs, **activation, **options)


def test_an_unknown_activation_is_refused():
    inputs = [floats(4, 5), floats(5, 6)]
    with pytest.raises(Unsupported, match=r"activation must be one of Relu, .*, not Swish"):
        Runtime(contrib("FusedGemm", inputs, activation="Swish"), device="cpu")


@pytest.mark.parametrize("activation", ["LeakyRelu", "Clip", "Relu"])
def test_other_numbers_of_activation_parameters_are_refused(activation):
    inputs = [floats(1, 2, 5, 5), floats(3, 2, 3, 3)]
    with pytest.raises(Unsupported, match=f"{activation} takes . activation_params"):
        Runtime(contrib("FusedConv", inputs, activation=activation, activation_params=[1.0, 2.0, 3.0]), device="cpu")


# -- normalizations


@pytest.mark.parametrize("op_type", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
@pytest.mark.parametrize("shape", [(2, 3, 8), (3, 8), (1, 3, 8)], ids=str)
@pytest.mark.parametrize("optional", list(itertools.product([False, True], repeat=2)), ids=str)
def test_skip_normalization(op_type, shape, optional):
    inputs = [floats(2, 3, 8), floats(*shape), floats(8), floats(8) if optional[0] else None]
    if op_type == "SkipLayerNormalization":
        inputs.append(floats(8) if optional[1] else None)
    compare(op_type, inputs, outputs=4, epsilon=1e-5)


@pytest.mark.parametrize("op_type", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
def test_skip_normalization_of_halves(op_type):
    inputs = [floats(2, 3, 8, dtype=np.float16) for _ in range(2)] + [floats(8, dtype=np.float16)]
    compare(op_type, inputs, outputs=(True, False, False, True), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("axis", [-1, 1, 0])
def test_simplified_layer_normalization(axis):
    x = floats(2, 3, 4)
    inputs = [x, floats(*(x.shape[axis:] if axis else x.shape))]
    compare("SimplifiedLayerNormalization", inputs, outputs=2, domain="", axis=axis, epsilon=1e-3)


def ids(*shape: int, below: int) -> np.ndarray:
    return RNG.integers(0, below, shape).astype(np.int32)


@pytest.mark.parametrize(("segments", "mask", "positions"), list(itertools.product([False, True], repeat=3)))
def test_embed_layer_normalization(segments, mask, positions):
    inputs = [ids(2, 5, below=9), ids(2, 5, below=2) if segments else None, floats(9, 8), floats(6, 8)]
    inputs += [floats(2, 8) if segments else None, floats(8), floats(8), ids(2, 5, below=2) if mask else None]
    inputs += [ids(1, 5, below=6) if positions else None]
    compare("EmbedLayerNormalization", inputs, outputs=3, epsilon=1e-5)


def test_segments_without_their_embedding_are_refused():
    inputs = [ids(1, 2, below=9), ids(1, 2, below=2), floats(9, 8), floats(6, 8), None, floats(8), floats(8)]
    with pytest.raises(Unsupported, match="segment_ids and segment_embedding are supported together only"):
        Runtime(contrib("EmbedLayerNormalization", inputs, outputs=2), device="cpu")


def test_an_embedding_of_a_negative_index_is_an_error():
    inputs = [ids(1, 2, below=9) - 10, None, floats(9, 8), floats(6, 8), None, floats(8), floats(8)]
    with pytest.raises(Exception, match="of an embedding is negative"):
        ours(contrib("EmbedLayerNormalization", inputs, outputs=2), inputs)
