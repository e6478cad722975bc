"""onnxruntime's own quantizers run on real models: every 4-bit product is found, and the outputs agree with theirs."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable

import onnx
import pytest
from noise import gap, session
from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer, QuantFormat

from lut4tool.rewrite import rewrite_model
from lut4tool.rewrite.expand import expand_model
from lut4tool.runtime import Runtime
from lut4tool.storage import Tensors
from models.feeds import feeds
from models.fetch import fetch
from models.real_case import TOLERANCE

Quantizer = Callable[[onnx.ModelProto], onnx.ModelProto]


def bnb4(kind: int, block: int) -> Quantizer:
    """NF4 (1) or FP4 (0)."""

    def quantize(model: onnx.ModelProto) -> onnx.ModelProto:
        quantizer = MatMulBnb4Quantizer(model, kind, block)
        quantizer.process()
        return quantizer.model.model

    return quantize


def nbits(**options: object) -> Quantizer:
    """MatMulNBits, or with QuantFormat.QDQ a DequantizeLinear before each MatMul."""

    def quantize(model: onnx.ModelProto) -> onnx.ModelProto:
        quantizer = MatMulNBitsQuantizer(model, **options)
        quantizer.process()
        return quantizer.model.model

    return quantize


#: Each with the function that proves its products.
QUANTIZERS: dict[str, tuple[Quantizer, str]] = {
    "NF4": (bnb4(1, 64), "matmul_bnb4"),
    "FP4": (bnb4(0, 16), "matmul_bnb4"),
    "symmetric": (nbits(block_size=32, is_symmetric=True), "matmul_nbits"),
    "asymmetric": (nbits(block_size=128, accuracy_level=1), "matmul_nbits"),
    "QDQ symmetric": (nbits(block_size=32, is_symmetric=True, quant_format=QuantFormat.QDQ), "dequantized"),
    "QDQ asymmetric": (nbits(block_size=16, quant_format=QuantFormat.QDQ), "dequantized"),
    "QDQ by columns": (
        nbits(is_symmetric=True, quant_format=QuantFormat.QDQ, channel_wised_quantize=True),
        "dequantized",
    ),
}
#: 4-bit products of each model once it is quantized.
MODELS = {"deepcut": 14, "attacut": 2, "name-decoder": 2, "ocr-recogniser": 9}


def load(name: str, opset: int) -> onnx.ModelProto:
    """A float model at `opset` or later, whose Constant nodes are initializers: the quantizers see no others."""
    model = onnx.load(fetch(name))
    if model.opset_import[0].version < opset:
        model = onnx.version_converter.convert_version(model, opset)
    constants = [node for node in model.graph.node if node.op_type == "Constant" and node.attribute[0].name == "value"]
    for node in constants:
        tensor = copy.deepcopy(node.attribute[0].t)
        tensor.name = node.output[0]
        model.graph.initializer.append(tensor)
        model.graph.node.remove(node)
    return model


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("onnxruntime").setLevel(logging.ERROR)


@pytest.mark.parametrize("label", QUANTIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_every_product_is_found_and_the_outputs_agree(name: str, label: str) -> None:
    quantize, chain = QUANTIZERS[label]
    model = quantize(load(name, 21 if "QDQ" in label else 13))  # its own QDQ only says 21, and converts nothing
    after = copy.deepcopy(model)
    report = rewrite_model(after, Tensors(None), vendor=True)
    assert report.refused == ()
    assert Counter(proof.chain_name for proof, _ in report.rewritten) == {chain: MODELS[name]}
    assert all(witness is not None and witness.all for _, witness in report.rewritten)
    run, given = session(model), feeds(name)
    expected = run.run(None, given)
    runtime = Runtime(after, device="cpu")
    assert {choice.backend for choice in runtime.kernels.values()} == {"cpu"}
    back = copy.deepcopy(after)
    assert len(expand_model(back).expanded) == MODELS[name]
    for results in (runtime.run(None, given), session(back).run(None, given)):
        assert max(gap(*pair).largest for pair in zip(results, expected, strict=True)) <= TOLERANCE


def behind_identities(model: onnx.ModelProto, ops: tuple[str, ...], inputs: slice, step: int) -> None:
    """Read the constants of every `step`-th product through an Identity, as PyTorch's exporter writes shared ones."""
    constants = {tensor.name for tensor in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type in ops and node.input[1] in constants]
    for node in nodes[::step]:
        for index in range(*inputs.indices(len(node.input))):
            if node.input[index] in constants:
                same = f"{node.input[index]}/{node.output[0]}"
                model.graph.node.insert(0, onnx.helper.make_node("Identity", [node.input[index]], [same]))
                node.input[index] = same


@pytest.mark.parametrize("label", ["NF4", "asymmetric", "QDQ asymmetric"])
def test_what_onnxruntime_does_not_match_is_no_chain(label: str) -> None:
    """Its quantizers leave a weight behind an Identity as it is: a float weight, of which there is nothing to say."""
    model = load("deepcut", 21)
    behind_identities(model, ("MatMul",), slice(1, 2), 2)
    after = QUANTIZERS[label][0](model)
    report = rewrite_model(after, Tensors(None), vendor=True)
    assert (len(report.rewritten), report.refused) == (7, ())
    assert sum(node.op_type == "MatMul" for node in after.graph.node) == 7


@pytest.mark.parametrize("label", ["NF4", "asymmetric", "QDQ asymmetric"])
def test_shared_weights_behind_identities_are_found_and_stay_shared(label: str) -> None:
    """onnxruntime matched 8 of the 61 products of such a model; here all are found, and one weight serves them."""
    model = QUANTIZERS[label][0](load("attacut", 21))
    given = feeds("attacut")
    expected = session(model).run(None, given)  # before: onnxruntime has no Identity of 4-bit types
    nodes = model.graph.node
    product = next(node for node in nodes if node.op_type in ("MatMulBnb4", "MatMulNBits", "MatMul"))
    for number in range(60):
        again = copy.deepcopy(product)
        again.name, again.output[0] = f"{product.name}/{number}", f"{product.output[0]}/{number}"
        nodes.insert(list(nodes).index(product) + 1, again)
    behind_identities(model, ("MatMulBnb4", "MatMulNBits", "DequantizeLinear"), slice(None), 1)
    after = copy.deepcopy(model)
    report = rewrite_model(after, Tensors(None), vendor=True)
    assert (len(report.rewritten), report.refused) == (62, ())
    assert len({proof.tensor_key("packed") for proof, _ in report.rewritten}) == 2
    assert sum(len(tensor.dims) > 0 and tensor.data_type == 2 for tensor in after.graph.initializer) <= 4
    results = Runtime(after, device="cpu").run(None, given)
    assert max(gap(*pair).largest for pair in zip(results, expected, strict=True)) <= TOLERANCE
