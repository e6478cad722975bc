"""The operators of onnx/defs/reduction, on onnx's own node tests."""

from __future__ import annotations

import pytest
from backend_cases import cases, check

from lut4tool.runtime.ops import compute


@pytest.mark.parametrize("case", cases("reduction"))
def test_node(case):
    check(case)


@pytest.mark.parametrize("case", cases("reduction"))
def test_node_in_mlx(case, monkeypatch):
    """As on a GPU: what runs in NumPy on a CPU runs in MLX."""
    monkeypatch.setattr(compute, "on_host", lambda: False)
    check(case, atol=5e-6)
