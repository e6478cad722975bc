"""Threads on one Runtime, processes on one file, and thousands of runs: equal results, whole files, flat memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from build import Chain, build_many
from lut4tool.rewrite import rewrite
from lut4tool.runtime.session import Runtime


def stack(seed: int = 0) -> onnx.ModelProto:
    """Two products, rows of x left open."""
    chains = [
        Chain(rows=64, cols=64, block=32, perm="written", prefix=f"c{index}/", seed=seed + index) for index in range(2)
    ]
    model = build_many(chains).model
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    return model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(stack(), tmp_path / "in.onnx")


def write(model: onnx.ModelProto, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=64)
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def weights(path: Path) -> set[bytes]:
    """The packed bytes and scales of a model, literals and the codebook left out."""
    arrays = [numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer]
    return {array.tobytes() for array in arrays if array.nbytes > 64}


@pytest.mark.parametrize("rewritten", [False, True])
def test_threads_on_one_runtime(source: Path, rewritten: bool) -> None:
    if rewritten:
        rewrite(source, source)
    runtime, random = Runtime(source, "cpu"), np.random.default_rng(0)
    feeds = [{"x": random.standard_normal((rows, 64), np.float32)} for rows in (1, 2, 3, 5, 8, 13, 21, 34)]
    expected = [runtime.run(None, feed) for feed in feeds]
    assert all(str(choice) for choice in runtime.kernels.values())
    assert len(runtime.kernels) == (2 if rewritten else 0)

    def work(first: int) -> list[bool]:
        places = [(first + step) % len(feeds) for step in range(60)]
        return [
            all(
                np.array_equal(one, other)
                for one, other in zip(runtime.run(None, feeds[at]), expected[at], strict=True)
            )
            for at in places
        ]

    with ThreadPoolExecutor(8) as pool:
        assert all(all(same) for same in pool.map(work, range(8)))


def in_children(works: list[Callable[[], object]]) -> list[int]:
    """Run each in a fork, all at once; their exit statuses."""
    children = []
    for work in works:
        child = os.fork()
        if child == 0:
            try:
                work()
                os._exit(0)
            except BaseException:  # noqa: BLE001 - pytest's own process must not come back twice
                os._exit(1)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_processes_that_rewrite_one_model(source: Path, tmp_path: Path) -> None:
    """To a file each in the same folder, and all to one file in another, three times."""
    before = files(tmp_path)
    outs = [tmp_path / f"out{index}.onnx" for index in range(8)]
    assert in_children([lambda out=out: rewrite(source, out) for out in outs]) == [0] * 8
    rewrite(source, tmp_path / "alone.onnx")
    alone = (tmp_path / "alone.onnx").read_bytes()
    assert files(tmp_path) == before | {out.name: alone for out in [*outs, tmp_path / "alone.onnx"]}

    folder = tmp_path / "b"
    folder.mkdir()
    for _ in range(3):
        assert in_children([lambda: rewrite(source, folder / "out.onnx", force=True)] * 8) == [0] * 8
        assert files(folder) == {"out.onnx": alone, "w.bin": before["w.bin"]}


def test_two_models_to_one_file(tmp_path: Path) -> None:
    """One wins whole, with its own data; the other's data may stay, and nothing else."""
    sources = [write(stack(seed), tmp_path / f"m{seed}" / "in.onnx") for seed in (0, 50)]
    wanted = [weights(source) for source in sources]
    assert [len(tensors) for tensors in wanted] == [4, 4]
    (tmp_path / "b").mkdir()
    out = tmp_path / "b" / "out.onnx"
    for _ in range(4):
        assert in_children([lambda source=source: rewrite(source, out, force=True) for source in sources]) == [0, 0]
        assert weights(out) in wanted
        assert files(tmp_path / "b").keys() <= {"out.onnx", "w.bin", "w-1.bin"}


SOAK = """
import json, os, sys
import numpy as np
from lut4tool.runtime.session import Runtime

def state():
    lines = open("/proc/self/status").read().splitlines()
    anonymous = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    return anonymous, len(os.listdir("/proc/self/fd"))

runtime, random, count = Runtime(sys.argv[1], "cpu"), np.random.default_rng(0), int(sys.argv[2])
states = []
for number in range(count):
    rows = int(random.integers(1, 200))
    (y, *_) = runtime.run(None, {"x": np.ones((rows, 64), np.float32)})
    assert y.shape == (rows, 64)
    if number % (count // 10) == count // 10 - 1:
        states.append(state())
print(json.dumps({"states": states, "kernels": [str(choice) for choice in runtime.kernels.values()]}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell anonymous memory")
@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rewritten", [False, True])
def test_memory_and_files_stay_flat_over_many_runs(source: Path, count: int, rewritten: bool) -> None:
    """Shapes change at each run."""
    if rewritten:
        rewrite(source, source)
    command = [sys.executable, "-c", SOAK, source, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    kilobytes, descriptors = zip(*said["states"], strict=True)
    assert max(kilobytes[5:]) - max(kilobytes[:5]) < 2048, kilobytes
    assert set(descriptors) == {descriptors[0]}
    assert len(said["kernels"]) == (2 if rewritten else 0)
