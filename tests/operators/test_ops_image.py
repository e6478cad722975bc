"""Resize, samplers and boxes: onnx's own node tests of images and boxes, then the options against onnxruntime.

The node tests of Resize, GridSample and the others of onnx/defs/tensor are in test_ops_tensor.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from backend_cases import against_onnxruntime, cases, check, single
from places import place  # noqa: F401 - a fixture

from lut4tool.runtime.session import Runtime

pytestmark = pytest.mark.usefixtures("place")

RNG = np.random.default_rng(5)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def sizes(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("case", cases("image", "object_detection"))
def test_node(case):
    check(case)


COORDINATES = ["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"]
SCALES = [(1, 1, 2, 3), (1, 1, 0.5, 0.6), (1, 1, 1.7, 1), (1, 1, 0.25, 2.5)]


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("scales", SCALES, ids=str)
def test_resize_by_scales(mode, coordinates, scales):
    inputs = [floats(1, 2, 8, 10), None, np.array(scales, np.float32)]
    against_onnxruntime(
        "Resize", 19, inputs, rtol=1e-4, atol=1e-4, mode=mode, coordinate_transformation_mode=coordinates
    )


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("size", [(1, 2, 16, 5), (1, 2, 3, 10), (1, 2, 1, 1), (1, 2, 9, 23)], ids=str)
def test_resize_by_sizes(mode, coordinates, size):
    inputs = [floats(1, 2, 8, 10), None, None, sizes(*size)]
    against_onnxruntime(
        "Resize", 19, inputs, rtol=1e-4, atol=1e-4, mode=mode, coordinate_transformation_mode=coordinates
    )


@pytest.mark.parametrize("nearest", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("size", [(1, 1, 7, 20), (1, 1, 16, 5)], ids=str)
def test_resize_nearest_modes(nearest, coordinates, size):
    inputs = [floats(1, 1, 8, 10), None, None, sizes(*size)]
    against_onnxruntime(
        "Resize", 13, inputs, mode="nearest", nearest_mode=nearest, coordinate_transformation_mode=coordinates
    )


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("scales", [(1, 1, 0.5, 0.6), (1, 1, 0.3, 2), (1, 1, 1.5, 1.5)], ids=str)
def test_resize_antialias(mode, scales):
    inputs = [floats(1, 2, 12, 11), None, np.array(scales, np.float32)]
    against_onnxruntime("Resize", 19, inputs, rtol=1e-4, atol=1e-4, mode=mode, antialias=1, exclude_outside=1)


@pytest.mark.parametrize("a", [-0.5, -0.75])
@pytest.mark.parametrize("exclude", [0, 1])
def test_resize_cubic_options(a, exclude):
    inputs = [floats(1, 2, 6, 7), None, np.array([1, 1, 1.5, 0.7], np.float32)]
    against_onnxruntime(
        "Resize", 13, inputs, rtol=1e-4, atol=1e-4, mode="cubic", cubic_coeff_a=a, exclude_outside=exclude
    )


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("roi", [(0, 0, 0.2, 0.3, 1, 1, 0.7, 0.9), (0, 0, -0.2, 0.5, 1, 1, 1.3, 1.2)], ids=str)
def test_resize_crops(mode, roi):
    inputs = [floats(1, 2, 8, 9), np.array(roi, np.float32), None, sizes(1, 2, 5, 6)]
    against_onnxruntime(
        "Resize", 13, inputs, rtol=1e-4, atol=1e-5, mode=mode, coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=9.0,
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["stretch", "not_larger", "not_smaller"])
@pytest.mark.parametrize("axes", [[2, 3], [3, 2]], ids=str)
def test_resize_keeps_the_aspect_ratio(policy, axes):
    inputs = [floats(1, 2, 8, 10), None, None, sizes(13, 7)]
    against_onnxruntime(
        "Resize", 18, inputs, rtol=1e-4, atol=1e-5, mode="linear", axes=axes, keep_aspect_ratio_policy=policy
    )


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scales", [(1, 1, 2, 2), (1, 1, 1.5, 3)], ids=str)
def test_upsample_and_the_first_resize(mode, scales):
    x, factors = floats(1, 2, 4, 5), np.array(scales, np.float32)
    against_onnxruntime("Upsample", 7, [x], rtol=1e-5, atol=1e-6, mode=mode, scales=[float(scale) for scale in scales])
    against_onnxruntime("Upsample", 9, [x, factors], rtol=1e-5, atol=1e-6, mode=mode)
    against_onnxruntime("Resize", 10, [x, factors], rtol=1e-5, atol=1e-6, mode=mode)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_resize_of_integers(dtype):
    x = RNG.integers(0, 100, (1, 1, 6, 7)).astype(dtype)
    against_onnxruntime("Resize", 13, [x, None, None, sizes(1, 1, 9, 4)], mode="nearest")


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_of_other_ranks(rank, mode):
    x = floats(1, 2, *range(4, 4 + rank))
    against_onnxruntime(
        "Resize", 13, [x, None, np.array([1, 1, *[1.5] * rank], np.float32)], rtol=1e-4, atol=1e-5, mode=mode
    )


@pytest.mark.parametrize("version", [16, 20])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [0, 1])
def test_grid_sample(version, mode, padding, align):
    name = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode) if version == 16 else mode
    grid = RNG.uniform(-2.2, 2.2, (2, 5, 6, 2)).astype(np.float32)
    against_onnxruntime(
        "GridSample",
        version,
        [floats(2, 3, 7, 8), grid],
        rtol=1e-3,
        atol=1e-4,
        mode=name,
        padding_mode=padding,
        align_corners=align,
    )


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample_of_volumes(mode, padding):
    grid = RNG.uniform(-1.5, 1.5, (1, 3, 4, 2, 3)).astype(np.float32)
    against_onnxruntime(
        "GridSample", 20, [floats(1, 2, 4, 5, 6), grid], rtol=1e-4, atol=1e-5, mode=mode, padding_mode=padding
    )


def test_grid_sample_outside_by_far_and_at_nothing_reads_inside():
    """Infinite and NaN coordinates index no memory outside the image."""
    grid = np.array([[[[np.inf, 0], [-np.inf, np.nan], [1e30, -1e30], [0, 0]]]], np.float32)
    x = np.ones((1, 1, 3, 3), np.float32)
    for padding in ("zeros", "border", "reflection"):
        (y,) = Runtime(single("GridSample", 20, [x, grid], {"padding_mode": padding}, 1)).run(
            None, {"x0": x, "x1": grid}
        )
        assert y.shape == (1, 1, 1, 4)
        assert y[0, 0, 0, 3] == 1


@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 4, 5, 6)], ids=str)
def test_affine_grid(align, size):
    rank = len(size) - 2
    against_onnxruntime(
        "AffineGrid", 20, [floats(2, rank, rank + 1), sizes(*size)], rtol=1e-4, atol=1e-5, align_corners=align
    )


@pytest.mark.parametrize(
    "options", [{}, {"strides": [2, 1], "pads": [1, 0, 1, 2]}, {"dilations": [2, 1], "strides": [1, 2]}], ids=str
)
def test_col2im(options):
    (pads, strides, dilations) = (
        options.get(k, d) for k, d in (("pads", [0] * 4), ("strides", [1, 1]), ("dilations", [1, 1]))
    )
    windows = 1
    for axis, (length, kernel) in enumerate(((6, 2), (7, 3))):
        windows *= (length + pads[axis] + pads[axis + 2] - dilations[axis] * (kernel - 1) - 1) // strides[axis] + 1
    against_onnxruntime(
        "Col2Im", 18, [floats(2, 3 * 6, windows), sizes(6, 7), sizes(2, 3)], rtol=1e-5, atol=1e-6, **options
    )


@pytest.mark.parametrize("version", [10, 16])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align(version, mode, ratio):
    rois = np.array([[0, 0, 6, 6], [1.3, 2.2, 7.9, 4.1], [-2, -1, 3, 12], [3, 3, 3.2, 3.1]], np.float32)
    against_onnxruntime(
        "RoiAlign", version, [floats(2, 3, 8, 9), rois, sizes(0, 1, 0, 1)], rtol=1e-4, atol=1e-5, mode=mode,
        sampling_ratio=ratio, output_height=2, output_width=3, spatial_scale=0.9,
    )  # fmt: skip


@pytest.mark.parametrize("version", [10, 11])
@pytest.mark.parametrize("centre", [0, 1])
@pytest.mark.parametrize("score", [None, 0.4])
@pytest.mark.parametrize("most", [0, 2, 50])
def test_non_max_suppression(version, centre, score, most):
    boxes = np.abs(floats(2, 20, 4)) + (np.array([0, 0, 1, 1], np.float32) if not centre else np.float32(0.1))
    scores = RNG.random((2, 3, 20)).astype(np.float32)
    limits = [
        np.array([most], np.int64),
        np.array([0.3], np.float32),
        None if score is None else np.array([score], np.float32),
    ]
    against_onnxruntime("NonMaxSuppression", version, [boxes, scores, *limits], center_point_box=centre)
