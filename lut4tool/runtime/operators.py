"""What `lut4tool ops` says: the registry, with the types of the standard's schemas."""

from __future__ import annotations

from typing import Any

import onnx

from lut4tool.runtime import registry, types
from lut4tool.runtime.registry import NEWEST, Operator


def document() -> dict[str, Any]:
    """Every operator: domain, name, versions, types of its inputs, whether it runs on the host, what it refuses.

    Those that only the standard's function bodies serve are marked by `body`.
    """
    registry.load()
    rows = [_row(row) for row in registry.operators()]
    known = {(row.domain, row.name) for row in registry.operators()}
    schema: Any  # onnx's type stubs lack the schema's functions
    for schema in onnx.defs.get_all_schemas():
        key = (schema.domain, schema.name)
        if key not in known and (schema.has_function or schema.has_context_dependent_function):
            stand_in = Operator(*key, schema.since_version, NEWEST, lambda: None)
            rows.append({**_row(stand_in), "body": True})
    refused = [{"domain": d or "ai.onnx", "op": name, "reason": why} for (d, name), why in registry.REFUSED.items()]
    return {"operators": sorted(rows, key=lambda row: (row["domain"], row["op"], row["since"])), "refused": refused}


def _row(row: Operator) -> dict[str, Any]:
    newest = next(iter(types.signatures(row)), None)
    formals = newest.inputs if newest is not None else ()
    return {
        "domain": row.domain or "ai.onnx",
        "op": row.name,
        "since": types.first_version(row),
        "until": None if row.until == NEWEST else row.until,
        "types": {formal.name: types.listed(kinds) for formal, kinds in zip(formals, types.taken(row), strict=True)},
        "host": bool(row.on_host),
        "body": False,
        "refused": row.refused,
    }
