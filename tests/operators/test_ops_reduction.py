"""The operators of onnx/defs/reduction, on onnx's own node tests."""

from __future__ import annotations

import pytest
from backend_cases import cases, check
from places import place  # noqa: F401 - a fixture


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("case", cases("reduction"))
def test_node(case):
    check(case)
