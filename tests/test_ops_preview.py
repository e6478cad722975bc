"""The operators of onnx/defs/preview, on onnx's own node tests; and no family of those tests is left out anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from backend_cases import cases, check, family, node_tests


@pytest.mark.parametrize("case", cases("preview"))
def test_node(case):
    check(case)


def test_every_family_has_its_tests():
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    calls = re.findall(r"[( ]cases\(([^)]*)", "\n".join(texts))
    named = {name for call in calls for name in re.findall(r'"(\w+)"', call)}
    assert {family(test) for test in node_tests().values()} <= named
