"""Hostile and damaged models and data: each is refused in a sentence, in a moment, by every command."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hostile import CASES, COMMANDS, LIMIT, product, run, tensor
from onnx import TensorProto

from build import build
from lut4tool import native
from lut4tool.rewrite import rewrite
from lut4tool.runtime.graph import RunError
from lut4tool.runtime.running import read_feeds
from lut4tool.runtime.session import Runtime
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


@pytest.mark.skipif(not native.compiled(), reason="the handler of lost pages is compiled")
def test_weights_that_are_cut_under_a_runtime_are_an_error_of_the_run(tmp_path: Path) -> None:
    built = build(rows=64, cols=64, block=32)
    onnx.save(built.model, tmp_path / "in.onnx", save_as_external_data=True, location="w.bin", size_threshold=64)
    rewrite(tmp_path / "in.onnx", tmp_path / "in.onnx")
    with (tmp_path / "w.bin").open("ab") as data:  # packed on another page than the end
        data.write(bytes(1 << 16))
    runtime = Runtime(tmp_path / "in.onnx", "cpu")
    (y, *_) = runtime.run(None, built.feeds)
    assert np.abs(y - built.expected).max() < 1e-4
    with (tmp_path / "w.bin").open("r+b") as data:
        data.truncate(0)
    with pytest.raises(StorageError, match=r"w\.bin was cut while it was read"):
        runtime.run(None, built.feeds)


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


#: Those of more than a few seconds.
SLOW = ("functions_that_call_two_with_a_chain",)
#: Megabytes of a process that reads all these models, of up to 18 MB, one after the other, imports included.
PEAK = 700


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What each command said of each model; all of them in one process."""
    return ask(tmp_path_factory.mktemp("hostile"), [name for name in CASES if name not in SLOW])


