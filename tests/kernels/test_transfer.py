"""Arrays go to a GPU in pieces, whole and without a second copy; the map of their file leaves the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lut4tool.kernels import transfer
from lut4tool.kernels.transfer import copied, copied_floats, floats
from tests.products import DTYPES, lookup4, qmm


@pytest.mark.parametrize("shape", [(), (0,), (1,), (1000,), (10, 100), (3, 0, 5), (1, 7, 30), (2, 500)], ids=str)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64, np.bool_])
def test_what_is_copied(shape: tuple[int, ...], dtype: Any, monkeypatch: Any) -> None:
    values = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    kind = mx.array(np.zeros(1, dtype)).dtype
    for piece in (64, 1000, 64 << 20):
        monkeypatch.setattr(transfer, "PIECE", piece)
        copy = np.array(copied(values, kind))
        assert copy.dtype == values.dtype
        np.testing.assert_array_equal(copy, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_become_float32(dtype: str, monkeypatch: Any) -> None:
    values = np.linspace(-3, 3, 1001).astype(DTYPES[dtype])
    monkeypatch.setattr(transfer, "PIECE", 64)
    monkeypatch.setattr(transfer, "FLOATS", 10)
    np.testing.assert_array_equal(np.array(copied_floats(values)), values.astype(np.float32))
    parts = list(floats(values))
    assert [len(part) for part in parts] == [10] * 100 + [1]
    np.testing.assert_array_equal(np.concatenate(parts), values.astype(np.float32))


def resident(path: Path) -> int:
    """Bytes of a file's maps that are in this process's memory."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and name == "Rss:":
            total += int(rest.split()[0]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads Linux's account of the memory")
def test_a_file_is_never_whole_in_memory_and_nothing_is_twice_on_the_device(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "weights"
    np.random.default_rng(0).integers(0, 256, 24 << 20, dtype=np.uint8).tofile(path)
    mapped, most, array = np.memmap(path, np.uint8, "r"), 0, mx.array

    def watched(*arguments: Any) -> mx.array:
        nonlocal most
        copy = array(*arguments)
        most = max(most, resident(path))
        return copy

    monkeypatch.setattr(transfer, "PIECE", 1 << 20)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with monkeypatch.context() as patch:
        patch.setattr(transfer.mx, "array", watched)
        whole = copied(mapped, mx.uint8)
    assert 0 < most <= 4 << 20  # the kernel maps pages around those that are read
    assert mx.get_peak_memory() - before <= 27 << 20
    np.testing.assert_array_equal(np.array(whole), mapped)


@pytest.mark.parametrize("rows", [32, 33, 1, 37])
def test_metal_takes_whole_loads_of_any_weight(rows: int, monkeypatch: Any) -> None:
    """Pieces and, past the last byte, zeros up to a whole load."""
    from lut4tool.kernels.metal.weights import LOAD_BYTES, on_device

    monkeypatch.setattr(transfer, "PIECE", 100)
    for weight in (lookup4(rows, 50, 16), qmm(rows, 66, 6, scales_dtype=DTYPES["bfloat16"])):
        arrays = on_device(weight).arrays
        found = np.array(arrays.packed.view(mx.uint8))
        assert found.size % LOAD_BYTES == 0
        np.testing.assert_array_equal(found[: weight.packed.size], weight.packed.reshape(-1))
        assert not found[weight.packed.size :].any()
        scales = np.array(arrays.scales.astype(mx.float32))[: weight.scales.size]
        np.testing.assert_array_equal(scales, weight.scales.reshape(-1).astype(np.float32))
