"""Kills, full and read-only disks, inputs that change: IN, an old OUT and its data stay whole, nothing is left over."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from build import Chain, build_many
from lut4tool import storage
from lut4tool.produce import quantize_file
from lut4tool.rewrite import place, rewrite, save
from lut4tool.storage import StorageError

RUN = [sys.executable, "-m", "lut4tool.cli", "rewrite"]


def write_external(model: onnx.ModelProto, path: Path, location: str = "w.bin", padding: int = 0) -> Path:
    """Write a model whose larger initializers are in one file, which ends with so many bytes more."""
    path.parent.mkdir(exist_ok=True, parents=True)
    onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=64)
    with (path.parent / location).open("ab") as data:
        data.write(random.Random(0).randbytes(padding))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def model(seed: int = 0) -> onnx.ModelProto:
    chains = [Chain(rows=64, cols=64, block=32, prefix=f"c{index}/", seed=seed + index) for index in range(2)]
    return build_many(chains).model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_external(model(), tmp_path / "root" / "m" / "in.onnx", padding=100_000)


# Killed

#: Where OUT is, seen from IN's folder, and whether an old OUT with other data is there.
TARGETS = [("out.onnx", True), ("in.onnx", False), ("../b/out.onnx", False), ("../b/out.onnx", True)]
PHASE = {save.__file__, place.__file__, storage.__file__}


def in_child(work: Callable[[], None]) -> int:
    """Run in a fork; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - pytest's own process must not come back twice
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(line: int, source: Path, target: Path) -> int:
    """Rewrite in a fork that is killed at the line-th line that saving executes."""
    left = line

    def tracer(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in PHASE:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return tracer

    def work() -> None:
        original = save.save

        def traced(*arguments: Any) -> Any:
            sys.settrace(tracer)
            return original(*arguments)

        import lut4tool.rewrite

        lut4tool.rewrite.save_model = traced
        rewrite(source, target, force=True)

    return in_child(work)


def prepare(source: Path, target: str, old: bool) -> tuple[Path, dict[str, bytes], dict[str, bytes]]:
    """OUT, the files before, and those that a whole rewrite leaves."""
    root = source.parent.parent
    (root / "b").mkdir(exist_ok=True)
    out = Path(os.path.normpath(source.parent / target))
    if old:
        write_external(model(seed=7), out, "w.bin" if out.parent != source.parent else "old.bin")
    before = files(root)
    whole = root.with_name("whole")
    shutil.copytree(root, whole)
    rewrite(whole / source.relative_to(root), whole / out.relative_to(root), force=True)
    after = files(whole)
    return out, before, after


def check_whole(root: Path, out: Path, before: dict[str, bytes], after: dict[str, bytes]) -> None:
    """After a kill: every old file whole, OUT old or new, and new data only where OUT is."""
    now, name = files(root), str(out.relative_to(root))
    assert {key: now.get(key) for key in before if key != name} == {key: before[key] for key in before if key != name}
    assert now.get(name) in (before.get(name), after[name])
    if now.get(name) == after[name]:
        assert {key: now[key] for key in after} == after
    more = {key for key in now if key not in before and key != name}
    assert all(Path(key).parent == out.parent.relative_to(root) for key in more)


@pytest.mark.parametrize(("target", "old"), TARGETS)
def test_a_kill_at_any_line_of_saving(source: Path, tmp_path: Path, target: str, old: bool) -> None:
    """At one of 23 lines (`slow`: of four): files are whole, and the next run leaves no trace of it."""
    kill_at_lines(source, tmp_path, target, old, step=23)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("target", "old"), TARGETS)
def test_a_kill_at_many_lines_of_saving(source: Path, tmp_path: Path, target: str, old: bool) -> None:
    kill_at_lines(source, tmp_path, target, old, step=4)


