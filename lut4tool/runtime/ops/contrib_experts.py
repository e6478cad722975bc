"""com.microsoft's mixtures of experts, with weights in floats (MoE) or packed (QMoE)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import pi, sqrt
from typing import Any

import numpy as np

from lut4tool import kernels
from lut4tool.formats import QmmWeight
from lut4tool.runtime import backend
from lut4tool.runtime.dtypes import to_numpy
from lut4tool.runtime.ops.compute import finish, working
from lut4tool.runtime.ops.contrib_attention import only, refuse_inputs
from lut4tool.runtime.ops.contrib_weights import decoded_product, unpacked
from lut4tool.runtime.ops.lut4tool import multiplied
from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import REQUIRED, Unsupported, op

MICROSOFT = "com.microsoft"

#: Multiplies rows [M, K] by the matrix of a layer (1, 2 or 3) of an expert, its bias added: [M, N].
Layer = Callable[[int, int, Any], Any]


def _sigmoid(xp: Any, x: Any) -> Any:
    return 1 / (1 + xp.exp(-x))


def _tanh_gelu(xp: Any, x: Any) -> Any:
    return 0.5 * x * (1 + xp.tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x)))


_PLAIN: Mapping[str, Callable[[Any, Any], Any]] = {
    "identity": lambda xp, x: x,
    "relu": lambda xp, x: xp.maximum(x, 0),
    "relu2": lambda xp, x: xp.maximum(x, 0) ** 2,
    "gelu": _tanh_gelu,
    "silu": lambda xp, x: x * _sigmoid(xp, x),
}
_GATED = ("swiglu", "geglu")


@dataclass(frozen=True)
class Activation:
    """What stands between an expert's layers; fusion: how layer 1 holds gate and linear (0: apart, layers 1 and 3)."""

    name: str
    alpha: float
    beta: float
    limit: float | None
    fusion: int
    limit_after: int

    def __call__(self, xp: Any, first: Any, third: Any) -> Any:
        """The values that layer 2 takes, from those of layer 1 and, where there is one, 3."""
        if self.name not in _GATED:
            y = _PLAIN[self.name](xp, first)
            return y if third is None else y * third
        gate, linear = first, third
        if self.fusion == 1:
            gate, linear = first[:, 0::2], first[:, 1::2]
        elif self.fusion == 2:
            gate, linear = first[:, : first.shape[1] // 2], first[:, first.shape[1] // 2 :]
        if self.name == "geglu":
            return _tanh_gelu(xp, gate) * linear
        top = np.inf if self.limit is None else self.limit
        gate = gate if self.limit_after else xp.minimum(gate, top)
        gate = gate * _sigmoid(xp, self.alpha * gate)
        gate = xp.minimum(gate, top) if self.limit_after else gate
        return gate * (xp.clip(linear, -top, top) + self.beta)


def _check(node: Node) -> None:
    """Refuse what no expert here does: a sparse mixer, activations without their layers."""
    only(use_sparse_mixer=(0,), activation_type=("relu", *(name for name in (*_PLAIN, *_GATED) if name != "relu")))(
        node
    )
    a, name = node.attributes, node.attributes.get("activation_type", "relu")
    third = {"MoE": 6, "QMoE": 8}[node.op_type]
    has_third, fusion = third < len(node.given) and node.given[third], a.get("swiglu_fusion", 0)
    if name in _GATED and (has_third if fusion else name == "geglu" or not has_third):
        raise Unsupported(f"{name} needs swiglu_fusion 1 or 2, or 0 and fc3_experts_weights for swiglu")
    bias = {"MoE": 7, "QMoE": 10}[node.op_type]
    if not has_third and bias < len(node.given) and node.given[bias]:
        raise Unsupported("its input fc3_experts_bias needs fc3_experts_weights")
    if a.get("swiglu_limit_after_activation") and name != "swiglu":
        raise Unsupported(f"swiglu_limit_after_activation is for swiglu, not for {name}")


def _activation(values: Mapping[str, Any]) -> Activation:
    return Activation(
        values["activation_type"], values["activation_alpha"], values["activation_beta"], values["swiglu_limit"],
        values["swiglu_fusion"], values["swiglu_limit_after_activation"],
    )  # fmt: skip


def _routes(router: np.ndarray, mixing: np.ndarray | None, k: int, normalize: int) -> tuple[np.ndarray, np.ndarray]:
    """The k experts of each token [T, k] by their scores, and the share of each: its softmax, or what `mixing` says."""
    powers = np.exp(router - router.max(axis=1, keepdims=True))
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    chosen = np.argsort(-router, axis=1, kind="stable")[:, :k]
    shares = np.take_along_axis(probabilities if mixing is None else mixing, chosen, axis=1)
    return chosen, shares / shares.sum(axis=1, keepdims=True) if normalize else shares


def _mixed(xp: Any, x: Any, routes: tuple[np.ndarray, np.ndarray], layer: Layer, act: Activation, gated: bool) -> Any:
    """Sum over each token's experts of its share of their results, from x [T, hidden] in float32."""
    chosen, shares = routes
    y = xp.zeros_like(x)
    for expert in np.unique(chosen):
        tokens, place = np.nonzero(chosen == expert)
        rows, share = x[xp.array(tokens)], xp.array(shares[tokens, place][:, None].astype(np.float32))
        inner = act(xp, layer(1, expert, rows), layer(3, expert, rows) if gated else None)
        part = share * layer(2, expert, inner)
        if xp is np:
            y[tokens] += part
        else:
            y = y.at[xp.array(tokens)].add(part)
    return y


@op("MoE", domain=MICROSOFT, check=_check)
def mixture_of_experts(
    x: Any, router_probs: Any, fc1_experts_weights: Any, fc1_experts_bias: Any = None,
    fc2_experts_weights: Any = REQUIRED, fc2_experts_bias: Any = None, fc3_experts_weights: Any = None,
    fc3_experts_bias: Any = None, *,
    activation_alpha: float = 1.0, activation_beta: float = 0.0, activation_type: str = "relu", k: int = 1,
    normalize_routing_weights: int = 0, swiglu_fusion: int = 0, swiglu_limit: float | None = None,
    swiglu_limit_after_activation: int = 0, use_sparse_mixer: int = 0,
) -> Any:  # fmt: skip
    """Each token goes through its k best experts of two layers [E, N, K]; their results are summed by their softmax."""
    act = Activation(
        activation_type, activation_alpha, activation_beta, swiglu_limit, swiglu_fusion, swiglu_limit_after_activation
    )
    xp, data, router, *layers = working(
        x, router_probs, fc1_experts_weights, fc1_experts_bias, fc2_experts_weights, fc2_experts_bias,
        fc3_experts_weights, fc3_experts_bias,
    )  # fmt: skip

    def layer(number: int, expert: int, rows: Any) -> Any:
        weights, bias = layers[2 * number - 2], layers[2 * number - 1]
        y = xp.matmul(rows, weights[int(expert)].T)
        return y if bias is None else y + bias[int(expert)]

    routes = _routes(to_numpy(router), None, k, normalize_routing_weights)
    y = _mixed(xp, data.reshape(-1, x.shape[-1]), routes, layer, act, gated=layers[4] is not None)
    return finish(y.reshape(x.shape), x)


# -- QMoE

_DEFAULTS: Mapping[str, Any] = {
    "accuracy_level": 0, "activation_alpha": 1.0, "activation_beta": 0.0, "activation_type": "relu", "block_size": 0,
    "expert_weight_bits": 4, "fc1_expert_weight_bits": 0, "fc2_expert_weight_bits": 0, "fc3_expert_weight_bits": 0,
    "k": 1, "normalize_routing_weights": 0, "quant_type": "int", "swiglu_fusion": 0, "swiglu_limit": None,
    "swiglu_limit_after_activation": 0, "use_sparse_mixer": 0, "weights_prepacked": -1,
}  # fmt: skip
#: Where each layer's weights, scales, bias and zero points are among the inputs.
_PLACES: Mapping[int, Sequence[int]] = {1: (2, 3, 4, 11), 2: (5, 6, 7, 12), 3: (8, 9, 10, 13)}
_INPUTS = 21


def _packed_check(node: Node) -> None:
    """Refuse what MoE refuses, other codes than integers of 2, 4 and 8 bits, global and activation scales."""
    if unknown := sorted(node.attributes.keys() - _DEFAULTS.keys()):
        raise Unsupported(f"it has no attributes {', '.join(unknown)} that are supported")
    _check(node)
    only(quant_type=("int",), weights_prepacked=(-1, 0))(node)
    refuse_inputs(
        node, fc1_global_scale=15, fc2_global_scale=16, fc1_act_scale=17, fc2_act_scale=18, fc1_act_block_scale=19,
        fc2_act_block_scale=20,
    )  # fmt: skip
    for number, places in _PLACES.items():
        if len(node.given) > places[0] and node.given[places[0]]:
            if not node.given[places[1]]:
                raise Unsupported(f"it needs the input fc{number}_scales")
            if _bits(node.attributes, number) not in (2, 4, 8):
                raise Unsupported(f"a weight has 2, 4 or 8 bits, not {_bits(node.attributes, number)}")
        elif number < 3:
            raise Unsupported(f"it needs the input fc{number}_experts_weights")


def _bits(attributes: Mapping[str, Any], number: int) -> int:
    return attributes.get(f"fc{number}_expert_weight_bits") or attributes.get("expert_weight_bits", 4)


@op("QMoE", domain=MICROSOFT, host=(1, 2, 3, 5, 6, 8, 9, 11, 12, 13, 14), planned=True, check=_packed_check)
def quantized_mixture_of_experts(node: Node) -> Callable[..., Any]:
    """MoE with weights [E, N, K] of 2, 4 or 8 bits in blocks along K (without block_size: rows), low bits first.

    weights_prepacked -1 means the plain layout, as it does on onnxruntime's CPU; accuracy_level only allows rounding
    that we never do. 4 bits stay packed for the chosen kernel, others are decoded an expert at a time.
    """
    a = {**_DEFAULTS, **node.attributes}
    act, device, made = _activation(a), backend.kind(node.device), dict[Any, Any]()
    weights = {place for places in _PLACES.values() for place in (places[0], places[1], places[3])}
    fixed = all(node.constants[at] is not None or not node.given[at] for at in weights if at < len(node.given))

    def packed(inputs: Sequence[Any], number: int, expert: int) -> tuple[Any, Any]:
        """The 4-bit weight of an expert's layer and its kernel, made once where the weights are constant."""
        key = (number, expert)
        if key not in made or not fixed:
            blocks, scales, zeros, depth = _expert(inputs, number, expert, a)
            weight = QmmWeight(blocks, scales, zeros, depth, len(scales), depth // scales.shape[1])
            made[key] = (weight, kernels.choose(weight, "float32", device))
        return made[key]

    for number in (1, 2):
        if fixed and _bits(a, number) == 4:
            node.note(packed(node.constants, number, 0)[1])

    def run(x: Any, router: np.ndarray, *rest: Any) -> Any:
        inputs = (x, router, *rest, *[None] * _INPUTS)[:_INPUTS]
        xp, data, scores, mixing = working(x, router, inputs[14])

        def layer(number: int, expert: int, rows: Any) -> Any:
            expert, bias = int(expert), inputs[_PLACES[number][2]]
            if _bits(a, number) == 4:
                weight, choice = packed(inputs, number, expert)
                y = working(multiplied(rows, weight, choice))[1]
            else:
                y = working(decoded_product(rows, *_expert(inputs, number, expert, a), _bits(a, number)))[1]
            return y if bias is None else y + working(bias)[1][expert]

        routes = _routes(
            to_numpy(scores), None if mixing is None else to_numpy(mixing), a["k"], a["normalize_routing_weights"]
        )
        y = _mixed(xp, data.reshape(-1, x.shape[-1]), routes, layer, act, gated=inputs[8] is not None)
        return finish(y.reshape(x.shape), x)

    return run


def _expert(
    inputs: Sequence[Any], number: int, expert: int, a: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """One expert's packed [N, blocks, bytes], scales [N, blocks], zero points (or [1, 1]) and K."""
    weights, scales, _, zeros = ((*inputs, *[None] * _INPUTS)[place] for place in _PLACES[number])
    bits, rows = _bits(a, number), weights.shape[1]
    depth = weights.shape[2] * 8 // bits
    count = depth // a["block_size"] if a["block_size"] > 0 else 1
    grid = (rows, count)
    blocks, scale = weights[expert].reshape(*grid, -1), scales[expert].reshape(grid)
    if zeros is None:
        return blocks, scale, np.full((1, 1), 2 ** (bits - 1), np.uint8), depth
    codes = unpacked(zeros[expert], bits)  # packed along the blocks of a row, or along the rows
    return (
        blocks,
        scale,
        np.ascontiguousarray((codes[:, :count] if codes.ndim == 2 else codes[:rows]).reshape(grid)),
        depth,
    )
