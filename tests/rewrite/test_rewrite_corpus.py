"""Every node model that onnx generates, with a chain injected: rewritten, and nothing else in it changes."""

from __future__ import annotations

import copy
import warnings
from collections import Counter

import onnx
import pytest
from differences import compare
from onnx import numpy_helper

from build import inject_chain, value_of
from lut4tool.recognize.walk import OPSETS
from lut4tool.rewrite import rewrite_model
from lut4tool.storage import Tensors

#: The chain is spelled in turn in these ways, one a model.
SPELLINGS = [
    {},
    {"perm": "written", "literals": "mixed", "leaves": "constant"},
    {"rounding": "float16", "adjoint": True, "identities": ("Gather", "Slice")},
    {"rounding": "bfloat16", "perm": "absent", "scalar": True, "axis": -1},
]


@pytest.fixture(scope="module")
def corpus() -> list[onnx.ModelProto]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():  # of NumPy, while onnx computes the expected outputs
        warnings.simplefilter("ignore")
        models = [case.model for case in collect_testcases(None)]
    assert len(models) >= 1884
    return models


def at_known_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy at opset 13 where it imports less: the model is not run, and only the chain has to be valid."""
    model = copy.deepcopy(model)
    for entry in (*model.opset_import, *(entry for function in model.functions for entry in function.opset_import)):
        if entry.domain in ("", "ai.onnx"):
            entry.version = max(entry.version, OPSETS[0])
    return model


def as_ir3(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as of IR 3, where every initializer is listed as an input, those of subgraphs too."""
    model = copy.deepcopy(model)
    model.ir_version = 3
    graphs = [model.graph]
    for graph in graphs:
        listed = {entry.name for entry in graph.input}
        missing = [tensor for tensor in graph.initializer if tensor.name not in listed]
        graph.input.extend(value_of(tensor.name, numpy_helper.to_array(tensor)) for tensor in missing)
        graphs += [entry.g for node in graph.node for entry in node.attribute if entry.HasField("g")]
    return model


def is_valid(model: onnx.ModelProto) -> bool:
    """Some generated models are not, and others not at the version that they are raised to here."""
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return False
    return True


@pytest.mark.parametrize("ir3", [False, True], ids=["as generated", "IR 3"])
def test_only_the_eight_differences(corpus, ir3):
    seen: Counter[str] = Counter()
    for index, generated in enumerate(corpus):
        before = inject_chain(at_known_opset(generated), **SPELLINGS[index % len(SPELLINGS)]).model
        if ir3:
            before = as_ir3(before)
        after = copy.deepcopy(before)
        report = rewrite_model(after, Tensors(None), witness=False)
        name = generated.graph.name
        assert [proof.site.name for proof, _ in report.rewritten] == ["injected/MatMul"], (name, report.refused)
        comparison = compare(before, after)
        assert comparison.wrong == [], name
        assert (comparison.replaced, comparison.functions_added) == (1, 1), name
        assert comparison.nodes_removed >= 12, name
        assert after.ByteSize() <= before.ByteSize() + 8192, name
        assert after.ir_version == max(before.ir_version, 8), name
        if is_valid(before):
            onnx.checker.check_model(after)
            seen["valid"] += 1
        seen["inputs dropped"] += comparison.input_names_dropped > 0
        seen["subgraphs"] += any(entry.HasField("g") for node in before.graph.node for entry in node.attribute)
    assert seen["valid"] > 1800
    assert seen["subgraphs"] > 20
    assert seen["inputs dropped"] > (1000 if ir3 else 20)
