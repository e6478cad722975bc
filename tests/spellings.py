"""Spellings of chains by name, as options of build.build and build_affine.build_affine, and places for them."""

from __future__ import annotations

from typing import Any

from onnx import TensorProto

#: The canonical chain.
CANONICAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "transposed": {"perm": "written"},
    "transposed by default": {"perm": "absent"},
    "adjoint float16": {"rounding": "float16", "adjoint": True, "perm": "written"},
    "adjoint bfloat16": {"rounding": "bfloat16", "adjoint": True},
    "forward float16 transposed": {"rounding": "float16", "perm": "written"},
    "crossing rows": {"rows": 7, "cols": 9, "block": 16},
    "block over size": {"rows": 3, "cols": 5, "block": 64},
    "constants": {"literals": "constant", "leaves": "constant"},
    "mixed": {"literals": "mixed", "leaves": "constant initializer typed"},
    "attributes": {"literals": "attribute", "leaves": "typed"},
    "scalars": {"scalar": True, "axis": -1, "step": False, "swap": True, "casts": 2},
    "identities": {"identities": ("*",)},
    "nameless": {"named": False},
    "defaults": {"defaults": True, "opset": 19},
}

#: (place, hold): see build.build.
CONTROL_FLOW = [["If"], ["Loop"], ["Scan"], ["If", "Loop"], ["Loop", "If"]]
PLACES = [(place, hold) for place in CONTROL_FLOW for hold in ("inside", "packed", "leaves", "chain")]
# Literals that are formal inputs of a function are refused: the recognizer's tests hold that.
PLACES += [(place, hold) for place in (["function"], ["If", "function"]) for hold in ("inside", "packed")]

NIBBLES = {"chain": "nibbles"}
ARITHMETIC = {"chain": "arithmetic", "nibbles": ("Mod", "Div"), "wide": TensorProto.INT64, "opset": 13}
#: Affine weights.
AFFINE: dict[str, dict[str, Any]] = {
    "uint4 rows": {},
    "int4 rows": {"kind": "int4"},
    "uint4 columns": {"first": "k"},
    "int4 columns": {"kind": "int4", "first": "k"},
    "no zero points": {"points": False},
    "int4 without zero points": {"kind": "int4", "points": False, "first": "k"},
    "one scale a column": {"by": "column"},
    "one scale a column, codes by columns": {"by": "column", "first": "k", "kind": "int4", "k": 7},
    "one scale": {"by": "all", "kind": "int4"},
    "one scale and no zero point": {"by": "all", "points": False, "first": "k"},
    "whole blocks": {"k": 16, "block": 8},
    "one long block": {"block": 64, "k": 9},
    "an odd depth": {"k": 5, "block": 2},
    "one column": {"n": 1, "first": "k"},
    "opset 23": {"opset": 23},
    "opset 26": {"opset": 26},
    "perm by default": {"turned": "absent"},
    "Gemm": {"product": "Gemm", "bias": True, "gemm": (("alpha", 0.5), ("beta", 2.0))},
    "Gemm transB": {"product": "Gemm", "turned": "transB", "gemm": (("alpha", 0.25),)},
    "Gemm transB of a Transpose": {"product": "Gemm", "turned": "both", "first": "k", "bias": True},
    "float16": {"scales": "float16"},
    "bfloat16": {"scales": "bfloat16", "kind": "int4"},
    "float32 cast to float16": {"cast": "float16"},
    "float16 cast to float32": {"scales": "float16", "cast": "float32", "cast_first": True},
    "bfloat16 cast to float32": {"scales": "bfloat16", "cast": "float32", "first": "k"},
    "Constant nodes": {"literals": "constant", "leaves": "constant", **NIBBLES},
    "typed fields": {"leaves": "typed"},
    "Identity everywhere": {"identities": True, **NIBBLES},
    "nibbles": NIBBLES,
    "nibbles in blocks": {**NIBBLES, "bytes": "blocks"},
    "nibbles, flat": {**NIBBLES, "bytes": "flat", "k": 16},
    "nibbles, flat and odd": {**NIBBLES, "bytes": "flat", "k": 9, "block": 6},
    "nibbles by columns": {**NIBBLES, "first": "k"},
    "nibbles, high first": {**NIBBLES, "high_first": True, "bytes": "blocks"},
    "nibbles, axis written": {**NIBBLES, "axis": 2},
    "nibbles by Mod and Div": {**NIBBLES, "nibbles": ("Mod", "Div")},
    "nibbles of int32": {**NIBBLES, "nibbles": ("BitwiseAnd", "Div"), "wide": TensorProto.INT32},
    "nibbles of uint16": {**NIBBLES, "wide": TensorProto.UINT16},
    "nibbles cast first": {**NIBBLES, "cast_last": False, "k": 16},
    "nibbles without zero points": {**NIBBLES, "points": False},
    "nibbles, one scale a column": {**NIBBLES, "by": "column"},
    "arithmetic": ARITHMETIC,
    "arithmetic of int4-like zero points": {**ARITHMETIC, "one_point": True},
    "arithmetic, BitShift": {"chain": "arithmetic", "opset": 18},
    "arithmetic, Mul swapped": {**ARITHMETIC, "swap": True, "k": 12},
    "arithmetic, float zero points": {**ARITHMETIC, "float_points": True},
    "arithmetic in float16": {**ARITHMETIC, "scales": "float16", "float_points": True},
    "arithmetic in bfloat16": {**ARITHMETIC, "scales": "bfloat16", "cast": "float32"},
}
