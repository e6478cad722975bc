"""The one import of mlx.core, and the device that a Runtime runs on."""

from __future__ import annotations

import os

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # float32 means float32; MLX reads it once, at start

import mlx.core as mx

from lut4tool.errors import Lut4Error


class BackendError(Lut4Error):
    """A device that this machine or this MLX does not have."""


def device(name: str = "auto") -> mx.Device:
    """Return the MLX device for "auto", "metal", "cuda" or "cpu"; raise BackendError where it is not there."""
    gpu = mx.Device(mx.gpu)
    has = {"metal": mx.metal.is_available(), "cuda": mx.cuda.is_available()}
    has_gpu = mx.is_available(gpu)
    if name == "cpu" or (name == "auto" and not has_gpu):
        return mx.Device(mx.cpu)
    if name == "auto" or (has_gpu and has.get(name, False)):
        return gpu
    raise BackendError(f"device {name!r} is not available here; use auto, cpu, metal or cuda")
