"""Mechanical: take any single check out of the recognizer's source, and a mutant is no longer refused as it should."""

from __future__ import annotations

import ast
import copy
import functools
import sys
import types
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
from mutants import MUTANTS
from mutants_affine import AFFINE
from mutants_bnb4 import BNB4
from mutants_of_affine_forms import AFFINE_FORMS_WRONG
from mutants_of_forms import MUTANTS_OF_FORMS

import lut4tool.recognize
from lut4tool.recognize import recognize, walk

FOLDER = Path(lut4tool.recognize.__file__).parent
#: Callees first.
FILES = (
    "walk",
    "trail",
    "view",
    "clauses",
    "nibbles",
    "placing",
    "lookup",
    "vendor",
    "qmm",
    "grid",
    "affine",
    "nbits",
    "bnb4",
    "chains",
    "products",
)
MODULES = {name: f"lut4tool.recognize.{name}" for name in FILES}
MODULES["__init__"] = "lut4tool.recognize"

#: Checks, by how they begin, whose removal the table cannot show, and why.
KEPT = {
    "if self._steps > LONGEST_WALK: place.refuse(...)": "without it a cycle of nodes is walked forever",
    "if value in met: at.refuse(...)": "without it a cycle of Identity nodes is walked forever",
    "trail.node(value, 'Gather', at)": "a line before asked for the operator's name",
    "trail.node(value, 'Mul', at)": "a line before asked for the operator's name",
    "trail.node(value, 'Add', at)": "the line before asked for the operator's name",
    "trail.node(value, 'Concat', at, 'axis')": "the caller asked for the operator's name",
    "trail.node(value, op, at": "the line before asked for the operator's name",
    "trail.node(value, 'Sub', at)": "the caller asked for the operator's name",
    "trail.node(value, 'Where', at)": "the caller asked for the operator's name",
    "trail.node(value, 'ScatterND', at)": "the caller asked for the operator's name",
    "trail.node(made, 'Sub', reader)": "a line before asked for the operator's name",
    "trail.node(value, 'GatherND' if": "the caller asked for the operator's name",
    "trail.node(value, 'DequantizeLinear', at": "affine.chain_of asked for the operator's name",
    "trail.node(value, 'Pad', at)": "the line before asked for the operator's name",
    "not isinstance(found, NodeProto) of": "the chains ask for the operator's name first",
}


ALL_AFFINE = [*AFFINE_FORMS_WRONG, *AFFINE]

#: Modules whose checks mutants of their own show; they are recognized with the vendor's operators.
OWN = {
    "clauses": [*MUTANTS, *MUTANTS_OF_FORMS, *ALL_AFFINE],
    "nibbles": [*MUTANTS, *MUTANTS_OF_FORMS, *ALL_AFFINE],
    "trail": [*MUTANTS, *MUTANTS_OF_FORMS, *ALL_AFFINE],
    "qmm": ALL_AFFINE,
    "grid": ALL_AFFINE,
    "affine": ALL_AFFINE,
    "nbits": ALL_AFFINE,
    "bnb4": BNB4,
    "vendor": [*AFFINE, *BNB4],
    "__init__": [*MUTANTS, *AFFINE],
}


@dataclass(frozen=True, eq=False)
class Row:
    """A mutant's model and sentence, and the lines of the recognizer that its walk stopped in: (module, line)."""

    model: onnx.ModelProto
    sentence: str
    lines: frozenset[tuple[str, int]]


@functools.cache
def table(module: str) -> list[Row]:
    """The mutants for a module."""
    lines: set[tuple[str, int]] = set()
    real = walk.Refuse.__init__

    def noting(refuse: walk.Refuse, *given: str) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            lines.add((Path(frame.f_code.co_filename).stem, frame.f_lineno))
            frame = frame.f_back
        real(refuse, *given)

    rows = []
    with unittest.mock.patch.object(walk.Refuse, "__init__", noting):
        for mutant in OWN.get(module, [*MUTANTS, *MUTANTS_OF_FORMS]):
            model = mutant.model()
            lines.clear()
            recognize(model, vendor=module in OWN)
            rows.append(Row(model, mutant.sentence, frozenset(lines)))
    return rows


@functools.cache
def source(module: str) -> ast.Module:
    return ast.parse((FOLDER / f"{module}.py").read_text())


@functools.cache
def compiled(module: str) -> types.CodeType:
    return compile(source(module), f"{module}.py", "exec")


