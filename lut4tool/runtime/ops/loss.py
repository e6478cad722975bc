"""Classification losses (onnx/defs/math)."""

from __future__ import annotations

from typing import Any

import numpy as np

from lut4tool.runtime.dtypes import to_numpy
from lut4tool.runtime.ops.compute import finish, working
from lut4tool.runtime.ops.indexing import checked
from lut4tool.runtime.ops.math import log_softmax
from lut4tool.runtime.registry import op


def _loss(scores: Any, target: Any, weight: Any, ignore_index: int | None, reduction: str) -> Any:
    """-weight[target] * scores[n, target, ...], ignored targets weighing 0; the mean divides by the weights' sum."""
    xp, logs, factors = working(scores, weight)
    classes = to_numpy(target)
    counted = classes != ignore_index if ignore_index is not None else np.ones(classes.shape, np.bool_)
    if weight is not None and tuple(weight.shape) != (scores.shape[1],):
        raise ValueError(f"weight has shape {list(weight.shape)}; there are {scores.shape[1]} classes")
    index = xp.array(checked(np.where(counted, classes, 0), scores.shape[1]))
    kept = xp.array(counted).astype(logs.dtype)
    weights = kept if factors is None else xp.take(factors, index) * kept
    losses = -xp.take_along_axis(logs, xp.expand_dims(index, 1), axis=1).squeeze(1) * weights
    if reduction == "mean":
        losses = losses.sum() / weights.sum()
    return finish(losses.sum() if reduction == "sum" else losses, scores)


@op("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(
    x: Any, target: Any, weight: Any = None, *, ignore_index: int | None = None, reduction: str = "mean"
) -> Any:
    """Of log probabilities [N, C, ...] and classes [N, ...]; a class out of range is an error."""
    return _loss(x, target, weight, ignore_index, reduction)


@op("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(
    scores: Any, labels: Any, weights: Any = None, *, ignore_index: int | None = None, reduction: str = "mean"
) -> Any:
    """The same of scores [N, C, ...]; the log probabilities are the second output."""
    logarithms = log_softmax(scores, 1)
    return _loss(logarithms, labels, weights, ignore_index, reduction), logarithms
