"""Boxes and regions (onnx/defs/object_detection, and MaxRoiPool): on the host, where their sizes depend on values."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from lut4tool.runtime.dtypes import to_device, to_numpy
from lut4tool.runtime.ops.compute import finish, working
from lut4tool.runtime.registry import op


def _corners(boxes: np.ndarray, centred: int) -> np.ndarray:
    """Boxes [n, 4] as (low, low, high, high), from any two opposite corners or from centre, width and height."""
    if centred:
        half = boxes[:, 2:] / 2
        return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)
    return np.concatenate([np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])], axis=1)


def _overlap(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union of one box with others [n, 4]; 0 where the union is nothing."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = np.prod(np.maximum(sides, 0), axis=1)
    union = np.prod(box[2:] - box[:2]) + np.prod(others[:, 2:] - others[:, :2], axis=1) - common
    return np.where(union > 0, common / np.where(union > 0, union, 1), 0)


@op("NonMaxSuppression", since=10, host=(0, 1, 2, 3, 4), on_host=True)
def non_max_suppression(
    boxes: Any, scores: Any, max_output_boxes_per_class: Any = None, iou_threshold: Any = None,
    score_threshold: Any = None, *, center_point_box: int = 0,
) -> Any:  # fmt: skip
    """Rows (batch, class, box), int64, by falling score; a box that overlaps a kept one too much is dropped."""
    most = 0 if max_output_boxes_per_class is None else int(max_output_boxes_per_class.reshape(()))
    overlap = 0.0 if iou_threshold is None else float(iou_threshold.reshape(()))
    rows = []
    for batch, label in np.ndindex(*scores.shape[:2]):
        score, corners = scores[batch, label], _corners(boxes[batch], center_point_box)
        left = np.argsort(-score, kind="stable")
        if score_threshold is not None:
            left = left[score[left] > score_threshold.reshape(())]
        kept = 0
        while left.size and kept < most:
            best, left, kept = left[0], left[1:], kept + 1
            rows.append((batch, label, best))
            left = left[_overlap(corners[best], corners[left]) <= overlap]
    return to_device(np.array(rows, np.int64).reshape(-1, 3))


def _taps(at: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Two pixels and their weights for each coordinate of one axis; more than a pixel outside weighs nothing."""
    inside = (at >= -1) & (at <= length)
    at = np.clip(at, 0, length - 1)
    low = np.floor(at).astype(np.int64)
    high = np.minimum(low + 1, length - 1)
    return low, high, (1 - (at - low)) * inside, (at - low) * inside


@op("RoiAlign", since=16, host=(1, 2), on_host=True)
def roi_align(
    x: Any, rois: Any, batch_indices: Any, *, coordinate_transformation_mode: str = "half_pixel", mode: str = "avg",
    output_height: int = 1, output_width: int = 1, sampling_ratio: int = 0, spatial_scale: float = 1.0,
) -> Any:  # fmt: skip
    """Bilinear samples of each cell of each region, averaged; `max` takes the largest weighed corner."""
    _, data = working(x)
    data = to_numpy(data)
    if ((batch_indices < 0) | (batch_indices >= data.shape[0])).any():
        raise ValueError(f"RoiAlign's batch_indices lie outside a batch of {data.shape[0]}")
    shift = 0.5 if coordinate_transformation_mode == "half_pixel" else 0.0
    y = np.zeros((len(rois), data.shape[1], output_height, output_width), data.dtype)
    for row, (roi, batch) in enumerate(
        zip(rois.astype(data.dtype) * spatial_scale - shift, batch_indices, strict=True)
    ):
        axes, counts = [], []
        for start, end, cells, length in (
            (roi[1], roi[3], output_height, data.shape[2]), (roi[0], roi[2], output_width, data.shape[3]),
        ):  # fmt: skip
            span = end - start if shift else max(end - start, 1.0)
            count = sampling_ratio if sampling_ratio > 0 else ceil(span / cells)
            samples = (np.arange(max(count, 0)) + 0.5) / max(count, 1)
            axes.append(_taps((start + (np.arange(cells)[:, None] + samples) * span / cells).reshape(-1), length))
            counts.append(max(count, 0))
        if 0 in counts:
            continue
        (top, bottom, w_top, w_bottom), (left, right, w_left, w_right) = axes
        corners = [
            data[batch][:, rows[:, None], columns] * (by_row[:, None] * by_column)
            for rows, by_row in ((top, w_top), (bottom, w_bottom))
            for columns, by_column in ((left, w_left), (right, w_right))
        ]
        value = sum(corners) if mode == "avg" else np.maximum.reduce(corners)
        value = value.reshape(-1, output_height, counts[0], output_width, counts[1])
        y[row] = value.mean((2, 4)) if mode == "avg" else value.max((2, 4))
    return finish(y, x)


@op("RoiAlign", since=10, until=15, host=(1, 2), on_host=True)
def roi_align_before_16(
    x: Any, rois: Any, batch_indices: Any, *, mode: str = "avg", output_height: int = 1, output_width: int = 1,
    sampling_ratio: int = 0, spatial_scale: float = 1.0,
) -> Any:  # fmt: skip
    """The same without the half-pixel shift."""
    return roi_align(
        x, rois, batch_indices, coordinate_transformation_mode="output_half_pixel", mode=mode,
        output_height=output_height, output_width=output_width, sampling_ratio=sampling_ratio,
        spatial_scale=spatial_scale,
    )  # fmt: skip


@op("MaxRoiPool", host=(1,), on_host=True)
def max_roi_pool(x: Any, rois: Any, *, pooled_shape: Sequence[int], spatial_scale: float = 1.0) -> Any:
    """The largest pixel of each cell of each region (batch, x1, y1, x2, y2), both ends rounded and included."""
    _, data = working(x)
    data = to_numpy(data)
    y = np.zeros((len(rois), data.shape[1], *pooled_shape), data.dtype)
    for row, roi in enumerate(rois):
        x1, y1, x2, y2 = np.floor(roi[1:] * np.float32(spatial_scale) + 0.5).astype(int)
        spans = [(y1, y2, pooled_shape[0], data.shape[2]), (x1, x2, pooled_shape[1], data.shape[3])]
        edges = []
        for start, end, cells, length in spans:
            step = max(end - start + 1, 1) / cells
            cell = np.arange(cells)
            low, high = start + np.floor(cell * step), start + np.ceil((cell + 1) * step)
            edges.append(np.clip(np.stack([low, high], 1), 0, length).astype(int))
        for i, j in np.ndindex(*pooled_shape):
            part = data[int(roi[0]), :, slice(*edges[0][i]), slice(*edges[1][j])]
            if part.size:
                y[row, :, i, j] = part.max((1, 2))
    return finish(y, x)
