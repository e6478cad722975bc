"""Fourier transforms and the mel scale (onnx/defs/math); the window functions run as the standard's function bodies."""

from __future__ import annotations

from typing import Any

import numpy as np

from lut4tool.runtime.dtypes import BY_NUMBER, to_device
from lut4tool.runtime.ops.compute import finish, working
from lut4tool.runtime.registry import op


def _complex(values: Any) -> Any:
    """The last axis, of 1 or 2, read as a real or a complex number."""
    return values[..., 0] if values.shape[-1] == 1 else values[..., 0] + 1j * values[..., 1]


def _parts(xp: Any, values: Any) -> Any:
    return xp.stack([values.real, values.imag], axis=-1)


def _transform(x: Any, length: Any, axis: int, inverse: int, onesided: int) -> Any:
    """DFT along an axis of x [..., 1 or 2], cut or padded to `length`; onesided keeps or takes half of the spectrum."""
    xp, data = working(x)
    size = None if length is None else int(length.reshape(-1)[0])
    axis += x.ndim if axis < 0 else 0
    name = ("i" if inverse else "") + ("rfft" if onesided else "fft")
    signal = data[..., 0] if onesided and not inverse else _complex(data)
    found = getattr(xp.fft, name)(signal, n=size, axis=axis)
    return finish(found[..., None] if name == "irfft" else _parts(xp, found), x)


@op("DFT", until=19, host=(1,))
def dft_attribute(x: Any, dft_length: Any = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0) -> Any:
    """The axis as an attribute."""
    return _transform(x, dft_length, axis, inverse, onesided)


@op("DFT", since=20, host=(1, 2))
def dft(x: Any, dft_length: Any = None, axis: Any = None, *, inverse: int = 0, onesided: int = 0) -> Any:
    """The axis as an input, the last signal axis by default."""
    return _transform(x, dft_length, -2 if axis is None else int(axis.reshape(-1)[0]), inverse, onesided)


@op("STFT", host=(1, 3))
def stft(signal: Any, frame_step: Any, window: Any = None, frame_length: Any = None, *, onesided: int = 1) -> Any:
    """DFT of each windowed frame: [batch, frames, bins, 2] from [batch, length, 1 or 2]."""
    xp, data, weights = working(signal, window)
    step = int(frame_step.reshape(-1)[0])
    if frame_length is not None:
        size = int(frame_length.reshape(-1)[0])
    else:
        size = signal.shape[1] if window is None else window.shape[0]
    starts = np.arange(0, signal.shape[1] - size + 1, step)
    frames = _complex(data)[:, xp.array(starts[:, None] + np.arange(size))]  # [batch, frames, size]
    if weights is not None:
        frames = frames * weights
    found = xp.fft.fft(frames, axis=-1)
    return finish(_parts(xp, found[..., : size // 2 + 1] if onesided else found), signal)


@op("MelWeightMatrix", host=(0, 1, 2, 3, 4), on_host=True)
def mel_weight_matrix(
    num_mel_bins: Any, dft_length: Any, sample_rate: Any, lower_edge_hertz: Any, upper_edge_hertz: Any,
    *, output_datatype: int = 1,
) -> Any:  # fmt: skip
    """Triangles [dft_length / 2 + 1, num_mel_bins] with a peak of 1, their edges equally far apart in mel."""
    bands, points = int(num_mel_bins), int(dft_length)
    low, high = (2595 * np.log10(1 + float(edge) / 700) for edge in (lower_edge_hertz, upper_edge_hertz))
    mel = low + np.arange(bands + 2) * (high - low) / (bands + 2)
    edges = ((points + 1) * 700 * (10 ** (mel / 2595) - 1) // int(sample_rate)).astype(np.int64)
    bins, start, peak, end = np.arange(points // 2 + 1)[:, None], edges[:-2], edges[1:-1], edges[2:]
    rising = np.where(peak > start, (bins - start) / np.maximum(peak - start, 1), bins == peak)
    falling = (end - bins) / np.maximum(end - peak, 1)
    weights = np.where((bins >= start) & (bins <= peak), rising, np.where((bins > peak) & (bins < end), falling, 0))
    return to_device(weights.astype(BY_NUMBER[output_datatype].numpy))
