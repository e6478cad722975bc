"""The decode chains: guard clauses that read as each chain's specification, then its Proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lut4tool.recognize import affine, bnb4, lookup, nbits
from lut4tool.recognize.proof import Proof
from lut4tool.recognize.walk import Place, Value, Walk

__all__ = ["VENDOR_PROOFS", "prove"]

#: com.microsoft's operators that are proved, by name.
VENDOR_PROOFS: Mapping[str, Callable[[Walk, Place], Proof]] = {
    "MatMulBnb4": bnb4.matmul_bnb4,
    "MatMulNBits": nbits.matmul_nbits,
}


def prove(walk: Walk, site: Place, weight: Value, flipped: bool) -> Proof:
    """Prove what a weight is, from the chain before it; `flipped`: the product reads it transposed. Raises Refuse."""
    chain = affine.chain_of(walk, weight) or lookup.prove
    return chain(walk, site, weight, flipped)
