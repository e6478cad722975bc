"""Mechanical: take any single check out of the recognizer's source, and a mutant is no longer refused as it should."""

from __future__ import annotations

import ast
import copy
import functools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
from mutants import MUTANTS
from mutants_affine import AFFINE
from mutants_of_forms import MUTANTS_OF_FORMS

import lut4tool.recognize
from lut4tool.recognize import recognize

FOLDER = Path(lut4tool.recognize.__file__).parent
#: Callees first.
FILES = ("walk", "clauses", "placing", "lookup", "qmm", "affine", "nbits", "chains", "products")
MODULES = {name: f"lut4tool.recognize.{name}" for name in FILES}
MODULES["__init__"] = "lut4tool.recognize"

#: Checks, by how they begin, whose removal the table cannot show, and why.
KEPT = {
    "if value in met: at.refuse(...)": "without it a cycle of Identity nodes is walked forever",
    "trail.node(value, 'Gather', at)": "a line before asked for the operator's name",
    "trail.node(value, 'Mul', at)": "a line before asked for the operator's name",
    "trail.node(value, 'Add', at)": "the line before asked for the operator's name",
    "trail.node(value, 'Concat', at, 'axis')": "the caller asked for the operator's name",
    "trail.node(value, op, at": "the line before asked for the operator's name",
    "trail.node(trail.input(matrix, 0), 'Mul', matrix)": "affine.chain_of asked for the operator's name",
    "trail.node(source, 'Cast', node, 'to')": "the line before asked for the operator's name",
    "trail.node(value, 'Slice', at)": "the line before asked for the operator's name",
    "trail.node(value, 'Transpose', at, 'perm')": "the line before asked for the operator's name",
    "trail.node(value, 'Cast', at, 'to')": "the line before asked for the operator's name",
    "not isinstance(found, NodeProto) of": "the chains ask for the operator's name first",
}


#: Modules whose checks mutants of their own show; they are recognized with the vendor's operators.
OWN = {"qmm": AFFINE, "affine": AFFINE, "nbits": AFFINE, "__init__": [*MUTANTS, *AFFINE]}


@functools.cache
def table(module: str) -> list[tuple[onnx.ModelProto, str]]:
    """The mutants' models and sentences for a module."""
    return [(mutant.model(), mutant.sentence) for mutant in OWN.get(module, [*MUTANTS, *MUTANTS_OF_FORMS])]


@functools.cache
def source(module: str) -> ast.Module:
    return ast.parse((FOLDER / f"{module}.py").read_text())


