"""The operators of onnx/defs/training, on onnx's own node tests."""

from __future__ import annotations

import pytest
from backend_cases import cases, check


@pytest.mark.parametrize("case", cases("training"))
def test_node(case):
    check(case)
