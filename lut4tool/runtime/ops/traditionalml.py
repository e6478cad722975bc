"""Classic machine learning (onnx/defs/traditionalml, domain ai.onnx.ml): on the host, for their tables and strings."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from lut4tool.runtime.dtypes import to_mx
from lut4tool.runtime.ops.indexing import checked
from lut4tool.runtime.registry import op

DOMAIN = "ai.onnx.ml"


@op("ArrayFeatureExtractor", domain=DOMAIN)
def array_feature_extractor(xp: Any, x: Any, y: Any) -> Any:
    """The last axis at the indices given; a rank-1 tensor counts as one row."""
    rows = x.reshape(1, -1) if x.ndim == 1 else x
    return xp.take(rows, xp.array(checked(y, rows.shape[-1]).reshape(-1)), axis=-1)


@op("Binarizer", domain=DOMAIN)
def binarizer(xp: Any, x: Any, *, threshold: float = 0.0) -> Any:
    """1 above the threshold, else 0, in the type of x."""
    return (x > threshold).astype(x.dtype)


def _encoded(x: Any, keys: Sequence[Any], values: Sequence[Any], default: Any, dtype: Any) -> Any:
    """Each element through a table; the last of equal keys wins, and one NaN is like another."""

    def key(item: Any) -> Any:
        return "NaN" if isinstance(item, float) and item != item else item

    table = {key(k): v for k, v in zip(keys, values, strict=True)}
    found = np.empty(x.size, dtype)
    found[:] = [table.get(key(item), default) for item in x.reshape(-1).tolist()]
    return to_mx(found.reshape(x.shape))


@op("LabelEncoder", domain=DOMAIN, until=1, host=(0,))
def label_encoder_classes(
    x: Any, *, classes_strings: Sequence[str] | None = None, default_int64: int = -1, default_string: str = "_Unused"
) -> Any:
    """Strings to their index in the list of classes, or an index to its string."""
    names = list(classes_strings or ())
    if x.dtype.kind in "OUST":
        return _encoded(x, names, range(len(names)), default_int64, np.int64)
    return _encoded(x, range(len(names)), names, default_string, object)


@op("LabelEncoder", domain=DOMAIN, since=2, until=3, host=(0,))
def label_encoder_lists(
    x: Any, *, default_float: float = -0.0, default_int64: int = -1, default_string: str = "_Unused",
    keys_floats: Any = None, keys_int64s: Any = None, keys_strings: Any = None,
    values_floats: Any = None, values_int64s: Any = None, values_strings: Any = None,
) -> Any:  # fmt: skip
    """Keys and values as lists of one type each."""
    return label_encoder(
        x, default_float=default_float, default_int64=default_int64, default_string=default_string,
        keys_floats=keys_floats, keys_int64s=keys_int64s, keys_strings=keys_strings,
        values_floats=values_floats, values_int64s=values_int64s, values_strings=values_strings,
    )  # fmt: skip


@op("LabelEncoder", domain=DOMAIN, since=4, host=(0,))
def label_encoder(
    x: Any, *, default_float: float = -0.0, default_int64: int = -1, default_string: str = "_Unused",
    default_tensor: Any = None, keys_floats: Any = None, keys_int64s: Any = None, keys_strings: Any = None,
    keys_tensor: Any = None, values_floats: Any = None, values_int64s: Any = None,
    values_strings: Any = None, values_tensor: Any = None,
) -> Any:  # fmt: skip
    """Keys and values as lists or tensors; the default is the one of the values' type."""
    keys = next(given for given in (keys_tensor, keys_floats, keys_int64s, keys_strings) if given is not None)
    if values_tensor is not None:
        default = default_tensor
        if default is None:
            kind = values_tensor.dtype.kind
            default = default_int64 if kind in "iu" else default_float if kind == "f" else default_string
        return _encoded(x, _list(keys), _list(values_tensor), _list(default)[0], values_tensor.dtype)
    if values_floats is not None:
        return _encoded(x, _list(keys), values_floats, default_float, np.float32)
    if values_int64s is not None:
        return _encoded(x, _list(keys), values_int64s, default_int64, np.int64)
    return _encoded(x, _list(keys), values_strings, default_string, object)


