"""The witness passes every true proof, and catches a wrong one in both of its modes."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from build import build, build_calls, find_node, make_tensor
from lut4tool.recognize import Proof, recognize
from lut4tool.recognize import witness as module
from lut4tool.recognize.witness import WitnessMismatch, check
from lut4tool.storage import StorageError, Tensors

TENSORS = Tensors(None)
LARGE: dict[str, Any] = {"rows": 1030, "cols": 1030, "block": 64, "check": False}  # over 2^20, blocks cross rows


def proof_of(**spelling: Any) -> tuple[onnx.ModelProto, Proof]:
    """A model and its first proof."""
    model = build(**spelling).model
    return model, recognize(model).proofs[0]


@pytest.mark.parametrize(
    "spelling",
    [
        {},
        {"rounding": "float16", "perm": "written"},
        {"rounding": "bfloat16", "adjoint": True, "perm": "absent"},
        {"identities": ("*",), "literals": "mixed", "leaves": "constant attribute typed", "check": False},
        {"domain": "ai.onnx", "check": False},
        {"place": ["Loop"], "hold": "packed"},
        {"place": ["function"], "hold": "packed", "literals": "constant", "leaves": "initializer initializer constant"},
    ],
    ids=str,
)
@pytest.mark.parametrize("full", [False, True])
def test_a_small_weight_is_compared_whole(spelling: dict[str, Any], full: bool) -> None:
    witness = check(proof_of(**spelling)[1], TENSORS, full=full)
    assert (witness.compared, witness.elements, witness.all) == (60, 60, True)


def test_special_values_are_equal_to_themselves() -> None:
    scales = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38, -1], np.float32)
    for rounding in ("none", "float16", "bfloat16"):
        assert check(proof_of(scales=scales, codebook="fp4", rounding=rounding)[1], TENSORS).all


def test_a_large_weight_is_sampled() -> None:
    witness = check(proof_of(**LARGE)[1], TENSORS)
    assert witness.elements == 1030 * 1030
    assert 16 * 64 <= witness.compared <= 19 * 64
    assert not witness.all


def test_verify_compares_every_block_of_a_large_weight() -> None:
    seen: list[tuple[str, int, int]] = []
    witness = check(proof_of(**LARGE)[1], TENSORS, full=True, progress=lambda *step: seen.append(step))
    assert witness.all
    assert len(seen) > 3
    assert seen[-1] == ("checking weights", 1030 * 1030, 1030 * 1030)


def test_sampled_blocks_hold_the_first_the_last_and_a_row_crossing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, proof = proof_of(**LARGE)
    seen: list[int] = []
    real = module._decoded
    monkeypatch.setattr(module, "_decoded", lambda layout, units: seen.extend(units) or real(layout, units))
    check(proof, TENSORS)
    last = -(-1030 * 1030 // 64) - 1
    assert {0, last} <= set(seen)
    assert any(block * 64 // 1030 != (block * 64 + 63) // 1030 for block in seen if block != last)


@pytest.mark.parametrize("literals", ["initializer", "constant", "attribute"])
@pytest.mark.parametrize("block", [1 << 20, (1 << 20) + 2])
def test_a_long_block_is_run_in_pieces(literals: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = []
    run = module._run
    monkeypatch.setattr(module, "_run", lambda *given: longest.append(given[2]["dec/packed"].size) or run(*given))
    spelling: dict[str, Any] = {**LARGE, "block": block, "literals": literals, "identities": ("Gather",)}
    _, proof = proof_of(**spelling)
    assert check(proof, TENSORS).compared in range(1, 20 * math.gcd(block, 4096))
    assert check(proof, TENSORS, full=True).all
    assert max(longest) * 2 <= 1 << 18
    with pytest.raises(WitnessMismatch):
        check(replace(proof, attributes={**proof.attributes, "high_nibble_first": 0}), TENSORS)


def test_padding_past_the_weight_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 15 elements in a block of 2^23: memory follows the weight, not the block."""
    sizes = []
    run = module._run
    monkeypatch.setattr(module, "_run", lambda *given: sizes.append(given[2]["dec/packed"].size) or run(*given))
    witness = check(proof_of(rows=3, cols=5, block=1 << 23)[1], TENSORS)
    assert (witness.compared, witness.elements) == (15, 15)
    assert sizes == [2048]


def test_a_large_weight_whose_scales_are_its_codebook() -> None:
    scales = np.linspace(0.5, 1, 16, dtype=np.float32)
    model = build(rows=1 << 10, cols=(1 << 10) + 64, block=((1 << 10) + 64) * 64, scales=scales, check=False).model
    find_node(model, "dec/Gather").input[0] = "dec/scales"
    assert check(recognize(model).proofs[0], TENSORS).all


# A planted wrong proof: the model, the proof or the constants are not what was proved.