def kill_at_lines(source: Path, tmp_path: Path, target: str, old: bool, step: int) -> None:
    root = source.parent.parent
    out, before, after = prepare(source, target, old)
    line = 0
    while (status := killed_at(line, source, out)) == -signal.SIGKILL:
        check_whole(root, out, before, after)
        rewrite(source, out, force=True)
        assert files(root) == after, line
        for path in sorted(root.rglob("*"), reverse=True):  # as it was
            if path.is_file() and before.get(str(path.relative_to(root))) != path.read_bytes():
                path.unlink()
        for name, content in before.items():
            if not (root / name).exists():
                (root / name).write_bytes(content)
        line += step
    assert status == 0
    assert line > 60  # it was killed at all of them


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_command_killed_at_random_moments(tmp_path: Path, count: int) -> None:
    """The whole command, with 40 MB to copy: from its start to a little after its end."""
    source = write_external(model(), tmp_path / "root" / "m" / "in.onnx", padding=40_000_000)
    out, before, after = prepare(source, "../b/out.onnx", old=True)
    root, moments = tmp_path / "root", random.Random(count)
    begin = time.monotonic()
    subprocess.run([*RUN, source, tmp_path / "root" / "b" / "other.onnx"], check=True, capture_output=True)
    seconds = time.monotonic() - begin
    for path in (root / "b").glob("other*"):
        path.unlink()
    killed = 0
    for _ in range(count):
        process = subprocess.Popen([*RUN, source, out, "--force"], stdout=subprocess.DEVNULL)
        time.sleep(moments.uniform(0, 1.1 * seconds))
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        check_whole(root, out, before, after)
    assert killed > count / 3
    rewrite(source, out, force=True)
    assert files(root) == after


def test_temporary_files_of_others_stay(source: Path) -> None:
    ours, others = ".out.onnx.0123456789ab.lut4tool", [".out.onnx.0123456789ab.tmp", "x.lut4tool", ".x.01.lut4tool"]
    for name in (ours, *others):
        (source.parent / name).write_bytes(b"x")
    rewrite(source, source.parent / "out.onnx")
    assert files(source.parent).keys() == {"in.onnx", "out.onnx", "w.bin", *others}


# Disks


