"""Planted bugs, made mechanically from a kernel's text: barriers dropped, bounds moved by one, indices swapped."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

#: The two directions of one thing: in an index, or as a whole name, each is once taken for the other.
IN_INDEX = {"M": "N", "N": "K", "K": "N", "m0": "n0", "n0": "m0", "block": "inside", "splits": "part"}
ANYWHERE = {"m_sub": "n_sub", "n_sub": "m_sub", "row": "column", "column": "row", "high": "low", "scale": "zero"}
ANYWHERE |= {"outer_end": "inner_end", "inner_end": "outer_end", "left": "right", "sums": "corrections"}

_COMMENT = re.compile(r"//[^\n]*")
_BARRIER = re.compile(r"threadgroup_barrier\([^)]*\);")
_COMPARISON = re.compile(r" (<=?|>=?) ")
_CHOICE = re.compile(r"\b(\w+) \? ([^?:;\n]+) : ([^?:;,)\n]+)")
_INDEX = re.compile(r"(?<!\[)\[([^\[\]]+)\]")
_TWO_INDICES = re.compile(r"\[(\w+)\]\[(\w+)\]")
_ADDRESS = re.compile(r"(?<=[\w)], )[^,;]*\bPITCH[^,;]*|xs \+ [^,;]*")
_NAME = re.compile(r"(?<![\w.])[a-z]\w*\b(?!\()")
_STORAGE = re.compile(
    r"\b(?:threadgroup|simdgroup_matrix<[^>]*>|float2?|ulong|uint4?|bool) (?:thread )?\w+(?:\[[^\]]*\])*$"
)


@dataclass(frozen=True)
class Mutant:
    """A text with one planted bug; `name` says what and where."""

    name: str
    text: str


def mutants(text: str) -> list[Mutant]:
    """Every planted bug of a text, in its order; comments and the sizes of arrays are left alone."""
    made = []
    for start, stop, new, what in sorted(set(_edits(_COMMENT.sub(lambda found: " " * len(found[0]), text)))):
        line = text.count("\n", 0, start) + 1
        place = text.splitlines()[line - 1].strip()
        column = start - text.rfind("\n", 0, start)
        made.append(Mutant(f"{what}, {line}:{column}: {place}", text[:start] + new + text[stop:]))
    return made


Edit = tuple[int, int, str, str]


def _edits(code: str) -> Iterator[Edit]:
    for found in _BARRIER.finditer(code):
        yield *found.span(), "", "barrier dropped"
    for found in _COMPARISON.finditer(code):
        moved = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}[found[1]]
        yield *found.span(1), moved, f"{found[1]} is {moved}"
        if found[1] == "<":
            yield *found.span(1), "+ 1 <", "bound one lower"
    for found in re.finditer(r" - 1\b", code):
        yield *found.span(), "", "- 1 dropped"
    for found in _CHOICE.finditer(code):
        if "min(" not in found[0] and "[" not in found[0]:
            yield *found.span(), f"{found[1]} ? {found[3]} : {found[2]}", "choice swapped"
    yield from _swapped_indices(code)
    for here, there in ANYWHERE.items():
        for found in re.finditer(rf"(?<![\w.]){here}\b", code):
            declared = re.search(
                r"(?:uint|float&?|bool) (?:[^;=(]*= [^;]*, )?$", code[: found.start()].rsplit("\n", 1)[-1]
            )
            if not declared and not _STORAGE.search(code[: found.end()].rsplit("\n", 1)[-1]):
                yield *found.span(), there, f"{here} is {there}"


def _swapped_indices(code: str) -> Iterator[Edit]:
    for found in _TWO_INDICES.finditer(code):
        if not _STORAGE.search(code[: found.start()].rsplit("\n", 1)[-1]) and found[1] != found[2]:
            yield *found.span(), f"[{found[2]}][{found[1]}]", "indices swapped"
    for found in [*_INDEX.finditer(code), *_ADDRESS.finditer(code)]:
        start, stop = found.span(1) if found.re is _INDEX else found.span()
        if _STORAGE.search(code[: found.start()].rsplit("\n", 1)[-1]):
            continue
        inside = code[start:stop]
        used = [name for name in _NAME.finditer(inside) if name[0] not in ("xs", "ws")]
        for one, other in itertools.pairwise(used):
            between = inside[one.end() : other.start()]
            if one[0] != other[0] and not _commutes(inside[: one.start()], between, inside[other.end() :]):
                yield start + one.start(), start + other.end(), other[0] + between + one[0], "names swapped"
        for here, there in IN_INDEX.items():
            for name in re.finditer(rf"(?<![\w.]){here}\b", inside):
                yield start + name.start(), start + name.end(), there, f"{here} is {there}"
        for one in re.finditer(r" \+ 1\b", inside):
            yield start + one.start(), start + one.end(), "", "+ 1 dropped"


def _commutes(before: str, between: str, after: str) -> bool:
    """Whether swapping two names in a sum or a product changes nothing."""
    return bool(re.fullmatch(r"\)? \* ", between)) or (
        between == " + " and not (before.endswith("* ") or after[:2] == " *")
    )