def is_call(node: ast.AST, *names: str) -> bool:
    """Whether the node is a call of a method or function of one of these names."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) in names


def edits(module: str) -> Iterator[tuple[str, Callable[[ast.Module], None]]]:
    """Every way to take one check out of a module: (what it is, an edit of a copy of its tree)."""
    for number, node in enumerate(ast.walk(source(module))):
        if isinstance(node, ast.Expr) and is_call(node.value, "require", "check"):
            yield short(node), functools.partial(replace_fields, number, value=ast.Constant(None))
            yield from conditions(number, node.value.args[0] if is_call(node.value, "require") else None)
        elif isinstance(node, ast.If) and is_call(getattr(node.body[0], "value", None), "refuse"):
            yield short(node), functools.partial(replace_fields, number, test=ast.Constant(False))
            yield from conditions(number, node.test)
        elif is_call(node, "node") and ast.unparse(node.func.value) == "trail" and module not in ("walk", "__init__"):
            yield short(node), functools.partial(any_operator, number)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("is_"):
            yield from conditions(number, node.body[-1].value)


def conditions(number: int, condition: ast.AST | None) -> Iterator[tuple[str, Callable[[ast.Module], None]]]:
    """Every way to leave out one operand of an `and` or `or`, or one side of a chained comparison, in a check."""
    for inner, node in enumerate(ast.walk(condition) if condition else ()):
        if isinstance(node, ast.BoolOp):
            for operand in range(len(node.values)):
                yield (
                    f"{short(node.values[operand])} of {short(condition)}",
                    functools.partial(without_operand, number, inner, operand),
                )


def replace_fields(number: int, tree: ast.Module, **fields: ast.AST) -> None:
    """Replace fields of the node of this number."""
    node = list(ast.walk(tree))[number]
    for name, value in fields.items():
        setattr(node, name, value)


def without_operand(number: int, inner: int, operand: int, tree: ast.Module) -> None:
    """Leave one operand of an `and` or `or` out."""
    node = list(ast.walk(tree))[number]
    if isinstance(node, ast.Expr):
        node = node.value.args[0]
    elif isinstance(node, ast.If):
        node = node.test
    else:
        node = node.body[-1].value
    operation = list(ast.walk(node))[inner]
    operation.values[operand] = ast.Constant(isinstance(operation.op, ast.And))


def any_operator(number: int, tree: ast.Module) -> None:
    """Let `trail.node(value, "Op", ...)` take any operator: the one that is there."""
    call = list(ast.walk(tree))[number]
    found = ast.Attribute(ast.Name("trail", ast.Load()), "op_type", ast.Load())
    call.args[1] = ast.Call(found, [copy.deepcopy(call.args[0])], [])


def short(node: ast.AST) -> str:
    """A check as one line of source."""
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}: {ast.unparse(node.body[0].value.func)}(...)"
    return ast.unparse(node)[:90]


def edited_recognize(module: str, edit: Callable[[ast.Module], None]) -> Callable[..., object]:
    """The recognizer with one module's source edited; the real modules are put back."""
    trees = {name: copy.deepcopy(source(name)) for name in MODULES}
    edit(trees[module])
    saved = {name: sys.modules[name] for name in MODULES.values()}
    try:
        for full in MODULES.values():  # all of them first: none may import an old one
            sys.modules[full] = types.ModuleType(full)
            sys.modules[full].__path__ = [str(FOLDER)]
        for name, full in MODULES.items():
            code = compile(ast.fix_missing_locations(trees[name]), f"edited {name}.py", "exec")
            exec(code, sys.modules[full].__dict__)
        return sys.modules["lut4tool.recognize"].recognize
    finally:
        sys.modules.update(saved)


def is_noticed(module: str, edited: Callable[..., object]) -> bool:
    """Whether some mutant is accepted, refused with another sentence, or breaks the recognizer."""
    for model, sentence in table(module):
        try:
            report = edited(model, vendor=module in OWN)
        except Exception:  # noqa: BLE001 - a crash is what a removed check may lead to
            return True
        if report.proofs or not report.refusals or any(sentence not in refusal.reason for refusal in report.refusals):
            return True
    return False


CHECKS = [
    (module, what, edit) for module in MODULES for what, edit in edits(module) if not what.startswith(tuple(KEPT))
]


def test_the_whole_recognizer_refuses_every_mutant() -> None:
    for module in ("lookup", "affine"):
        assert not is_noticed(module, recognize)
        assert not is_noticed(module, edited_recognize(module, lambda tree: None))


def test_the_checks_are_found() -> None:
    count = {module: sum(found == module for found, _, _ in CHECKS) for module in MODULES}
    for name in ("lookup", "placing", "clauses", "affine", "nbits"):
        assert count[name] >= (FOLDER / f"{name}.py").read_text().count(".require(")
    assert count["walk"] > 20
    assert count["__init__"] + count["products"] >= 4


@pytest.mark.parametrize(("module", "what", "edit"), CHECKS, ids=[f"{module}: {what}" for module, what, _ in CHECKS])
def test_without_one_check_a_mutant_passes(module: str, what: str, edit: Callable[[ast.Module], None]) -> None:
    assert is_noticed(module, edited_recognize(module, edit)), f"no mutant needs the check in {module}.py: {what}"
