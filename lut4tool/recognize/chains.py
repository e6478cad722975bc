"""The decode chains: guard clauses that read as each chain's specification, then its Proof."""

from __future__ import annotations

from lut4tool.recognize import lookup
from lut4tool.recognize.proof import Proof
from lut4tool.recognize.walk import Place, Value, Walk

__all__ = ["prove"]


def prove(walk: Walk, site: Place, weight: Value, flipped: bool) -> Proof:
    """Prove what a weight is, from the chain before it; `flipped`: the product reads it transposed. Raises Refuse."""
    return lookup.canonical(walk, site, weight, flipped)