def ask(folder: Path, names: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    command = [sys.executable, Path(__file__).parents[1] / "hostile.py", folder, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    return {(line["case"], line["command"]): line for line in lines if "status" in line}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_hostile_model_is_served_or_refused_in_words(said: dict[tuple[str, str], Any], command: str) -> None:
    for (name, title), answer in said.items():
        if title == command:
            check(name, answer)
            assert answer["peak"] < PEAK, name


def check(name: str, answer: dict[str, Any]) -> None:
    last = (answer["stderr"].splitlines() or [""])[-1]
    assert answer["status"] in (0, 1, 3), (name, answer)
    assert "internal error" not in last, (name, last)
    assert "Traceback" not in answer["stderr"], name
    assert answer["status"] != 1 or last.startswith("lut4tool: "), (name, last)
    assert "\x1b" not in answer["stderr"], name  # a name does not steer the terminal
    assert answer["seconds"] < LIMIT, name


#: A sentence for each kind of harm: what is refused is this, not something before it.
SENTENCES = {
    ("dims 1099511627776x1099511627776", "run"): "which no array can have",
    ("external dims 0x4611686018427387904x4611686018427387904", "run"): "which no array can have",
    ("place offset -5", "run"): "offset -5",
    ("place offset 2^70", "run"): "ends at byte",
    ("place absolute", "run"): "absolute path",
    ("place parent", "run"): "leads outside the model's folder",
    ("place link", "run"): "leads outside the model's folder",
    ("place link to a device", "run"): "leads outside the model's folder",
    ("place pipe", "run"): "not a regular file",
    ("place its own model", "run"): "ends at byte",
    ("sparse index too large", "run"): "is no array",
    ("cycle", "run"): "has a cycle",
    ("a_name_twice", "run"): "defined twice",
    ("graphs_ten_thousand_deep", "inspect"): "not an ONNX model",
    ("100,000 attributes", "run"): "has 100000 attributes; at most 1000 are read",
    ("functions_that_call_two", "run"): "more than 65536 nodes",
    ("a_function_that_calls_itself", "run"): "calls itself",
    ("a_name_that_is_not_utf_8", "rewrite"): "is not UTF-8",
    ("random_bytes", "quantize"): "not an ONNX model",
    ("an axis that its caller gives as a text", "run"): "that its function's caller gives as str",
    ("a body that its caller gives as a number", "run"): "that its function's caller gives as int",
    ("a permutation that its caller gives as a graph", "run"): "that its function's caller gives as Graph",
}


@pytest.mark.parametrize(("name", "command"), SENTENCES)
def test_what_is_refused_is_the_harm(said: dict[tuple[str, str], Any], name: str, command: str) -> None:
    assert SENTENCES[name, command] in said[name, command]["stderr"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_large_hostile_model(tmp_path: Path, name: str) -> None:
    for answer in ask(tmp_path, [name]).values():
        check(name, answer)
        assert answer["peak"] < PEAK


# Places

#: What stands where a file is expected.
ODD = ["pipe", "socket", "circle", "folder", "missing/file"]
LINES = {
    "inspect": ["inspect", "ODD"],
    "rewrite": ["rewrite", "ODD", "out.onnx", "--force"],
    "rewrite to it": ["rewrite", "in.onnx", "ODD", "--force"],
    "report": ["rewrite", "in.onnx", "out.onnx", "--force", "--report", "ODD.json"],
    "run": ["run", "ODD", "--random"],
    "inputs": ["run", "in.onnx", "--inputs", "ODD"],
    "an input": ["run", "in.onnx", "-i", "x=ODD.npy"],
    "outputs": ["run", "in.onnx", "--random", "--outputs", "ODD.npz"],
    "expected": ["run", "in.onnx", "--random", "--expected", "ODD"],
    "trace": ["run", "in.onnx", "--random", "--profile", "ODD.json"],
    "quantize": ["quantize", "ODD", "out.onnx", "--force"],
    "quantize to it": ["quantize", "float.onnx", "ODD", "--force"],
    "codebook": ["quantize", "float.onnx", "out.onnx", "--force", "--codebook", "ODD"],
    "expand": ["expand", "ODD", "out.onnx", "--force"],
    "bench": ["bench", "ODD", "--seconds", "0.01"],
}  # fmt: skip


@pytest.mark.parametrize("title", LINES)
def test_a_place_that_is_no_file_is_refused_in_words(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(build().model, "in.onnx")
    onnx.save(product(tensor([6, 64], raw=np.ones(384, np.float32).tobytes())), "float.onnx")
    for suffix in ("", ".json", ".npz", ".npy"):
        os.mkfifo(f"pipe{suffix}")
        Path(f"folder{suffix}").mkdir()
        Path(f"circle{suffix}").symlink_to(f"circle{suffix}")
        socket.socket(socket.AF_UNIX).bind(f"socket{suffix}")
    before = {path.name for path in Path().iterdir()}
    for odd in ODD:
        answer = run([word.replace("ODD", odd) for word in LINES[title]])
        if answer["status"] == 2:
            assert "does not exist" in answer["stderr"] or "codebook" in answer["stderr"]
            continue
        check(f"{title} {odd}", answer)
        assert answer["status"] == 1 or odd == "circle", (odd, answer)  # a link that leads nowhere may be replaced
    assert {path.name for path in Path().iterdir()} - {"out.onnx"} == before


# Inputs in files


class Harmful:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_arrays_are_read_without_pickle(tmp_path: Path, suffix: str) -> None:
    trace, file = tmp_path / "trace", tmp_path / f"x.{suffix}"
    harmful = np.array([Harmful(trace)], object)
    if suffix == "npy":
        np.save(file, harmful, allow_pickle=True)
    else:
        np.savez(file, x=harmful)
    with pytest.raises(RunError, match=r"plain arrays|holds objects"):
        read_feeds([f"x={file}" if suffix == "npy" else str(file)], [])
    assert not trace.exists()
    np.load(file, allow_pickle=True)["x" if suffix == "npz" else 0]
    assert trace.exists()  # it would have


@pytest.mark.parametrize(
    "shape", ["(1099511627776, 1099511627776)", "(-1,)", "(9999999999999999999999,)", "('x',)", "[3]", "(3,"]
)
def test_an_array_file_whose_header_lies(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(12)
    (tmp_path / "x.npy").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", content)
    for given in (f"x={tmp_path / 'x.npy'}", str(tmp_path / "x.npz")):
        with pytest.raises(RunError, match=r"x\.np[yz]"):
            read_feeds([given], [])
