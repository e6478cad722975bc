"""Classification losses (onnx/defs/math)."""

from __future__ import annotations

from typing import Any

from lut4tool.runtime.backend import mx
from lut4tool.runtime.dtypes import to_numpy
from lut4tool.runtime.ops.indexing import checked
from lut4tool.runtime.ops.math import log_softmax
from lut4tool.runtime.registry import op


def _loss(scores: Any, target: Any, weight: Any, ignore_index: int | None, reduction: str) -> Any:
    """-weight[target] * scores[n, target, ...], ignored targets weighing 0; the mean divides by the weights' sum."""
    classes = to_numpy(target)
    kept = (
        mx.ones(target.shape, dtype=scores.dtype)
        if ignore_index is None
        else (target != ignore_index).astype(scores.dtype)
    )
    index = mx.array(checked(classes if ignore_index is None else classes * (classes != ignore_index), scores.shape[1]))
    weights = kept if weight is None else mx.take(weight, index) * kept
    losses = -mx.take_along_axis(scores, mx.expand_dims(index, 1), axis=1).squeeze(1) * weights
    if reduction == "none":
        return losses
    return losses.sum() / weights.sum() if reduction == "mean" else losses.sum()


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
