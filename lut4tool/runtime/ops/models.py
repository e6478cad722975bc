"""Linear models and support vector machines (onnx/defs/traditionalml), on the host in float64."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from lut4tool.runtime.registry import op

DOMAIN = "ai.onnx.ml"
Ints = Sequence[int] | None
Floats = Sequence[float] | None
Strings = Sequence[str] | None


def labels_of(integers: Ints, strings: Strings) -> np.ndarray:
    """Class labels: int64, or strings as objects."""
    return np.array(strings, object) if strings else np.array(integers or [], np.int64)


def transformed(scores: np.ndarray, how: str) -> np.ndarray:
    """NONE, LOGISTIC, PROBIT, or SOFTMAX over each row; SOFTMAX_ZERO leaves exact zeros zero."""
    if how == "NONE":
        return scores
    if how == "LOGISTIC":
        return 1 / (1 + np.exp(-scores))
    if how == "PROBIT":
        return np.vectorize(_probit, otypes=[np.float64])(scores)
    if how not in ("SOFTMAX", "SOFTMAX_ZERO"):
        raise ValueError(f"post_transform is '{how}', not NONE, SOFTMAX, LOGISTIC, SOFTMAX_ZERO or PROBIT")
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    if how == "SOFTMAX_ZERO":
        powers = np.where(scores == 0, 0, powers)
    return powers / powers.sum(axis=1, keepdims=True)


def _probit(share: float) -> float:
    if 0 < share < 1:
        return NormalDist().inv_cdf(share)
    return -np.inf if share == 0 else np.inf if share == 1 else np.nan


def classified(
    scores: np.ndarray, labels: np.ndarray, how: str, reached: Any = True, probabilities: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The label of each row's highest score, of those reached, and the scores [rows, classes] transformed, float32.

    One score for two classes: above 0 it means the second, or above a half where it is a probability.
    """
    if scores.shape[1] > 1 or len(labels) < 2:
        best = np.argmax(np.where(reached, scores, -np.inf), axis=1)
        return labels[best], transformed(scores, how).astype(np.float32)
    best = (scores[:, 0] > (0.5 if probabilities else 0)).astype(int)
    if how == "PROBIT":
        return labels[best], transformed(scores, how).astype(np.float32)
    first = 1 - scores if probabilities and how != "LOGISTIC" else -scores
    both = np.hstack([first, scores])
    return labels[best], (transformed(both, how) if how == "LOGISTIC" else both).astype(np.float32)


@op("LinearClassifier", domain=DOMAIN, host=(0,), on_host=True)
def linear_classifier(
    x: Any, *, classlabels_ints: Ints = None, classlabels_strings: Strings = None, coefficients: Sequence[float],
    intercepts: Floats = None, multi_class: int = 0, post_transform: str = "NONE",
) -> Any:  # fmt: skip
    """A row of coefficients a class; one row for two classes."""
    scores = _affine(x, coefficients, intercepts)
    return classified(scores, labels_of(classlabels_ints, classlabels_strings), post_transform)


@op("LinearRegressor", domain=DOMAIN, host=(0,), on_host=True)
def linear_regressor(
    x: Any, *, coefficients: Floats = None, intercepts: Floats = None, post_transform: str = "NONE", targets: int = 1
) -> Any:
    """A row of coefficients a target."""
    return transformed(_affine(x, coefficients or (), intercepts, targets), post_transform).astype(np.float32)


def _affine(x: np.ndarray, coefficients: Sequence[float], intercepts: Floats, rows: int = -1) -> np.ndarray:
    """Return x [N, F] times coefficients [rows, F] transposed, and the intercepts [rows]."""
    data = _rows(x)
    weights = np.array(coefficients).reshape(rows, data.shape[1])
    return data @ weights.T + (0 if not intercepts else np.array(intercepts))


def _rows(x: np.ndarray) -> np.ndarray:
    return np.atleast_2d(x).astype(np.float64)


def _kernel(x: np.ndarray, vectors: np.ndarray, kind: str, parameters: Floats) -> np.ndarray:
    """Return the kernel of each row [N, F] with each vector [S, F]: [N, S]."""
    gamma, shift, degree = parameters or (0.0, 0.0, 0.0)
    if kind == "RBF":
        return np.exp(-gamma * ((x[:, None] - vectors) ** 2).sum(axis=2))
    product = x @ vectors.T
    if kind == "LINEAR":
        return product
    if kind in ("POLY", "SIGMOID"):
        inner = gamma * product + shift
        return inner**degree if kind == "POLY" else np.tanh(inner)
    raise ValueError(f"kernel_type is '{kind}', not LINEAR, POLY, RBF or SIGMOID")


