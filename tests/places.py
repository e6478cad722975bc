"""Where the heavy operators compute: each test of one runs in NumPy, as on a CPU, and in MLX, as on a GPU."""

from __future__ import annotations

import pytest

from lut4tool.runtime.ops import compute


@pytest.fixture(params=["numpy", "mlx"])
def place(request, monkeypatch):
    """Compute where the parameter says, on this machine's CPU either way."""
    if request.param == "mlx":
        monkeypatch.setattr(compute, "on_host", lambda: False)
    return request.param
