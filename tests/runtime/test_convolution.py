"""The native convolutions, pools and stages against their definitions in float64, in every instruction set."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from lut4tool.runtime import convolution
from lut4tool.runtime.convolution import Kernels, Stage
from lut4tool.runtime.ops.conv import PreparedTranspose
from lut4tool.runtime.ops.window import views, window

pytestmark = pytest.mark.skipif(not convolution.available(), reason="no native library was compiled")

SETS = convolution._NATIVE.conv_sets() if convolution.available() else []


@pytest.fixture(params=SETS)
def instructions(request):
    """Each instruction set of this machine in its turn."""
    usual = convolution._NATIVE.conv_set()
    convolution._NATIVE.use_conv_set(request.param)
    yield request.param
    convolution._NATIVE.use_conv_set(usual)


def floats(random, *shape):
    array = random.standard_normal(shape).astype(np.float32)
    array.setflags(write=False)
    return array


def convolved(x, w, bias, strides, dilations, before, out, group):
    """The definition, in float64."""
    spans = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in zip(out, strides, w.shape[2:], dilations, strict=True)]
    sides = [(b, max(0, span - n - b)) for b, span, n in zip(before, spans, x.shape[2:], strict=True)]
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *sides])
    rows, columns = padded.strides[2:]
    seen = np.lib.stride_tricks.as_strided(
        padded,
        (*x.shape[:2], *w.shape[2:], *out),
        (*padded.strides[:2], rows * dilations[0], columns * dilations[1], rows * strides[0], columns * strides[1]),
    )
    seen = seen.reshape(x.shape[0], group, -1, *seen.shape[2:])
    taps = w.astype(np.float64).reshape(group, w.shape[0] // group, *w.shape[1:])
    return np.einsum("ngdpqij,gmdpq->ngmij", seen, taps).reshape(x.shape[0], -1, *out) + bias.reshape(-1, 1, 1)


GEOMETRY = [
    ((1, 1), (1, 1), (0, 0)), ((1, 1), (1, 1), (1, 1)), ((2, 1), (1, 2), (1, 3)), ((3, 2), (2, 1), (4, 0)),
    ((2, 2), (1, 1), (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("size", [(1, 9), (7, 7), (5, 30), (1, 700)])
@pytest.mark.parametrize(
    ("group", "depth", "count"), [(1, 1, 3), (1, 5, 40), (2, 16, 1), (8, 1, 2), (3, 2, 40), (1, 40, 130), (16, 1, 1)]
)
def test_convolutions(instructions, group, depth, count, size, batch):
    random = np.random.default_rng(1)
    x = floats(random, batch, group * depth, *size)
    for kernel, (strides, dilations, before) in itertools.product([(1, 1), (3, 2), (1, 5), (3, 3)], GEOMETRY):
        w, bias = floats(random, group * count, depth, *kernel), floats(random, group * count)
        spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        room = [n + b + 1 - span for n, b, span in zip(size, before, spans, strict=True)]  # one zero after
        out = tuple(max(0, r) // s + 1 for r, s in zip(room, strides, strict=True))
        found = Kernels(w, bias, group)(x, (*strides, *dilations, *before), out)
        wanted = convolved(x, w, bias, strides, dilations, before, out, group)
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize(("channels", "count", "size"), [(64, 64, (56, 56)), (256, 70, (14, 14)), (20, 8, (160, 131))])
def test_convolutions_in_several_pieces(instructions, channels, count, size):
    """Large enough for two threads, and for lines and images in parts."""
    random = np.random.default_rng(2)
    x, bias = floats(random, 1, channels, *size), floats(random, count)
    for kernel, stride in itertools.product([1, 3], [1, 2]):
        w = floats(random, count, channels, kernel, kernel) / np.float32(channels**0.5)
        before = kernel // 2
        out = tuple((n + 2 * before - kernel) // stride + 1 for n in size)
        found = Kernels(w, bias, 1)(x, (stride, stride, 1, 1, before, before), out)
        wanted = convolved(x, w, bias, (stride, stride), (1, 1), (before, before), out, 1)
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_convolutions_along_one_axis():
    random = np.random.default_rng(3)
    x, w, bias = floats(random, 2, 6, 100), floats(random, 4, 3, 5), floats(random, 4)
    found = convolution.conv(x, w, bias, (2, 3, 4), (47,), 2)
    wanted = convolved(x[:, :, None], w[:, :, None], bias, (1, 2), (1, 3), (0, 4), (1, 47), 2)[:, :, 0]
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_every_stage():
    random = np.random.default_rng(4)
    x, other, plane = floats(random, 2, 3, 5, 700), floats(random, 2, 3, 5, 700), floats(random, 2, 3, 1, 1)
    scale, shift = floats(random, 3), floats(random, 3)
    wide, channel = x.astype(np.float64), (slice(None), None, None)
    cases = [
        ([Stage("affine", 2, -1)], [], 2 * wide - 1),
        ([Stage("channel_affine", scale=scale, shift=shift)], [], wide * scale[channel] + shift[channel]),
        ([Stage("clip", -0.5, 0.25)], [], np.clip(wide, -0.5, 0.25)),
        ([Stage("leaky", 0.1)], [], np.where(wide < 0, 0.1 * wide, wide)),
        ([Stage("sigmoid")], [], sigmoid(wide)),
        ([Stage("tanh")], [], np.tanh(wide)),
        ([Stage("erf")], [], np.vectorize(math.erf)(wide)),
        ([Stage("save"), Stage("sigmoid"), Stage("mul_saved")], [], wide * sigmoid(wide)),
        ([Stage("save"), Stage("tanh"), Stage("add_saved")], [], wide + np.tanh(wide)),
        ([Stage("mul_operand"), Stage("add_operand")], [plane, other], wide * plane + other),
        ([Stage("add_operand"), Stage("mul_operand")], [plane, other], (wide + plane) * other),
    ]
    for steps, operands, wanted in cases:
        program = convolution.stages(steps)
        found = convolution.apply(program, x, operands, (2, 3, 3500))
        assert np.abs(found - wanted).max() <= 1e-6 * max(1, np.abs(wanted).max())
        kernels = Kernels(np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1), None, 1)
        after = kernels.place(x.shape, (1, 1, 1, 1, 0, 0), (5, 700))(x, program, operands)
        assert np.abs(after - wanted).max() <= 1e-6 * max(1, np.abs(wanted).max())
    vectors = floats(random, 700), floats(random, 700)
    program = convolution.stages([Stage("point_affine", scale=vectors[0], shift=vectors[1])])
    assert np.allclose(convolution.apply(program, x, [], (1, 30, 700)), x * vectors[0] + vectors[1], atol=1e-6)


def test_stages_keep_what_is_not_a_number():
    x = np.array([np.nan, np.inf, -np.inf, -1, 1], np.float32)
    for step in (Stage("clip", 0, np.inf), Stage("leaky", 0.1), Stage("sigmoid"), Stage("tanh")):
        found = convolution.apply(convolution.stages([step]), x, [], (1, 1, 5))
        assert np.isnan(found).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("steps", "operands"),
    [
        ([Stage("add_operand")], []),
        ([], [np.zeros(4, np.float32)]),
        ([Stage("add_operand")], [np.zeros(3, np.float32)]),
        ([Stage("channel_affine", scale=np.ones(3, np.float32), shift=np.ones(3, np.float32))], []),
        ([Stage("point_affine", scale=np.ones(3, np.float32), shift=np.ones(3, np.float32))], []),
    ],
)
def test_stages_that_do_not_fit_are_refused(steps, operands):
    with pytest.raises(ValueError, match=r"do not fit|a value an element"):
        convolution.apply(convolution.stages(steps), np.zeros((1, 2, 2), np.float32), operands, (1, 2, 2))


def test_stages_that_say_nothing_are_refused():
    for steps in ([Stage("mul_saved")], [Stage("cube")], [Stage("channel_affine")]):
        with pytest.raises(ValueError, match=r"saved|no such stage|do not fit"):
            convolution.stages(steps)


@pytest.mark.parametrize("size", [(1, 9), (7, 7), (12, 70)])
@pytest.mark.parametrize(
    ("kernel", "strides", "dilations"), [((3, 3), (2, 2), (1, 1)), ((1, 2), (1, 3), (1, 2)), ((5, 5), (1, 1), (1, 1))]
)
@pytest.mark.parametrize("maximum", [True, False])
def test_pools(size, kernel, strides, dilations, maximum):
    x = np.array(floats(np.random.default_rng(5), 2, 3, *size))
    x[0, 0, 0, 3] = np.nan
    pads = [k // 2 for k in kernel] * 2
    grid = window(size, kernel, strides, dilations, pads, ceil_mode=1)
    around = [(0, 0), (0, 0), *zip(grid.before, grid.after, strict=True)]
    seen = views(np.pad(x, around, constant_values=-np.inf if maximum else 0), grid)
    geometry = (*kernel, *strides, *dilations, *grid.before)
    found = convolution.pool(x, geometry, grid.out, maximum)
    wanted = seen.max((2, 3)) if maximum else seen.astype(np.float64).sum((2, 3))
    assert np.allclose(found, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_weights_that_decayed():
    """Far below the others they count as 0; a kernel of nothing else keeps them."""
    random = np.random.default_rng(6)
    x, w = np.abs(floats(random, 1, 40, 5, 5)), np.array(floats(random, 8, 40, 1, 1))
    w[3], w[:, 7] = 1e-39, 1e-33
    kept, geometry = np.abs(w) >= 2.0**-100, (1, 1, 1, 1, 0, 0)
    wanted = convolved(x, w * kept, np.zeros(8), (1, 1), (1, 1), (0, 0), (5, 5), 1)
    found = Kernels(w, None, 1)(x, geometry, (5, 5))
    assert not found[0, 3].any()
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    small = np.full((8, 40, 1, 1), 1e-38, np.float32)
    assert np.allclose(Kernels(small, None, 1)(x, geometry, (5, 5)), 1e-38 * x.sum(1, keepdims=True), rtol=1e-5, atol=0)


def transposed(x, w, bias, strides, before, out, group):
    """The definition, in float64: each kernel position is added where it writes."""
    batch, rank = x.shape[0], x.ndim - 2
    spread = [(n - 1) * s + k for n, s, k in zip(x.shape[2:], strides, w.shape[2:], strict=True)]
    room = [max(n, b + o) for n, b, o in zip(spread, before, out, strict=True)]
    y = np.zeros((batch, group, w.shape[1], *room))
    seen = x.astype(np.float64).reshape(batch, group, -1, *x.shape[2:])
    taps = w.astype(np.float64).reshape(group, -1, *w.shape[1:])
    for position in np.ndindex(*w.shape[2:]):
        places = tuple(slice(p, p + (n - 1) * s + 1, s) for p, n, s in zip(position, x.shape[2:], strides, strict=True))
        y[(..., *places)] += np.einsum("ngc...,gcm->ngm...", seen, taps[(..., *position)])
    cut = tuple(slice(b, b + o) for b, o in zip(before, out, strict=True))
    return y.reshape(batch, -1, *room)[(..., *cut)] + bias.reshape(-1, *[1] * rank)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("kernel", [(1,), (3,), (8,), (1, 4), (3, 3), (2, 5)])
def test_transposed_convolutions(kernel, group):
    random, rank = np.random.default_rng(7), len(kernel)
    x, w, bias = floats(random, 2, 4, *[6, 5][:rank]), floats(random, 4, 3, *kernel), floats(random, 3 * group)
    for strides, pads, extra in itertools.product([(1, 2), (3, 1), (2, 4)], [(0, 0), (1, 2)], [(0, 0), (0, 1)]):
        strides, before, after, extra = strides[-rank:], pads[:1] * rank, pads[1:] * rank, extra[-rank:]
        given = {"strides": strides, "pads": (*before, *after), "output_padding": extra, "group": group}
        sizes = zip(x.shape[2:], strides, kernel, before, after, extra, strict=True)
        out = tuple((n - 1) * s + k - b - a + e for n, s, k, b, a, e in sizes)
        if min(out) > 0:
            found = PreparedTranspose(w, bias, given)(x)
            wanted = transposed(x, w, bias, strides, before, out, group)
            assert found.shape == wanted.shape
            assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_what_is_not_finite_stays_where_the_taps_reach():
    random = np.random.default_rng(5)
    x, w = np.array(floats(random, 1, 2, 4, 4)), floats(random, 2, 3, 2, 2)
    wanted, x[0, 1, 2, 2] = np.ones((1, 3, 11, 11), bool), np.inf
    wanted[:, :, 6:8, 6:8] = False
    found = PreparedTranspose(w, None, {"strides": (3, 3)})(x, w)
    assert (np.isfinite(found) == wanted).all()


def test_convolutions_of_nothing_but_padding():
    x, w, bias = np.zeros((2, 3, 0, 4), np.float32), np.ones((5, 3, 3, 3), np.float32), np.arange(5, dtype=np.float32)
    found = Kernels(w, bias, 1)(x, (1, 1, 1, 1, 2, 1), (2, 4))
    assert (found == bias.reshape(-1, 1, 1)).all()


def test_one_switch_forces_every_instruction_set():
    program = "from lut4tool.native import _native; print(_native.conv_set(), _native.product_instruction_set())"
    for name in SETS:
        environment = {**os.environ, "LUT4TOOL_CPU_ISA": name}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [name, name]
