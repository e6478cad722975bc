"""TfIdfVectorizer (onnx/defs/nn): n-grams of strings or integers, counted on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lut4tool.runtime.dtypes import to_device
from lut4tool.runtime.ops.sizes import check_size
from lut4tool.runtime.registry import op


@op("TfIdfVectorizer", host=(0,), on_host=True)
def tf_idf_vectorizer(
    x: Any, *, max_gram_length: int, max_skip_count: int, min_gram_length: int, mode: str, ngram_counts: Sequence[int],
    ngram_indexes: Sequence[int], pool_int64s: Sequence[int] | None = None, pool_strings: Sequence[Any] | None = None,
    weights: Sequence[float] | None = None,
) -> Any:  # fmt: skip
    """How often each n-gram of the pool comes in each row, its items up to max_skip_count + 1 apart."""
    items = pool_int64s if pool_strings is None else [s.decode() if isinstance(s, bytes) else s for s in pool_strings]
    pool = _pool(items or [], ngram_counts)
    rows = x.reshape(1, -1) if x.ndim < 2 else x
    check_size((len(rows), max(ngram_indexes) + 1), 4)
    counts = np.zeros((len(rows), max(ngram_indexes) + 1), np.float32)
    for row, count in zip(rows.tolist(), counts, strict=True):
        for gram in _grams(row, min_gram_length, max_gram_length, max_skip_count):
            if gram in pool:
                count[ngram_indexes[pool[gram]]] += 1
    scale = np.ones(counts.shape[1], np.float32)
    if weights is not None:
        scale[np.asarray(ngram_indexes)] = weights
    values = {"TF": counts, "IDF": (counts > 0) * scale, "TFIDF": counts * scale}[mode]
    return to_device(values.reshape(*x.shape[:-1], -1) if x.ndim else values[0])


def _pool(items: Sequence[Any], starts: Sequence[int]) -> dict[tuple[Any, ...], int]:
    """The number of each n-gram: the pool lists all 1-grams, then all 2-grams, from the given starts on."""
    grams: list[tuple[Any, ...]] = []
    for n, (start, end) in enumerate(zip(starts, [*starts[1:], len(items)], strict=True), 1):
        grams += [tuple(items[at : at + n]) for at in range(start, end, n)]
    return {gram: number for number, gram in enumerate(grams)}


def _grams(row: Sequence[Any], shortest: int, longest: int, skips: int) -> Any:
    """Every n-gram of a row for each distance between its items; a 1-gram has no distance."""
    for n in range(max(shortest, 1), min(longest, len(row)) + 1):
        for step in range(1, 2 if n == 1 else min(skips + 1, (len(row) - 1) // (n - 1)) + 1):
            for start in range(len(row) - (n - 1) * step):
                yield tuple(row[start : start + (n - 1) * step + 1 : step])
