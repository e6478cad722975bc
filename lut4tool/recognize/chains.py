"""The decode chains: guard clauses that read as each chain's specification, then its Proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lut4tool.formats import LOOKUP4_MATMUL, QMM
from lut4tool.recognize import affine, bnb4, lookup, nbits
from lut4tool.recognize.proof import Proof
from lut4tool.recognize.walk import Place, Value, Walk

__all__ = ["FORMS", "VENDOR_CHAINS", "VENDOR_PROOFS", "Form", "prove"]


@dataclass(frozen=True)
class Form:
    """One kind of weight that is proved, as README's table names it.

    chain: Proof.chain_name; codes, scales: the operators that give both; op: what the product becomes; vendor: only
    where com.microsoft's operators are asked for.
    """

    chain: str
    codes: str
    scales: str
    op: str
    vendor: bool = False


_NIBBLES = (
    "uint8 bytes taken apart by Div 16 or BitShift 4 and Mod 16 or BitwiseAnd 15 (PyTorch's `>>`, `//` and `%` of "
    "signed integers too), in any integer type that holds them, the high or the low nibble first; or a code an "
    "element, in any integer type. Gather, or PyTorch's GatherND, of 16 entries"
)
_MOVED = "moved or repeated by Reshape, Transpose, Expand, Tile or Slice"

#: All that is proved: README's table is made of it, and a test finds each row.
FORMS = (
    Form(
        "lookup",
        _NIBBLES,
        "Mul by one a block of the flat weight, a row, or all; float32, float16, bfloat16; or double-quantized: a "
        "table of 256 by scales of scales, an offset or none",
        LOOKUP4_MATMUL,
    ),
    Form("lookup in columns", "the same", "Mul by one a block of each column: [K / b, b, N]", LOOKUP4_MATMUL),
    Form("lookup without scales", "the same", "none", LOOKUP4_MATMUL),
    Form(
        "dequantized",
        "INT4 or UINT4, or the nibbles of uint8 bytes cast to UINT4",
        f"DequantizeLinear by blocks along K, by columns or by one scale; zero points or none; codes {_MOVED}",
        QMM,
    ),
    Form(
        "arithmetic",
        "the nibbles of uint8 bytes, side by side or in halves one after the other (HQQ, its ScatterND too); or INT4 "
        "or UINT4",
        "Sub of zero points (integers, floats, nibbles, one number; or none) and Mul by scales, by blocks along K or "
        f"by columns, all {_MOVED}",
        QMM,
    ),
    Form("matmul_bnb4", "com.microsoft::MatMulBnb4: FP4 or NF4", "its absmax", LOOKUP4_MATMUL, vendor=True),
    Form(
        "matmul_nbits",
        "com.microsoft::MatMulNBits of 4 bits, without g_idx",
        "its scales; zero points packed, typed, or none (8); its bias stays an Add",
        QMM,
        vendor=True,
    ),
)

#: Chains that are our spelling of an operator for which onnxruntime has a kernel.
VENDOR_CHAINS = frozenset(form.chain for form in FORMS if form.vendor)

#: com.microsoft's operators that are proved, by name.
VENDOR_PROOFS: Mapping[str, Callable[[Walk, Place], Proof]] = {
    "MatMulBnb4": bnb4.matmul_bnb4,
    "MatMulNBits": nbits.matmul_nbits,
}


def prove(walk: Walk, site: Place, weight: Value, flipped: bool) -> Proof:
    """Prove what a weight is, from the chain before it; `flipped`: the product reads it transposed. Raises Refuse."""
    chain = affine.chain_of(walk, weight) or lookup.prove
    return chain(walk, site, weight, flipped)
