"""com.microsoft's normalizations with what comes before them: a residual, embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from lut4tool.runtime.dtypes import numpy_dtype, to_device
from lut4tool.runtime.ops.compute import finish, finish_as, working
from lut4tool.runtime.ops.indexing import checked
from lut4tool.runtime.ops.norm import standard
from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import REQUIRED, Unsupported, op

MICROSOFT = "com.microsoft"
_FLOAT32 = np.dtype(np.float32)


def _skipped(like: Any, xp: Any, x: Any, skip: Any, bias: Any) -> tuple[Any, Any]:
    """What is normalized: x + skip + bias, skip of x's shape or its last axes; and the same in the type of `like`."""
    total = x + skip.reshape(*[1] * (x.ndim - skip.ndim), *skip.shape)
    total = total if bias is None else total + bias
    return total, finish(total, like)


@op("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(
    x: Any, skip: Any, gamma: Any, beta: Any = None, bias: Any = None, *, epsilon: float = 1e-12
) -> Any:
    """LayerNormalization of x + skip + bias; mean and inverse deviation in float32, and that sum."""
    xp, data, other, scale, shift, extra = working(x, skip, gamma, beta, bias)
    total, added = _skipped(x, xp, data, other, extra)
    y, mean, inverse = standard(xp, total, (x.ndim - 1,), epsilon)
    y = y * scale if shift is None else y * scale + shift
    return finish(y, x), finish_as(mean, _FLOAT32), finish_as(inverse, _FLOAT32), added


@op("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(
    x: Any, skip: Any, gamma: Any, bias: Any = None, *, epsilon: float = 1e-12
) -> Any:
    """RMSNormalization of x + skip + bias; the mean comes out as 0."""
    xp, data, other, scale, extra = working(x, skip, gamma, bias)
    total, added = _skipped(x, xp, data, other, extra)
    inverse = _inverse_rms(xp, total, -1, epsilon)
    return finish(total * inverse * scale, x), finish_as(0 * inverse, _FLOAT32), finish_as(inverse, _FLOAT32), added


@op("SimplifiedLayerNormalization")
def simplified_layer_normalization(
    x: Any, scale: Any, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    """RMSNormalization as onnxruntime names it, in the standard's domain; the inverse of the root mean square too."""
    xp, data, factor = working(x, scale)
    inverse = _inverse_rms(xp, data, tuple(range(axis % x.ndim, x.ndim)), epsilon)
    return finish(data * inverse * factor, scale), finish_as(inverse, numpy_dtype(stash_type))


def _inverse_rms(xp: Any, x: Any, axes: Any, epsilon: float) -> Any:
    return 1 / xp.sqrt(xp.mean(x * x, axis=axes, keepdims=True) + epsilon)


def _segments_check(node: Node) -> None:
    """Refuse segment_ids without segment_embedding, and the other way round."""
    given = (*node.given, *[False] * 9)
    if given[1] != given[4]:
        raise Unsupported("segment_ids and segment_embedding are supported together only")


@op("EmbedLayerNormalization", domain=MICROSOFT, host=(0, 1, 7, 8), check=_segments_check)
def embed_layer_normalization(
    input_ids: Any, segment_ids: Any = None, word_embedding: Any = REQUIRED, position_embedding: Any = REQUIRED,
    segment_embedding: Any = None, gamma: Any = REQUIRED, beta: Any = REQUIRED, mask: Any = None,
    position_ids: Any = None, *, epsilon: float = 1e-12, mask_index_type: int | None = None,
) -> Any:  # fmt: skip
    """LayerNormalization of word, position and segment embeddings, summed; mask_index counts each row of the mask."""
    xp, words, positions, segments, scale, shift = working(
        word_embedding, position_embedding, segment_embedding, gamma, beta
    )
    places = np.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
    total = _embedded(xp, words, input_ids) + _embedded(xp, positions, places)
    if segment_ids is not None:
        total = total + _embedded(xp, segments, segment_ids)
    y, _, _ = standard(xp, total, (2,), epsilon)
    counts = np.zeros(len(input_ids), np.int32) if mask is None else mask.sum(1, dtype=np.int32)
    return finish(y * scale + shift, word_embedding), to_device(counts), finish(total, word_embedding)


def _embedded(xp: Any, table: Any, ids: np.ndarray) -> Any:
    """Rows of a table; an index that is negative or too large is an error."""
    if (ids < 0).any():
        raise IndexError(f"index {ids.min()} of an embedding is negative")
    return xp.take(table, xp.array(checked(ids, table.shape[0])), axis=0)
