"""Strings (onnx/defs/text): always on the host, as `str` in object arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lut4tool.runtime.registry import op


def _strings(values: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    result = np.empty(len(values), object)
    result[:] = values
    return result.reshape(shape)


@op("StringConcat", host=(0, 1), on_host=True)
def string_concat(x: Any, y: Any) -> Any:
    """Element by element, with broadcasting."""
    return np.asarray(x.astype(object) + y.astype(object), object)


@op("RegexFullMatch", host=(0,), on_host=True)
def regex_full_match(x: Any, *, pattern: str | None = None) -> Any:
    """Whether the whole string matches; ONNX says RE2, whose common part with Python's `re` is what works here."""
    matches = re.compile(pattern or "").fullmatch
    return np.array([matches(text) is not None for text in x.reshape(-1)], bool).reshape(x.shape)


@op("StringSplit", host=(0,), on_host=True)
def string_split(x: Any, *, delimiter: str | None = None, maxsplit: int | None = None) -> Any:
    """Pieces padded with "" to the longest list, and how many there are; no delimiter means runs of white space."""
    limit = -1 if maxsplit is None else maxsplit
    pieces = [text.split(delimiter or None, limit) for text in x.reshape(-1)]
    longest = max(map(len, pieces), default=0)
    padded = [text for row in pieces for text in row + [""] * (longest - len(row))]
    return _strings(padded, (*x.shape, longest)), np.array([len(row) for row in pieces], np.int64).reshape(x.shape)


@op("StringNormalizer", host=(0,), on_host=True)
def string_normalizer(
    x: Any, *, case_change_action: str = "NONE", is_case_sensitive: int = 0, locale: str | None = None,
    stopwords: Sequence[str] | None = None,
) -> Any:  # fmt: skip
    """Drops the stop words of [C] or [1, C], then changes the case; where nothing is left, one empty string."""
    fold: Callable[[str], str] = str if is_case_sensitive else str.lower
    stops = {fold(word) for word in stopwords or ()}
    kept = [text for text in x.reshape(-1) if fold(text) not in stops]
    changes: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}
    change = changes[case_change_action]
    words = [change(text) for text in kept] or [""]
    return _strings(words, (*x.shape[:-1], len(words)))
