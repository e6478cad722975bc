"""The operators of onnx/defs/preview, on onnx's own node tests."""

from __future__ import annotations

import pytest
from backend_cases import cases, check


@pytest.mark.parametrize("case", cases("preview"))
def test_node(case):
    check(case)