def is_call(node: ast.AST, *names: str) -> bool:
    """Whether the node is a call of a method or function of one of these names."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) in names


Check = tuple[str, range, Callable[[ast.Module], None]]


def edits(module: str) -> Iterator[Check]:
    """Every way to take one check out of a module: (what it is, its lines, an edit of a copy of the tree)."""
    for number, node in enumerate(ast.walk(source(module))):
        if isinstance(node, ast.Expr) and is_call(node.value, "require", "check"):
            yield short(node), lines_of(node), functools.partial(replace_fields, number, value=ast.Constant(None))
            yield from conditions(number, node, node.value.args[0] if is_call(node.value, "require") else None)
        elif isinstance(node, ast.If) and is_call(getattr(node.body[0], "value", None), "refuse"):
            yield short(node), lines_of(node), functools.partial(replace_fields, number, test=ast.Constant(False))
            yield from conditions(number, node, node.test)
        elif is_call(node, "node") and ast.unparse(node.func) == "trail.node" and module not in ("walk", "__init__"):
            yield short(node), lines_of(node), functools.partial(any_operator, number)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("is_"):
            yield from conditions(number, node, node.body[-1].value)


def conditions(number: int, check: ast.AST, condition: ast.AST | None) -> Iterator[Check]:
    """Every way to leave out one operand of an `and` or `or`, or one side of a chained comparison, in a check."""
    for inner, node in enumerate(ast.walk(condition) if condition else ()):
        if isinstance(node, ast.BoolOp):
            for operand in range(len(node.values)):
                yield (
                    f"{short(node.values[operand])} of {short(condition)}",
                    lines_of(check),
                    functools.partial(without_operand, number, inner, operand),
                )


def lines_of(node: ast.AST) -> range:
    return range(node.lineno, node.end_lineno + 1)


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
    tree = copy.deepcopy(source(module))
    edit(tree)
    code = compile(ast.fix_missing_locations(tree), f"edited {module}.py", "exec")
    saved = {name: sys.modules[name] for name in MODULES.values()}
    try:
        for full in MODULES.values():  # all of them first: none may import an old one
            sys.modules[full] = types.ModuleType(full)
            sys.modules[full].__path__ = [str(FOLDER)]
        for name, full in MODULES.items():
            exec(code if name == module else compiled(name), sys.modules[full].__dict__)
        return sys.modules["lut4tool.recognize"].recognize
    finally:
        sys.modules.update(saved)


def is_noticed(module: str, edited: Callable[..., object], lines: range = range(0)) -> bool:
    """Whether some mutant is accepted, refused with another sentence, or breaks the recognizer.

    lines: of the check that was taken out; mutants that stopped there are tried first.
    """
    near = {(module, line) for line in lines}
    for row in sorted(table(module), key=lambda row: not near & row.lines):
        try:
            report = edited(row.model, vendor=module in OWN)
        except Exception:  # noqa: BLE001 - a crash is what a removed check may lead to
            return True
        reasons = [refusal.reason for refusal in report.refusals]
        if report.proofs or not reasons or any(row.sentence not in reason for reason in reasons):
            return True
    return False


CHECKS = [
    (module, what, lines, edit)
    for module in MODULES
    for what, lines, edit in edits(module)
    if not what.startswith(tuple(KEPT))
]


def test_the_whole_recognizer_refuses_every_mutant() -> None:
    for module in ("lookup", "affine"):
        assert not is_noticed(module, recognize)
        assert not is_noticed(module, edited_recognize(module, lambda tree: None))


def test_the_checks_are_found() -> None:
    count = {module: sum(found == module for found, *_ in CHECKS) for module in MODULES}
    for name in ("lookup", "placing", "clauses", "affine", "nbits"):
        assert count[name] >= (FOLDER / f"{name}.py").read_text().count(".require(")
    assert count["walk"] > 20
    assert count["__init__"] + count["products"] >= 4


@pytest.mark.parametrize(
    ("module", "what", "lines", "edit"), CHECKS, ids=[f"{module}: {what}" for module, what, *_ in CHECKS]
)
def test_without_one_check_a_mutant_passes(
    module: str, what: str, lines: range, edit: Callable[[ast.Module], None]
) -> None:
    assert is_noticed(module, edited_recognize(module, edit), lines), (
        f"no mutant needs the check in {module}.py: {what}"
    )