@op("SVMRegressor", domain=DOMAIN, host=(0,), on_host=True)
def svm_regressor(
    x: Any, *, coefficients: Floats = None, kernel_params: Floats = None, kernel_type: str = "LINEAR",
    n_supports: int = 0, one_class: int = 0, post_transform: str = "NONE", rho: Floats = None,
    support_vectors: Floats = None,
) -> Any:  # fmt: skip
    """Without support vectors, linear; one_class gives 1 or -1."""
    data, weights = _rows(x), np.array(coefficients or ())
    if n_supports:
        vectors = np.array(support_vectors).reshape(n_supports, data.shape[1])
    else:
        vectors, weights = weights.reshape(1, -1), np.ones(1)
    scores = (_kernel(data, vectors, kernel_type, kernel_params) @ weights + (rho or [0.0])[0]).reshape(-1, 1)
    if one_class:
        return np.where(scores > 0, 1, -1).astype(np.float32)
    return transformed(scores, post_transform).astype(np.float32)


@op("SVMClassifier", domain=DOMAIN, host=(0,), on_host=True)
def svm_classifier(
    x: Any, *, classlabels_ints: Ints = None, classlabels_strings: Strings = None, coefficients: Floats = None,
    kernel_params: Floats = None, kernel_type: str = "LINEAR", post_transform: str = "NONE",
    prob_a: Floats = None, prob_b: Floats = None, rho: Floats = None, support_vectors: Floats = None,
    vectors_per_class: Ints = None,
) -> Any:  # fmt: skip
    """One decision a pair of classes, each a vote; prob_a and prob_b couple them to probabilities."""
    labels, data, shifts = labels_of(classlabels_ints, classlabels_strings), _rows(x), np.array(rho or [0.0])
    if not vectors_per_class:
        weights = np.array(coefficients or ()).reshape(len(labels), data.shape[1])
        scores = _kernel(data, weights, kernel_type, kernel_params) + shifts[0]
        return classified(scores, labels, post_transform)
    count, total = len(vectors_per_class), sum(vectors_per_class)
    vectors = np.array(support_vectors).reshape(total, data.shape[1])
    kernel = _kernel(data, vectors, kernel_type, kernel_params)
    weights = np.array(coefficients or ()).reshape(count - 1, total)
    ends = np.cumsum([0, *vectors_per_class])
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    columns = []
    for (i, j), shift in zip(pairs, shifts, strict=True):
        first, second = slice(ends[i], ends[i + 1]), slice(ends[j], ends[j + 1])
        columns.append(kernel[:, first] @ weights[j - 1, first] + kernel[:, second] @ weights[i, second] + shift)
    decisions = np.stack(columns, axis=1)
    votes = np.zeros((len(data), count), int)
    for (i, j), column in zip(pairs, decisions.T, strict=True):
        votes[np.arange(len(data)), np.where(column > 0, i, j)] += 1
    best = labels[np.argmax(votes, axis=1)]
    if prob_a:
        scores = _coupled(decisions, pairs, count, np.array(prob_a), np.array(prob_b))
        return best, transformed(scores, post_transform).astype(np.float32)
    return best, classified(decisions, labels, post_transform)[1] if count == 2 else transformed(
        decisions, post_transform
    ).astype(np.float32)


def _coupled(
    decisions: np.ndarray, pairs: Sequence[tuple[int, int]], count: int, a: np.ndarray, b: np.ndarray
) -> np.ndarray:
    """Probabilities [N, classes] from pairwise ones (Wu, Lin and Weng 2004, second method, by fixed-point steps)."""
    pairwise = np.zeros((len(decisions), count, count))
    for index, (i, j) in enumerate(pairs):
        chance = np.clip(1 / (1 + np.exp(decisions[:, index] * a[index] + b[index])), 1e-7, 1 - 1e-7)
        pairwise[:, i, j], pairwise[:, j, i] = chance, 1 - chance
    q = -np.swapaxes(pairwise, 1, 2) * pairwise
    diagonal = (np.swapaxes(pairwise, 1, 2) ** 2).sum(axis=2)
    q[:, range(count), range(count)] = diagonal
    # The solution of [Q e; e' 0] [p; t] = [0; 1].
    system = np.zeros((len(decisions), count + 1, count + 1))
    system[:, :count, :count], system[:, :count, count], system[:, count, :count] = q, 1, 1
    wanted = np.zeros((len(decisions), count + 1, 1))
    wanted[:, count] = 1
    return np.linalg.solve(system, wanted)[:, :count, 0]
