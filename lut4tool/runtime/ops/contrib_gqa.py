"""com.microsoft's GroupQueryAttention, with its key-value cache, and RotaryEmbedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from lut4tool.runtime.cache import Cache
from lut4tool.runtime.ops.attention import split_heads, turned
from lut4tool.runtime.ops.compute import finish, working
from lut4tool.runtime.ops.contrib_attention import MICROSOFT, attend, joined_heads, only, refuse_inputs
from lut4tool.runtime.ops.indexing import checked
from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import REQUIRED, Unsupported, op


@op("RotaryEmbedding", domain=MICROSOFT, host=(1,), check=only(scale=(1.0,)))
def rotary_embedding_by_position(
    x: Any, position_ids: Any, cos_cache: Any, sin_cache: Any, *, interleaved: int | None = None,
    is_packed_batching: int | None = None, num_heads: int | None = None, rotary_embedding_dim: int | None = None,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """Positions come second, and one alone is where all sequences start; the tables say how large a head is.

    rotary_embedding_dim: only that part of a head turns. Packed batches differ in nothing here.
    """
    xp, data, cos, sin = working(x, cos_cache, sin_cache)
    heads = num_heads if rotary_embedding_dim and num_heads else x.shape[-1] // (2 * cos.shape[1])
    parts = split_heads(xp, data, heads)
    if position_ids.ndim == 1:
        position_ids = np.broadcast_to(position_ids.reshape(1, 1) + np.arange(parts.shape[2]), parts.shape[::2])
    places = _positions(xp, position_ids, cos.shape[0])
    y = turned(xp, parts, cos[places], sin[places], interleaved, rotary_embedding_dim)
    return finish(joined_heads(xp, y) if x.ndim == 3 else y, x)


def _positions(xp: Any, places: np.ndarray, rows: int) -> Any:
    """Positions as rows of a table; one outside it is an error."""
    if places.size and places.min() < 0:
        raise IndexError(f"position {places.min()} is negative")
    return xp.array(checked(places, rows))


def _gqa_check(node: Node) -> None:
    """Refuse a quantized cache, a cache that slides, and options that contradict each other."""
    only(k_quant_type=("NONE",), v_quant_type=("NONE",), sliding_window_cache=(0,), kv_cache_bit_width=(0,))(node)
    only(smooth_softmax=(-1, 0, 1), causal=(1, 0), qk_output=(0, 1, 2))(node)
    refuse_inputs(node, k_scale=12, v_scale=13)
    a = node.attributes
    if "num_heads" in a and "kv_num_heads" in a and (a["kv_num_heads"] < 1 or a["num_heads"] % a["kv_num_heads"]):
        raise Unsupported(f"num_heads {a['num_heads']} must be a multiple of kv_num_heads {a['kv_num_heads']}")
    if not a.get("causal", 1) and a.get("local_window_size", -1) > 0:
        raise Unsupported("local_window_size must be -1 where causal is 0")
    if node.outputs > 3 and not a.get("qk_output", 0):
        raise Unsupported("its output output_qk needs qk_output 1 or 2")
    if a.get("do_rotary") and not all((*node.given, *[False] * 9)[7:9]):
        raise Unsupported("do_rotary needs the inputs cos_cache and sin_cache")


@op("GroupQueryAttention", domain=MICROSOFT, host=(5, 6, 9, 16), check=_gqa_check)
def group_query_attention(
    query: Any, key: Any = None, value: Any = None, past_key: Any = None, past_value: Any = None,
    seqlens_k: Any = REQUIRED, total_sequence_length: Any = REQUIRED, cos_cache: Any = None, sin_cache: Any = None,
    position_ids: Any = None, attention_bias: Any = None, head_sink: Any = None, k_scale: Any = None,
    v_scale: Any = None, q_norm_weight: Any = None, k_norm_weight: Any = None, query_seqlens: Any = None, *,
    causal: int = 1, do_rotary: int | None = None, k_norm_epsilon: float | None = None, k_quant_type: str = "NONE",
    kv_cache_bit_width: int | None = None, kv_num_heads: int, local_window_size: int = -1, num_heads: int,
    q_norm_epsilon: float | None = None, qk_norm_epsilon: float = 1e-6, qk_output: int = 0,
    rotary_interleaved: int | None = None, scale: float | None = None, sliding_window_cache: int = 0,
    smooth_softmax: int = -1, softcap: float | None = None, v_quant_type: str = "NONE",
) -> Any:  # fmt: skip
    """Causal attention that turns its queries and keys, each sequence over as much of its cache as seqlens_k says.

    The cache that comes out is as long as the past or total_sequence_length, zeros after each sequence's own end.
    """
    xp, q, k, v, cos, sin, bias, sink, q_norm, k_norm = working(
        query, key, value, cos_cache, sin_cache, attention_bias, head_sink, q_norm_weight, k_norm_weight
    )
    q, k, v = _split(xp, q, k, v, num_heads, kv_num_heads)
    steps, whole = q.shape[2], int(total_sequence_length.reshape(-1)[0])
    ends = seqlens_k.reshape(-1).astype(np.int64) + 1
    starts = _starts(ends, steps, whole, query_seqlens)
    if q_norm is not None:
        q = _normed(xp, q, q_norm, qk_norm_epsilon if q_norm_epsilon is None else q_norm_epsilon)
        k = _normed(xp, k, k_norm, qk_norm_epsilon if k_norm_epsilon is None else k_norm_epsilon)
    at = starts[:, None] + np.arange(steps)
    if do_rotary:
        turns = _turned_at(at, position_ids, prompt=query_seqlens is None and steps == whole)
        places = _positions(xp, turns, cos.shape[0])
        q, k = (turned(xp, x, cos[places], sin[places], rotary_interleaved, 2 * cos.shape[1]) for x in (q, k))
    keys, present_key = _stored(xp, past_key, k, starts, whole)
    values, present_value = _stored(xp, past_value, v, starts, whole)

    seen = _seen(at, ends, whole, causal, local_window_size)
    share = _sink(xp, sink, smooth_softmax, q.dtype)
    y, scores, weights = attend(
        xp, q, keys, values, scale=scale, bias=None if bias is None else bias[..., :whole], seen=seen, softcap=softcap,
        sink=share,
    )  # fmt: skip
    results = (joined_heads(xp, y), present_key, present_value, weights if qk_output == 2 else scores)
    return tuple(part if isinstance(part, Cache) else finish(part, query) for part in results)


def _split(xp: Any, q: Any, k: Any, v: Any, heads: int, kv_heads: int) -> tuple[Any, Any, Any]:
    """The three as [B, N or G, S, H]; packed, they lie side by side in the query."""
    if k is None:
        packed = split_heads(xp, q, heads + 2 * kv_heads)
        return packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
    if k.shape[1] != q.shape[1]:
        raise ValueError(f"there are {k.shape[1]} keys and {q.shape[1]} queries: other numbers are not supported")
    return split_heads(xp, q, heads), split_heads(xp, k, kv_heads), split_heads(xp, v, kv_heads)


def _starts(ends: np.ndarray, steps: int, whole: int, valid: Any) -> np.ndarray:
    """How many keys each sequence has before these, from how many it has after them.

    A first prompt (as many steps as total_sequence_length) is padded on the right, as a chunk is of which only `valid`
    steps count; any other call has no padding.
    """
    if ends.max() > whole:
        raise ValueError(f"seqlens_k says {ends.max()} keys, total_sequence_length {whole}")
    starts = ends - valid.reshape(-1) if valid is not None else 0 * ends if steps == whole else ends - steps
    if (starts < 0).any():
        raise ValueError(f"seqlens_k says {ends.min()} keys, fewer than the {steps} of this call")
    return starts


def _turned_at(at: np.ndarray, position_ids: Any, prompt: bool) -> np.ndarray:
    """The positions that queries and keys are turned by: position_ids, of which a prompt uses the first only."""
    if position_ids is None:
        return at
    return position_ids.reshape(-1)[0] + 0 * at[:, :1] + np.arange(at.shape[1]) if prompt else position_ids


def _normed(xp: Any, x: Any, weight: Any, epsilon: float) -> Any:
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def _stored(xp: Any, past: Any, new: Any, starts: np.ndarray, whole: int) -> tuple[Any, Any]:
    """The keys or values so far [B, G, whole, H], and the cache that comes out; a Cache is written in place."""
    steps, before = new.shape[2], 0 if past is None else past.shape[2]
    capacity = max(whole, before)
    if starts.max() + steps > capacity or starts.max() > before:
        raise ValueError(f"a cache of {capacity} has no room for {steps} steps after {starts.max()}")
    if isinstance(past, Cache):
        return working(past.write(xp, new, starts, capacity)[:, :, :whole])[1], past
    present = _grown(xp, working(past)[1], new, starts, capacity)
    return present[:, :, :whole], present


def _grown(xp: Any, past: Any, new: Any, starts: np.ndarray, capacity: int) -> Any:
    """A cache [B, G, capacity, H] with new keys or values at each sequence's start and zeros after them."""
    steps = new.shape[2]

    def one(rows: slice, start: int) -> Any:
        parts = [past[rows, :, :start]] if start else []
        tail = xp.zeros((new[rows].shape[0], new.shape[1], capacity - start - steps, new.shape[3]), dtype=new.dtype)
        return xp.concatenate([*parts, new[rows], tail], axis=2)

    if (starts == starts[0]).all():
        return one(slice(None), int(starts[0]))
    return xp.concatenate([one(slice(index, index + 1), int(start)) for index, start in enumerate(starts)])


def _seen(at: np.ndarray, ends: np.ndarray, keys: int, causal: int, window: int) -> np.ndarray:
    """Keys that each query sees: bool [B, 1, S, T]; a window holds the query's own key."""
    key = np.arange(keys)
    seen = key < ends[:, None, None]
    if causal:
        seen = key <= at[:, :, None]
        if window > 0:
            seen = seen & (key > at[:, :, None] - window)
    return np.broadcast_to(seen, (*at.shape, keys))[:, None]


def _sink(xp: Any, head_sink: Any, smooth: int, dtype: Any) -> Any:
    """The score that takes a share of each softmax: a head's own, 0 for all with smooth_softmax."""
    if head_sink is not None:
        return head_sink.reshape(-1, 1, 1)
    return xp.zeros((1, 1, 1), dtype=dtype) if smooth == 1 else None
