"""README's table of chains: each row is a chain that other tests build, and none of theirs is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import forms
import mutants_bnb4
import onnx
import pytest
from build_affine import build_affine
from build_nbits import nbits

from lut4tool.recognize import recognize
from lut4tool.recognize.chains import FORMS, VENDOR_PROOFS, Form

ROOT = Path(__file__).resolve().parents[2]


def models() -> dict[str, list[onnx.ModelProto]]:
    """Models of each row, by its chain."""
    return {
        "lookup": [forms.make(name).model for name in ("low nibble first", "double quantized")],
        "lookup in columns": [forms.make("blocks of columns").model],
        "lookup without scales": [forms.make("no scales").model],
        "dequantized": [build_affine().model, build_affine(chain="nibbles").model],
        "arithmetic": [build_affine(chain="arithmetic").model],
        "matmul_bnb4": [mutants_bnb4.made().model],
        "matmul_nbits": [nbits()[0]],
    }


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.chain)
def test_each_row_is_proved(form: Form) -> None:
    for model in models()[form.chain]:
        (proof,) = recognize(model, vendor=form.vendor).proofs
        assert (proof.chain_name, proof.op) == (form.chain, form.op)
        assert not recognize(model).proofs if form.vendor else True


def test_no_form_of_the_tests_is_missing() -> None:
    found = {proof.chain_name for name in forms.FORMS for proof in recognize(forms.make(name).model).proofs}
    assert found == {form.chain for form in FORMS if form.chain.startswith("lookup")}
    assert set(VENDOR_PROOFS) == {
        form.codes.partition("::")[2].split(":")[0].split()[0] for form in FORMS if form.vendor
    }


def test_readme_shows_the_table() -> None:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "figures.py")
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    assert f"<!-- figures: chains -->\n{figures.chains()}\n<!-- end -->" in (ROOT / "README.md").read_text()
