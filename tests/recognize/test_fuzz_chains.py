"""Random edits of every chain: no rewrite changes what a model computes, and every refusal names a node."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import onnx
import pytest
from fuzz_chains import Edit, Fault, bases, compare, outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from build import find_node
from lut4tool.recognize import recognize

#: About 20 seconds; `python tests/fuzz_chains.py` runs as many as one likes.
EDITS = 1000
COUNTS: Counter[str] = Counter()


@settings(
    max_examples=EDITS,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(st.sampled_from(sorted(bases())), st.randoms(use_true_random=False))
def test_no_edit_leads_to_a_wrong_rewrite(name: str, random: Random) -> None:
    COUNTS[outcome(name, Edit(random, bases()[name].model))] += 1


def test_the_edits_reach_proofs_and_refusals() -> None:
    """Those of the test above, or else it would hold nothing."""
    assert COUNTS["proved and equal"] > EDITS // 20
    assert COUNTS["refused"] > EDITS // 5


@pytest.mark.parametrize("name", sorted(bases()))
def test_every_model_is_rewritten_as_it_is(name: str) -> None:
    """No edit at all: the judge runs each, and gives what the rewritten one gives."""
    edit = Edit(Random(0), bases()[name].model)
    edit.model.CopyFrom(bases()[name].model)
    assert outcome(name, edit) == "proved and equal"


def test_a_wrong_rewrite_would_be_seen() -> None:
    """The fuzzer itself: outputs that differ in one bit, or in type."""
    report = recognize(bases()["canonical: plain"].model)
    one = [np.ones((2, 2), np.float32)]
    compare("same", one, [one[0].copy()], True, report)
    for other in (np.nextafter(one[0], 2), one[0].astype(np.float64), one[0][:1]):
        with pytest.raises(Fault, match="changes the output"):
            compare("canonical: edited", one, [other], True, report)


def test_a_rewrite_that_fails_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewritten model breaks, the original does not."""

    def broken(model: onnx.ModelProto, *_: object, **__: object) -> None:
        node = find_node(model, "dec/MatMul")
        node.CopyFrom(helper.make_node("Nothing", [], node.output, domain="nowhere"))

    monkeypatch.setattr("fuzz_chains.rewrite_model", broken)
    edit = Edit(Random(0), bases()["canonical: plain"].model)
    edit.model.CopyFrom(bases()["canonical: plain"].model)
    with pytest.raises(Fault, match="fails once it is rewritten"):
        outcome("canonical: plain", edit)
