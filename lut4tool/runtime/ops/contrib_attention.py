"""com.microsoft's Attention, MultiHeadAttention and DecoderMaskedMultiHeadAttention, and their masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import numpy as np

from lut4tool.runtime.ops.attention import softmax, split_heads
from lut4tool.runtime.ops.compute import finish, working
from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import Unsupported, op

MICROSOFT = "com.microsoft"


def only(**accepted: Sequence[Any]) -> Callable[[Node], None]:
    """A check that refuses other values of some attributes than these; an attribute left out is accepted."""

    def check(node: Node) -> None:
        for name, values in accepted.items():
            if node.attributes.get(name, values[0]) not in values:
                raise Unsupported(f"{name} must be {' or '.join(map(str, values))}, not {node.attributes[name]}")

    choices = [f"{name} other than {' or '.join(map(str, values))}" for name, values in accepted.items()]
    check.__doc__ = f"Refuse {', '.join(choices)}."
    return check


def refuse_inputs(node: Node, **places: int) -> None:
    """Refuse a node that has one of some optional inputs, named with its position."""
    for name, place in places.items():
        if place < len(node.given) and node.given[place]:
            raise Unsupported(f"its input {name} is not supported")


def attend(
    xp: Any, query: Any, key: Any, value: Any, *, scale: float | None, bias: Any = None, seen: np.ndarray | None = None,
    softcap: float | None = 0.0, sink: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Attention of query [B, N, S, H] to key [B, G, T, H] and value [B, G, T, V], N / G heads to a group.

    scale: 0 or None stand for 1 / sqrt(H); bias: added to the scores; seen: bool, where a query may look; sink: a score
    [N, 1, 1] that takes a share of each softmax and gives nothing. Returns y [B, N, S, V], scores and their softmax.
    """
    (batch, heads, queries, size), (groups, keys) = query.shape, key.shape[1:3]
    grouped = query.reshape(batch, groups, heads // groups * queries, size)
    scores = xp.matmul(grouped, xp.swapaxes(key, 2, 3)) * (scale or 1 / sqrt(size))
    scores = scores.reshape(batch, heads, queries, keys)
    if softcap:
        scores = softcap * xp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        scores = xp.where(xp.array(seen), scores, xp.array(-np.inf, dtype=scores.dtype))
    weights = softmax(xp, scores if sink is None else _with_sink(xp, scores, sink))[..., :keys]
    y = xp.matmul(weights.reshape(batch, groups, -1, keys), value)
    return y.reshape(batch, heads, queries, -1), scores, weights


def _with_sink(xp: Any, scores: Any, sink: Any) -> Any:
    """The sink's score as one more key, the last."""
    return xp.concatenate([scores, xp.broadcast_to(sink, (*scores.shape[:3], 1)).astype(scores.dtype)], axis=-1)


def joined_heads(xp: Any, y: Any) -> Any:
    """[B, N, S, H] to [B, S, N * H]."""
    return xp.swapaxes(y, 1, 2).reshape(y.shape[0], y.shape[2], -1)


def causal(queries: int, keys: int) -> np.ndarray | None:
    """Keys that a query may see, the last query all of them: bool [S, T]; None where that is all."""
    return None if queries == 1 else np.arange(keys) <= np.arange(queries)[:, None] + keys - queries


def mask_bias(mask: np.ndarray, batch: int, queries: int, keys: int, filter_value: float | None) -> np.ndarray:
    """The numbers that a mask adds to the scores [B, N, S, T]: 0, or filter_value where a key is masked.

    mask: int32 1 or 0 [B, T], [B, S, T] or [B, 1, M, M] (a square over the whole cache, of which the last rows count);
    lengths [B]; ends, then starts [2 * B]; lengths, then the offsets of packed sequences, not needed here [3 * B + 2].
    """
    if mask.ndim == 1:
        place = np.arange(keys)
        kept = place < mask[:batch, None]
        if mask.size == 2 * batch:
            kept &= place >= mask[batch:, None]
        elif mask.size not in (batch, 3 * batch + 2):
            raise ValueError(f"a mask of {mask.size} lengths does not fit a batch of {batch}")
    else:
        kept = mask > 0
        if mask.ndim == 4:
            kept = kept[:, 0, keys - queries : keys, :keys]
    kept = kept[:, None, None] if kept.ndim == 2 else kept[:, None]
    if kept.shape[-1] != keys:
        raise ValueError(f"a mask of shape {list(mask.shape)} does not fit {keys} keys")
    return np.where(kept, np.float32(0), np.float32(-10000 if filter_value is None else filter_value))


def cached(xp: Any, past: Any, new: Any, length: Any) -> tuple[Any, Any]:
    """Past keys or values [B, N, P, H] with the new ones after them, and the cache that comes out.

    length: where not None, the past is a buffer filled that far, and comes out as large as it is.
    """
    if past is None:
        return new, new
    if length is None:
        both = xp.concatenate([past, new], axis=2)
        return both, both
    start, stop = int(length.reshape(-1)[0]), int(length.reshape(-1)[0]) + new.shape[2]
    if start < 0 or stop > past.shape[2]:
        raise ValueError(f"a cache of {past.shape[2]} has no room for the elements {start} to {stop}")
    both = xp.concatenate([past[:, :, :start], new], axis=2)
    return both, xp.concatenate([both, past[:, :, stop:]], axis=2)


def _scores_bias(xp: Any, mask: Any, bias: Any, batch: int, queries: int, keys: int, filter_value: Any) -> Any:
    """What is added to the scores: the mask's numbers and attention_bias."""
    if mask is None:
        return bias
    numbers = xp.array(mask_bias(mask, batch, queries, keys, filter_value))
    return numbers if bias is None else numbers + bias


# -- Attention


def shared_buffer(node: Node, past: int, length: int) -> None:
    """Refuse a cache that is a shared buffer without its filled length, and that length without such a buffer."""
    given, shared = (*node.given, *[False] * 12), bool(node.attributes.get("past_present_share_buffer"))
    if given[length] != (shared and given[past]):
        raise Unsupported("past_sequence_length and past_present_share_buffer are supported together only")


def _attention_check(node: Node) -> None:
    """Refuse rotary positions, and a shared cache without its length."""
    only(do_rotary=(0,))(node)
    shared_buffer(node, past=4, length=6)


@op("Attention", domain=MICROSOFT, host=(3, 6), check=_attention_check)
def attention(
    x: Any, weights: Any, bias: Any = None, mask_index: Any = None, past: Any = None, attention_bias: Any = None,
    past_sequence_length: Any = None, *, do_rotary: int | None = None, mask_filter_value: float | None = None,
    num_heads: int, past_present_share_buffer: int | None = None, qkv_hidden_sizes: Sequence[int] | None = None,
    rotary_embedding_dim: int | None = None, scale: float | None = None, unidirectional: int = 0, outputs: int = 1,
) -> Any:  # fmt: skip
    """The three projections come first, x @ weights + bias; the cache is [2, B, N, T, H]; int32 masks of many forms."""
    xp, data, matrix, shift, old, added = working(x, weights, bias, past, attention_bias)
    qkv = xp.matmul(data, matrix)
    qkv = qkv if shift is None else qkv + shift
    return self_attention(
        xp, qkv, x, mask_index, old, added, past_sequence_length if past_present_share_buffer else None,
        heads=num_heads, sizes=qkv_hidden_sizes, scale=scale, unidirectional=unidirectional, fill=mask_filter_value,
        outputs=outputs,
    )  # fmt: skip


def self_attention(
    xp: Any, qkv: Any, like: Any, mask: Any, past: Any, bias: Any, length: Any, *, heads: int,
    sizes: Sequence[int] | None, scale: float | None, unidirectional: int, fill: float | None,
    outputs: int,
) -> Any:  # fmt: skip
    """Attention and its cache from projections side by side [B, S, Q + K + V], in the type of `like`."""
    first, second, _ = sizes or (qkv.shape[-1] // 3,) * 3
    parts = (qkv[..., :first], qkv[..., first : first + second], qkv[..., first + second :])
    query, key, value = (split_heads(xp, part, heads) for part in parts)
    old_key, old_value = (None, None) if past is None else (past[0], past[1])
    (key, new_key), (value, new_value) = cached(xp, old_key, key, length), cached(xp, old_value, value, length)
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    seen = causal(queries, keys) if unidirectional else None
    added = _scores_bias(xp, mask, bias, batch, queries, keys, fill)
    y, _, _ = attend(xp, query, key, value, scale=scale, bias=added, seen=seen)
    y = finish(joined_heads(xp, y), like)
    return y if outputs == 1 else (y, finish(xp.stack([new_key, new_value]), like))


# -- MultiHeadAttention


def _refuse_beams(node: Node) -> None:
    """Refuse beams: cache_indirection."""
    refuse_inputs(node, cache_indirection=9)


@op("MultiHeadAttention", domain=MICROSOFT, host=(4, 8), check=_refuse_beams)
def multi_head_attention(
    query: Any, key: Any = None, value: Any = None, bias: Any = None, key_padding_mask: Any = None,
    attention_bias: Any = None, past_key: Any = None, past_value: Any = None, past_sequence_length: Any = None,
    cache_indirection: Any = None, *, mask_filter_value: float | None = None, num_heads: int,
    scale: float | None = None, unidirectional: int = 0,
) -> Any:  # fmt: skip
    """Projections come in apart, as q and packed k and v, or packed as one; 4-D keys and values are another's cache."""
    xp, q, k, v, shift, added, *old = working(query, key, value, bias, attention_bias, past_key, past_value)
    q, k, v = _projections(xp, q, k, v, shift, num_heads)
    (k, new_key), (v, new_value) = (cached(xp, *pair, past_sequence_length) for pair in zip(old, (k, v), strict=True))
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    added = _scores_bias(xp, key_padding_mask, added, batch, queries, keys, mask_filter_value)
    seen = causal(queries, keys) if unidirectional else None
    y, scores, _ = attend(xp, q, k, v, scale=scale, bias=added, seen=seen)
    return tuple(finish(part, query) for part in (joined_heads(xp, y), new_key, new_value, scores))


def _projections(xp: Any, q: Any, k: Any, v: Any, bias: Any, heads: int) -> tuple[Any, Any, Any]:
    """The three as [B, N, S, H] with their bias [Q + K + V] added."""
    if q.ndim == 5:  # [B, S, N, 3, H]
        q, k, v = (q[:, :, :, place].reshape(*q.shape[:2], -1) for place in range(3))
    elif k is None:  # [B, S, Q + K + V]
        size = q.shape[-1] // 3
        q, k, v = q[..., :size], q[..., size : 2 * size], q[..., 2 * size :]
    elif k.ndim == 5:  # [B, T, N, 2, H]
        k, v = (k[:, :, :, place].reshape(*k.shape[:2], -1) for place in range(2))
    if bias is not None:
        size = q.shape[-1]
        q = q + bias[:size]
        if k.ndim == 3:
            k, v = k + bias[size : 2 * size], v + bias[2 * size :]
    return split_heads(xp, q, heads), split_heads(xp, k, heads), split_heads(xp, v, heads)


def _decoder_check(node: Node) -> None:
    """Refuse beams, and a shared cache without its length."""
    refuse_inputs(node, beam_width=8, cache_indirection=9)
    shared_buffer(node, past=5, length=7)


@op("DecoderMaskedMultiHeadAttention", domain=MICROSOFT, host=(3, 7), check=_decoder_check)
def decoder_masked_multi_head_attention(
    query: Any, key: Any = None, value: Any = None, mask_index: Any = None, attention_bias: Any = None,
    past_key: Any = None, past_value: Any = None, past_sequence_length: Any = None, beam_width: Any = None,
    cache_indirection: Any = None, bias: Any = None, *, mask_filter_value: float | None = None, num_heads: int,
    output_qk: int | None = None, past_present_share_buffer: int | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    """MultiHeadAttention of one new token; without beams, and its shared cache in the plain layout [B, N, M, H]."""
    return multi_head_attention(
        query, key, value, bias, mask_index, attention_bias, past_key, past_value,
        past_sequence_length if past_present_share_buffer else None, num_heads=num_heads, scale=scale,
        mask_filter_value=mask_filter_value,
    )  # fmt: skip
