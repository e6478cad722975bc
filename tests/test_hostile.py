"""Hostile and damaged models and data: each is refused in a sentence, in a moment, by every command."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import TensorProto

from lut4tool import native
from lut4tool.storage import StorageError, Tensors

UNSIGNED = TensorProto.UINT8


def external(place: str, size: int, **entries: int | str) -> TensorProto:
    tensor = TensorProto(name="w", data_type=UNSIGNED, dims=[size], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": place, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


@pytest.mark.skipif(not native.compiled(), reason="the handler of lost pages is compiled")
def test_a_file_that_is_cut_while_it_is_mapped_is_an_error_and_no_crash(tmp_path: Path) -> None:
    data = tmp_path / "w.bin"
    data.write_bytes(b"\x01" * (1 << 20))
    tensors = Tensors(tmp_path)
    array = tensors.array(external("w.bin", 1 << 20))
    tensors.check_unchanged()
    with data.open("r+b") as file:
        file.truncate(5000)
    assert array[:5000].tolist() == [1] * 5000
    assert array[-1] == 0  # its page is gone
    with pytest.raises(StorageError, match=r"w\.bin was cut while it was read"):
        tensors.check_whole()


@pytest.mark.parametrize("change", ["written", "replaced", "removed"])
def test_a_file_that_changes_while_it_is_mapped_is_noticed(tmp_path: Path, change: str) -> None:
    data, other = tmp_path / "w.bin", tmp_path / "other.bin"
    data.write_bytes(b"\x01" * 100)
    tensors = Tensors(tmp_path)
    tensors.array(external("w.bin", 100))
    tensors.check_unchanged()
    if change == "written":
        data.write_bytes(b"\x02" * 100)
    elif change == "replaced":
        other.write_bytes(b"\x01" * 101)
        other.rename(data)
    else:
        data.unlink()
    tensors.check_whole()
    with pytest.raises(StorageError, match=r"w\.bin changed while it was read"):
        tensors.check_unchanged()


@pytest.mark.skipif(not native.compiled(), reason="the handler of lost pages is compiled")
def test_a_bus_error_elsewhere_still_ends_the_process(tmp_path: Path) -> None:
    """The handler serves our maps only, also after one of ours was lost."""
    (tmp_path / "w.bin").write_bytes(b"\x01" * 8192)
    script = (
        "import os, sys, numpy as np\n"
        "from lut4tool import native\n"
        "ours, theirs = (np.memmap(sys.argv[1], np.uint8, 'r') for _ in range(2))\n"
        "watch = native.Watch(ours)\n"
        "os.truncate(sys.argv[1], 0)\n"
        "print(ours[0], watch.lost, flush=True)\n"
        "print(theirs[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "w.bin"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "0 True\n"
    assert done.returncode == -signal.SIGBUS, done.stderr
