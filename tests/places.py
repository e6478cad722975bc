"""Where the heavy operators compute: each test of one runs in NumPy, as on a CPU, and in MLX, as on a GPU."""

from __future__ import annotations

import pytest

from lut4tool.runtime import dtypes
from lut4tool.runtime.backend import mx


@pytest.fixture(params=["numpy", "mlx"])
def place(request, monkeypatch):
    """Compute where the parameter says, on this machine's CPU either way."""
    if request.param == "mlx":
        monkeypatch.setattr(dtypes, "HOST", mx.gpu)
    return request.param