def literal(name: str, values: Any) -> Callable[[onnx.ModelProto, Proof], Proof]:
    """Change a literal of the model behind the proof's back."""

    def plant(model: onnx.ModelProto, proof: Proof) -> Proof:
        tensor = next(t for t in model.graph.initializer if t.name == f"dec/{name}")
        tensor.CopyFrom(make_tensor(tensor.name, np.array(values, np.int64)))
        return proof

    return plant


def swap_nibbles(model: onnx.ModelProto, proof: Proof) -> Proof:
    node = find_node(model, "dec/Concat")
    node.input[:] = [node.input[1], node.input[0]]
    return proof


def divide(model: onnx.ModelProto, proof: Proof) -> Proof:
    find_node(model, "dec/Mul").op_type = "Div"
    return proof


def break_chain(model: onnx.ModelProto, proof: Proof) -> Proof:
    find_node(model, "dec/Gather").op_type = "NoSuchOperator"
    return proof


def fail_chain(model: onnx.ModelProto, proof: Proof) -> Proof:
    find_node(model, "dec/Concat").attribute[0].i = 7
    return proof


def other_scales(model: onnx.ModelProto, proof: Proof) -> Proof:
    scales = numpy_helper.to_array(proof.tensor("scales"))
    inexact = make_tensor("", np.nextafter(scales, np.float32(9)))
    chain = [onnx.helper.make_node("Constant", [], ["nudged"], value=inexact), *proof.chain]
    find_node(model, "dec/UnsqueezeScales").input[0] = "nudged"
    return replace(proof, chain=tuple(chain))


def fact(**facts: Any) -> Callable[[onnx.ModelProto, Proof], Proof]:
    """Change what the proof says."""
    return lambda model, proof: replace(proof, attributes={**proof.attributes, **facts})


EVERYWHERE = {
    "mod by 15": literal("mod_by", [15]),
    "div by 8": literal("div_by", [8]),
    "nibbles swapped": swap_nibbles,
    "low nibble first": fact(high_nibble_first=0),
    "divided": divide,
    "no such operator": break_chain,
    "fails": fail_chain,
}
WHOLE = {
    "another shape": literal("shape", [10, 6]),
    "another start": literal("start", [1]),
    "another perm": fact(perm=[1, 0]),
    "a scale one bit off": other_scales,
}


@pytest.mark.parametrize("plant", [*EVERYWHERE.values(), *WHOLE.values()], ids=[*EVERYWHERE, *WHOLE])
def test_a_wrong_proof_of_a_small_weight_is_caught(plant: Callable[[onnx.ModelProto, Proof], Proof]) -> None:
    wrong = plant(*proof_of())
    with pytest.raises(WitnessMismatch, match="dec/MatMul"):
        check(wrong, TENSORS)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("plant", EVERYWHERE.values(), ids=EVERYWHERE.keys())
def test_a_wrong_proof_of_a_large_weight_is_caught(plant: Callable[..., Proof], full: bool) -> None:
    wrong = plant(*proof_of(**LARGE))
    with pytest.raises(WitnessMismatch, match="dec/MatMul"):
        check(wrong, TENSORS, full=full)


def test_a_dropped_rounding_is_caught() -> None:
    wrong = fact(weight_dtype=1)(*proof_of(rounding="float16", adjoint=True))
    with pytest.raises(WitnessMismatch, match="differ between"):
        check(wrong, TENSORS)


def test_a_wrong_type_is_caught() -> None:
    wrong = fact(dtype=1)(*proof_of(rounding="float16"))
    with pytest.raises(WitnessMismatch, match="was proved to be float32"):
        check(wrong, TENSORS)


def test_only_verify_sees_one_wrong_block() -> None:
    """A block that no sample meets differs: the sample passes, and every block does not."""
    _, proof = proof_of(**LARGE)
    real, seen = module._decoded, set()

    def nudged(layout: Any, units: np.ndarray) -> np.ndarray:
        seen.update(units.tolist())
        return real(layout, units) + np.repeat(units == 777, 64).astype(np.float32)

    module._decoded = nudged
    try:
        check(proof, TENSORS)
        assert 777 not in seen
        with pytest.raises(WitnessMismatch, match="64 of"):
            check(proof, TENSORS, full=True)
    finally:
        module._decoded = real


def test_missing_external_data_is_a_storage_error() -> None:
    model, proof = proof_of()
    tensor = next(t for t in model.graph.initializer if t.name == "dec/packed")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="nowhere.data")
    with pytest.raises(StorageError, match="dec/packed"):
        check(proof, TENSORS)


def test_a_function_is_checked_with_its_first_call() -> None:
    model = build_calls(2).model
    proof = recognize(model).proofs[0]
    assert check(proof, TENSORS).all