def in_namespace(script: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script that may mount: what it mounts goes with it."""
    if shutil.which("unshare") is None:
        pytest.skip("mounting a file system for one process needs Linux's unshare")
    command = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--user", "--map-root-user"])]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody unshare mounts")
    environment = {**os.environ, "LUT4TOOL": " ".join(RUN)}
    return subprocess.run(
        [*command, "sh", "-euc", script, "sh", *map(str, arguments)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("kilobytes", [4, 60, 104])
def test_a_full_disk(source: Path, tmp_path: Path, kilobytes: int) -> None:
    """Full while data is copied, or the model is written: one sentence, and an old OUT with its data stays."""
    full = tmp_path / "full"
    full.mkdir()
    script = """
        mount -t tmpfs -o size=1m tmpfs "$2"
        echo old > "$2/out.onnx"; echo data > "$2/w.bin"
        head -c $((1048576 - 8192 - $3 * 1024)) /dev/zero > "$2/filling"
        status=0; $LUT4TOOL "$1" "$2/out.onnx" --force || status=$?
        ls -A "$2"; cat "$2/out.onnx" "$2/w.bin"; exit $status
    """
    done = in_namespace(script, source, full, Path(str(kilobytes)))
    size = storage.size_text(sum(map(len, files(source.parent).values())))
    assert done.returncode == 1, (done.stdout, size)
    assert done.stdout.split() == ["filling", "out.onnx", "w.bin", "old", "data"]
    assert "no space left" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_read_only_disk(source: Path, tmp_path: Path) -> None:
    """A model on one is rewritten to elsewhere, data and all; nothing is written there."""
    (tmp_path / "root" / "b").mkdir()
    script = """
        mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"
        $LUT4TOOL "$1/in.onnx" "$2/out.onnx"
        status=0; $LUT4TOOL "$1/in.onnx" "$1/out.onnx" || status=$?
        exit $status
    """
    before = files(source.parent)
    done = in_namespace(script, source.parent, tmp_path / "root" / "b")
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    assert "read-only file system" in done.stderr
    assert files(source.parent) == before
    assert files(tmp_path / "root" / "b").keys() == {"out.onnx", "w.bin"}


# Inputs that change

#: After the first weight was read; when the data is copied.
FIRST, COPY = ("weights", 1), ("copying weights", 0)
MOMENTS = [(FIRST, "../b/out.onnx"), (COPY, "../b/out.onnx"), (FIRST, "out.onnx")]


@pytest.mark.parametrize("change", ["cut", "written", "removed", "model"])
@pytest.mark.parametrize(("moment", "target"), MOMENTS)
def test_an_input_that_changes_meanwhile(source: Path, moment: tuple[str, int], target: str, change: str) -> None:
    out, before, _ = prepare(source, target, old=True)
    data = source.parent / "w.bin"

    def harm(what: str, done: int, total: int) -> None:
        if (what, done) != moment:
            return
        if change == "model":
            source.write_bytes(source.read_bytes() + b"\x0a\x01x")
        elif change == "removed":
            data.unlink(missing_ok=True)
        else:
            content = data.read_bytes()
            data.write_bytes(content[:50] if change == "cut" else content[:-1] + b"\xff" + content[-1:])

    with pytest.raises(StorageError, match=r"w\.bin|in\.onnx changed"):
        rewrite(source, out, force=True, progress=harm)
    harmed = {str(path.relative_to(source.parent.parent)) for path in (source, data)}
    now = files(source.parent.parent)
    assert {name: content for name, content in now.items() if name not in harmed} == {
        name: content for name, content in before.items() if name not in harmed
    }


# Names


@pytest.mark.parametrize("external", [False, True])
def test_an_out_that_is_a_link_to_in_is_in_place(tmp_path: Path, external: bool) -> None:
    source, link = tmp_path / "in.onnx", tmp_path / "out.onnx"
    if external:
        write_external(model(), source)
    else:
        onnx.save(model(), source)
    link.symlink_to("in.onnx")
    rewrite(source, link)
    assert link.is_symlink()
    assert {node.op_type for node in onnx.load(source).graph.node} == {"Lookup4MatMul"}


def test_an_out_that_is_a_link_stays_one(source: Path) -> None:
    """What it leads to is replaced, which needs force; data goes beside the link, where readers look for it."""
    root = source.parent.parent
    for name in ("real", "b"):
        (root / name).mkdir()
    (root / "real" / "blob").write_bytes(b"old")
    link = root / "b" / "out.onnx"
    link.symlink_to("../real/blob")
    with pytest.raises(save.RewriteError, match="exists"):
        rewrite(source, link)
    rewrite(source, link, force=True)
    assert link.is_symlink()
    assert files(root / "real").keys() == {"blob"}
    assert files(root / "b").keys() == {"out.onnx", "w.bin"}
    assert {node.op_type for node in onnx.load(link).graph.node} == {"Lookup4MatMul"}
    dangling = root / "b" / "new.onnx"
    dangling.symlink_to("../real/new")
    rewrite(source, dangling)
    assert dangling.is_symlink()
    assert (root / "real" / "new").is_file()


def test_repeating_it_leaves_one_copy_of_the_data(source: Path) -> None:
    out = source.parent.parent / "b" / "out.onnx"
    out.parent.mkdir()
    for _ in range(3):
        rewrite(source, out, force=True)
        assert files(out.parent).keys() == {"out.onnx", "w.bin"}
    with (source.parent / "w.bin").open("ab") as data:
        data.write(b"more")
    notes = rewrite(source, out, force=True).notes
    assert files(out.parent).keys() == {"out.onnx", "w.bin", "w-1.bin"}  # the old one may serve another model
    assert "copied as 'w-1.bin'" in notes[0]


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_equal_bytes_behind_a_link_do_not_serve(source: Path, kind: str) -> None:
    """Runtimes refuse such data."""
    out = source.parent.parent / "b" / "out.onnx"
    out.parent.mkdir()
    if kind == "hard":
        os.link(source.parent / "w.bin", out.parent / "w.bin")
    else:
        (out.parent / "w.bin").symlink_to("../m/w.bin")
    rewrite(source, out)
    assert (out.parent / "w-1.bin").read_bytes() == (source.parent / "w.bin").read_bytes()
    onnx.load(out)


def test_quantize_copies_what_is_used(tmp_path: Path) -> None:
    """A large weight becomes codes, so its floats stay behind; what is kept has the same bytes."""
    weights = {"w": np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)}
    weights |= {"bias": np.arange(512, dtype=np.float32), "again": np.arange(512, dtype=np.float32) / 3}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "bias"], ["q"]),
        helper.make_node("Mul", ["q", "again"], ["y"]),
    ]  # fmt: skip
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("x", 256), ("y", 512))
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    source = write_external(proto, tmp_path / "a" / "in.onnx")
    (tmp_path / "b").mkdir()
    report = quantize_file(source, tmp_path / "b" / "out.onnx")
    assert len(report.quantized) == 1
    assert (tmp_path / "b" / "w.bin").stat().st_size < 6000
    made = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in onnx.load(tmp_path / "b" / "out.onnx").graph.initializer
    }
    for name in ("bias", "again"):
        assert np.array_equal(made[name], weights[name])
