"""Where operators compute: each test of one runs in NumPy, as on a CPU, and in MLX, as on a GPU.

Without a GPU, MLX computes on the CPU; with one, it computes there, whatever device the test asks for.
"""

from __future__ import annotations

import pytest

from lut4tool.runtime import backend, dtypes
from lut4tool.runtime.backend import mx

HAS_GPU = mx.is_available(mx.Device(mx.gpu))


def compute_in(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in "numpy" or "mlx" until the test is over."""
    if HAS_GPU:
        device = mx.Device(mx.gpu if place == "mlx" else mx.cpu)
        monkeypatch.setattr(backend, "device", lambda name="auto": device)
    elif place == "mlx":
        monkeypatch.setattr(dtypes, "HOST", mx.gpu)


@pytest.fixture(params=["numpy", "mlx"])
def place(request, monkeypatch):
    """Compute where the parameter says."""
    compute_in(request.param, monkeypatch)
    return request.param
