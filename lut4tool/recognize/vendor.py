"""What com.microsoft's 4-bit operators have in common: attributes that are integers, and what each must say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import AttributeProto

from lut4tool.recognize.walk import Place


def facts(site: Place, defaults: Mapping[str, int | None]) -> dict[str, Any]:
    """The attributes by name, `defaults` filled in (None: required); K, N and block_size are sizes. Raises Refuse."""
    op, found = site.node.op_type, dict[str, Any](defaults)
    for written in site.node.attribute:
        site.require(written.name in defaults, f"{op} with unknown attribute '{written.name}'")
        is_int = written.type == AttributeProto.INT and not written.ref_attr_name
        site.require(is_int, f"{op} with {written.name} that is not a written INT")
        found[written.name] = written.i
    for name, value in found.items():
        site.require(value is not None, f"{op} without {name}")
    depth, columns, block = found["K"], found["N"], found["block_size"]
    site.require(depth > 0 and columns > 0, f"{op} with K {depth} and N {columns}, not both positive")
    power = block >= 16 and block & (block - 1) == 0
    site.require(power, f"{op} with block_size {block}, not a power of two from 16 on")
    return found
