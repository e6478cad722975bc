"""Classic machine learning (onnx/defs/traditionalml, domain ai.onnx.ml): on the host, for their tables and strings.

A map is a dict; its models and trees are in models.py and trees.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lut4tool.runtime.dtypes import to_numpy
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
    return found.reshape(x.shape)


@op("LabelEncoder", domain=DOMAIN, until=1, host=(0,), on_host=True)
def label_encoder_classes(
    x: Any, *, classes_strings: Sequence[str] | None = None, default_int64: int = -1, default_string: str = "_Unused"
) -> Any:
    """Strings to their index in the list of classes, or an index to its string."""
    names = list(classes_strings or ())
    if x.dtype.kind in "OUST":
        return _encoded(x, names, range(len(names)), default_int64, np.int64)
    return _encoded(x, range(len(names)), names, default_string, object)


@op("LabelEncoder", domain=DOMAIN, since=2, until=3, host=(0,), on_host=True)
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


@op("LabelEncoder", domain=DOMAIN, since=4, host=(0,), on_host=True)
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


@op("Scaler", domain=DOMAIN, host=(0,), on_host=True)
def scaler(x: Any, *, offset: Sequence[float] | None = None, scale: Sequence[float] | None = None) -> Any:
    """(x - offset) * scale: one pair for all, or one a column."""
    return ((x - np.array(offset or [0.0])) * np.array(scale or [1.0])).astype(np.float32)


@op("Normalizer", domain=DOMAIN, host=(0,), on_host=True)
def normalizer(x: Any, *, norm: str = "MAX") -> Any:
    """Each row over its largest value, the sum of its magnitudes or its length; a row where that is 0 stays."""
    data = x.astype(np.float64)
    lengths: dict[str, Callable[[Any], Any]] = {
        "MAX": lambda rows: rows.max(axis=-1, keepdims=True),
        "L1": lambda rows: abs(rows).sum(axis=-1, keepdims=True),
        "L2": lambda rows: np.sqrt((rows * rows).sum(axis=-1, keepdims=True)),
    }
    length = lengths[norm](data)
    return (data / np.where(length == 0, 1, length)).astype(np.float32)


@op("OneHotEncoder", domain=DOMAIN, host=(0,), on_host=True)
def one_hot_encoder(
    x: Any, *, cats_int64s: Sequence[int] | None = None, cats_strings: Sequence[str] | None = None, zeros: int = 1
) -> Any:
    """A new last axis, one place a category; numbers are cut to integers; the unknown is all zeros, or an error."""
    categories = list(cats_strings or cats_int64s or ())
    data = x if cats_strings else x.astype(np.int64)
    encoded = np.stack([np.asarray(data == category, np.float32) for category in categories], axis=-1)
    if not zeros and not encoded.any(axis=-1).all():
        raise ValueError("a value is none of the categories, and zeros is 0")
    return encoded


@op("FeatureVectorizer", domain=DOMAIN, on_host=True)
def feature_vectorizer(*inputs: Any, inputdimensions: Sequence[int] | None = None) -> Any:
    """The columns of all inputs side by side, each cut or filled with zeros to its size in inputdimensions."""
    rows = [to_numpy(x).reshape(1, -1) if x.ndim == 1 else to_numpy(x) for x in inputs]
    sizes = inputdimensions or [part.shape[1] for part in rows]
    padded = [np.pad(part, ((0, 0), (0, size)))[:, :size] for part, size in zip(rows, sizes, strict=True)]
    return np.concatenate(padded, axis=1).astype(np.float32)


@op("Imputer", domain=DOMAIN, host=(0,), on_host=True)
def imputer(
    x: Any, *, imputed_value_floats: Sequence[float] | None = None, imputed_value_int64s: Sequence[int] | None = None,
    replaced_value_float: float = 0.0, replaced_value_int64: int = 0,
) -> Any:  # fmt: skip
    """One value replaced, NaN too, by one for all or one a column."""
    floats = x.dtype.kind == "f"
    wanted = replaced_value_float if floats else replaced_value_int64
    values = imputed_value_floats if floats else imputed_value_int64s
    if not values:
        raise ValueError(f"there are no imputed values for {x.dtype.name}")
    missing = np.isnan(x) if wanted != wanted else x == wanted
    return np.where(missing, np.array(values), x).astype(x.dtype)


@op("CategoryMapper", domain=DOMAIN, host=(0,), on_host=True)
def category_mapper(
    x: Any, *, cats_int64s: Sequence[int] | None = None, cats_strings: Sequence[str] | None = None,
    default_int64: int = -1, default_string: str = "_Unused",
) -> Any:  # fmt: skip
    """Strings to integers, integers to strings."""
    integers, strings = cats_int64s or (), cats_strings or ()
    if x.dtype.kind in "OUST":
        return _encoded(x, strings, integers, default_int64, np.int64)
    return _encoded(x, integers, strings, default_string, object)


@op("CastMap", domain=DOMAIN, on_host=True)
def cast_map(x: Any, *, cast_to: str = "TO_FLOAT", map_form: str = "DENSE", max_map: int = 1) -> Any:
    """The values of a dict in the order of its keys [1, n], or each at the place of its key [1, max_map]."""
    dtype, empty = {"TO_FLOAT": (np.float32, 0), "TO_INT64": (np.int64, 0), "TO_STRING": (object, "0")}[cast_to]
    values = {key: _cast_value(value, dtype) for key, value in sorted(x.items())}
    if map_form == "DENSE":
        return np.array(list(values.values()), dtype).reshape(1, -1)
    if values and not 0 <= min(values) <= max(values) < max_map:
        raise ValueError(f"a key of the map is not from 0 to {max_map - 1}")
    return np.array([values.get(key, empty) for key in range(max_map)], dtype).reshape(1, -1)


def _cast_value(value: Any, dtype: Any) -> Any:
    value = np.asarray(value).item()
    if dtype is object:
        return value if isinstance(value, str) else f"{value:f}"
    return float(value) if dtype is np.float32 else int(float(value))


@op("DictVectorizer", domain=DOMAIN, on_host=True)
def dict_vectorizer(
    x: Any, *, int64_vocabulary: Sequence[int] | None = None, string_vocabulary: Sequence[str] | None = None
) -> Any:
    """The value of each word of the vocabulary [1, words], 0 (or an empty string) where the dict lacks it."""
    values = [np.asarray(value) for value in x.values()]
    dtype = values[0].dtype if values else np.dtype(np.float32)
    text = dtype.kind in "OUST"
    row = [x.get(word, "" if text else 0) for word in string_vocabulary or int64_vocabulary or ()]
    return np.array(row, object if text else dtype).reshape(1, -1)


@op("ZipMap", domain=DOMAIN, host=(0,), on_host=True)
def zip_map(
    x: Any, *, classlabels_int64s: Sequence[int] | None = None, classlabels_strings: Sequence[str] | None = None
) -> Any:
    """A dict a row, from label to value."""
    labels, rows = list(classlabels_strings or classlabels_int64s or ()), np.atleast_2d(x)
    if rows.shape[1] != len(labels):
        raise ValueError(f"there are {len(labels)} labels for {rows.shape[1]} columns")
    return [dict(zip(labels, row, strict=True)) for row in rows.tolist()]
