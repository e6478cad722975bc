"""Attention with heads, caches and masks, and rotary positions (onnx/defs/nn)."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from lut4tool.runtime.dtypes import numpy_dtype
from lut4tool.runtime.ops.compute import finish, working
from lut4tool.runtime.ops.indexing import checked
from lut4tool.runtime.registry import op


def split_heads(xp: Any, x: Any, heads: int | None) -> Any:
    """[B, T, heads * D] to [B, heads, T, D]; a 4-D tensor is that already."""
    return x if x.ndim == 4 else xp.swapaxes(x.reshape(*x.shape[:2], heads, -1), 1, 2)


def _allowed(
    queries: int, keys: int, offset: np.ndarray, lengths: np.ndarray | None, causal: int, left: int, right: int
) -> np.ndarray | None:
    """Keys that causality, the windows and the lengths let a query see: bool [B or 1, 1, queries, keys]; None: all."""
    if not causal and left < 0 and right < 0 and lengths is None:
        return None
    at = offset.reshape(-1, 1, 1, 1) + np.arange(queries).reshape(-1, 1)
    key = np.arange(keys)
    seen = np.ones((1, 1, queries, keys), np.bool_)
    if causal:
        seen = seen & (key <= at)
    if left >= 0:
        seen = seen & (key >= at - left)
    if right >= 0:
        seen = seen & (key <= at + right)
    return seen if lengths is None else seen & (key < lengths.reshape(-1, 1, 1, 1))


def _bias(xp: Any, mask: Any, keys: int, dtype: Any) -> Any:
    """attn_mask as numbers to add: -inf for False and for the keys past its end."""
    if mask.dtype == xp.bool_:
        mask = xp.where(mask, xp.array(0, dtype=dtype), xp.array(-np.inf, dtype=dtype))
    short = keys - mask.shape[-1]
    return xp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, short)], constant_values=-np.inf) if short > 0 else mask


def softmax(xp: Any, scores: Any) -> Any:
    """Over the last axis; a row of -inf gives zeros."""
    top = xp.max(scores, axis=-1, keepdims=True)
    powers = xp.exp(scores - xp.where(xp.isinf(top), xp.zeros_like(top), top))
    total = xp.sum(powers, axis=-1, keepdims=True)
    return powers / xp.where(total == 0, xp.ones_like(total), total)


@op("Attention", since=23, host=(6,))
def attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, past_key: Any = None, past_value: Any = None,
    nonpad_kv_seqlen: Any = None, *, is_causal: int = 0, kv_num_heads: int | None = None, left_window_size: int = -1,
    q_num_heads: int | None = None, qk_matmul_output_mode: int = 0, right_window_size: int = -1,
    scale: float | None = None, softcap: float = 0.0, softmax_precision: int | None = None,
) -> Any:  # fmt: skip
    """Causality counts from the end of the cache, a row that sees nothing is 0, the scores can come out."""
    xp, query, key, value, mask, old_key, old_value = working(q, k, v, attn_mask, past_key, past_value)
    query = split_heads(xp, query, q_num_heads)
    key, value = split_heads(xp, key, kv_num_heads), split_heads(xp, value, kv_num_heads)
    if old_key is not None:
        key, value = xp.concatenate([old_key, key], axis=2), xp.concatenate([old_value, value], axis=2)
    present = key, value
    queries, keys, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    if group > 1:
        key, value = xp.repeat(key, group, axis=1), xp.repeat(value, group, axis=1)

    factor = sqrt(1 / sqrt(query.shape[3]) if scale is None else scale)
    stages = [xp.matmul(query * factor, xp.swapaxes(key, 2, 3) * factor)]
    stages.append(softcap * xp.tanh(stages[0] / softcap) if softcap else stages[0])
    scores = stages[1] if mask is None else stages[1] + _bias(xp, mask, keys, query.dtype)
    offset = np.asarray(0 if old_key is None else old_key.shape[2])
    if nonpad_kv_seqlen is not None and old_key is None:
        offset = nonpad_kv_seqlen - queries
    seen = _allowed(queries, keys, offset, nonpad_kv_seqlen, is_causal, left_window_size, right_window_size)
    if seen is not None:
        scores = xp.where(xp.array(seen), scores, xp.array(-np.inf, dtype=scores.dtype))
    weights = softmax(xp, scores if softmax_precision is None else _as_precise(xp, scores, softmax_precision))
    y = xp.matmul(weights.astype(query.dtype), value)
    stages += [scores, weights]
    if q.ndim == 3:
        y = xp.swapaxes(y, 1, 2).reshape(*q.shape[:2], -1)
    return finish(y, q), finish(present[0], k), finish(present[1], v), finish(stages[qk_matmul_output_mode], q)


def _as_precise(xp: Any, scores: Any, number: int) -> Any:
    """Scores in float64 where softmax_precision asks for it and it can be had; float32 holds every other type."""
    return scores.astype(np.float64) if xp is np and numpy_dtype(number) == np.float64 else scores


@op("RotaryEmbedding", since=23)
def rotary_embedding(
    x: Any, cos_cache: Any, sin_cache: Any, position_ids: Any = None, *, interleaved: int = 0,
    num_heads: int | None = None, rotary_embedding_dim: int = 0,
) -> Any:  # fmt: skip
    """Cosines and sines come as tables by position, where mx.fast.rope computes them; the rest of a head is kept."""
    xp, data, cos, sin = working(x, cos_cache, sin_cache)
    heads = split_heads(xp, data, num_heads)  # [B, heads, T, D]
    if position_ids is not None:
        at = xp.array(checked(position_ids, cos.shape[0]))
        cos, sin = xp.take(cos, at, axis=0), xp.take(sin, at, axis=0)
    y = turned(xp, heads, cos, sin, interleaved, rotary_embedding_dim)
    return finish((xp.swapaxes(y, 1, 2).reshape(x.shape) if x.ndim == 3 else y), x)


def turned(xp: Any, heads: Any, cos: Any, sin: Any, interleaved: int | None, dim: int | None) -> Any:
    """Heads [B, N, T, H] with their first `dim` elements (0 or None: all) turned by cos and sin [B, T, dim / 2]."""
    cos, sin = xp.expand_dims(cos, 1), xp.expand_dims(sin, 1)
    part, kept = heads[..., : dim or None], heads[..., dim or heads.shape[-1] :]
    half = part.shape[-1] // 2
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    joined = xp.stack([real, imaginary], axis=-1) if interleaved else xp.concatenate([real, imaginary], axis=-1)
    joined = joined.reshape(part.shape)
    return xp.concatenate([joined, kept], axis=-1) if kept.shape[-1] else joined