def _list(values: Any) -> list[Any]:
    """The items of a list, of a tensor, or a single one; bytes as text."""
    items = np.asarray(values).reshape(-1).tolist() if not isinstance(values, list) else values
    return [item.decode() if isinstance(item, bytes) else item for item in items]


_COMPARE = (np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal)
_MEMBER = 6
_AVERAGE, _SUM, _MIN, _MAX = range(4)
_NONE, _SOFTMAX, _LOGISTIC, _SOFTMAX_ZERO, _PROBIT = range(5)


@op("TreeEnsemble", domain=DOMAIN, host=(0,))
def tree_ensemble(
    x: Any, *, aggregate_function: int = 1, leaf_targetids: Sequence[int], leaf_weights: Any,
    membership_values: Any = None, n_targets: int | None = None,
    nodes_falseleafs: Sequence[int], nodes_falsenodeids: Sequence[int],
    nodes_featureids: Sequence[int], nodes_hitrates: Any = None,
    nodes_missing_value_tracks_true: Sequence[int] | None = None, nodes_modes: Any, nodes_splits: Any,
    nodes_trueleafs: Sequence[int], nodes_truenodeids: Sequence[int], post_transform: int = 0,
    tree_roots: Sequence[int],
) -> Any:  # fmt: skip
    """Leaf weights summed, averaged, or their extreme, per target, of the trees that each row [F] walks down."""
    members = _members(nodes_modes, membership_values)
    missing = nodes_missing_value_tracks_true or [0] * len(nodes_modes)
    targets = n_targets or 1
    hits: list[list[list[float]]] = [[[] for _ in range(targets)] for _ in x]
    for row, scores in zip(x, hits, strict=True):
        for root in tree_roots:
            node, leaf = root, False
            while not leaf:
                value, mode = row[nodes_featureids[node]], int(nodes_modes[node])
                taken = value in members[node] if mode == _MEMBER else _COMPARE[mode](value, nodes_splits[node])
                if taken or (np.isnan(value) and missing[node]):
                    node, leaf = nodes_truenodeids[node], bool(nodes_trueleafs[node])
                else:
                    node, leaf = nodes_falsenodeids[node], bool(nodes_falseleafs[node])
            scores[leaf_targetids[node]].append(float(leaf_weights[node]))
    combine: Any = {_AVERAGE: lambda w: sum(w) / len(tree_roots), _SUM: sum, _MIN: min, _MAX: max}[aggregate_function]
    values = np.array([[combine(weights) if weights else 0.0 for weights in scores] for scores in hits])
    return to_mx(_transformed(values.reshape(len(x), targets), post_transform).astype(x.dtype))


def _members(modes: Any, values: Any) -> dict[int, set[float]]:
    """The set of each membership node: the values between NaNs, in the order of the nodes."""
    sets: list[set[float]] = [set()]
    for value in () if values is None else np.asarray(values).tolist():
        if value != value:
            sets.append(set())
        else:
            sets[-1].add(value)
    return dict(zip(np.flatnonzero(np.asarray(modes) == _MEMBER).tolist(), sets, strict=False))


def _transformed(scores: np.ndarray, how: int) -> np.ndarray:
    """NONE, LOGISTIC, PROBIT, or SOFTMAX over the targets; SOFTMAX_ZERO leaves exact zeros zero."""
    if how == _NONE:
        return scores
    if how == _LOGISTIC:
        return 1 / (1 + np.exp(-scores))
    if how == _PROBIT:
        return np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])(scores)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    if how == _SOFTMAX_ZERO:
        powers = np.where(scores == 0, 0, powers)
    return powers / powers.sum(axis=1, keepdims=True)
