"""What every command has in common: one JSON document whatever happens, examples that run, output that is cut short."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from commanding import runner
from onnx import TensorProto, helper, numpy_helper
from typer.main import get_command

from build import build
from lut4tool import cli

COMMANDS = get_command(cli.app).commands  # type: ignore[attr-defined]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


def process(*words: object, text: str = "", **options: Any) -> Done:
    """A command in a process of its own, through a shell."""
    program = [sys.executable, "-m", "lut4tool.cli", *map(str, words)]
    done = subprocess.run(["sh", "-c", '"$@"' + text, "sh", *program], capture_output=True, text=True, **options)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """A command in this process."""
    run = runner(monkeypatch, capsys)
    return lambda *words: Done(*run(*words))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a model of one chain, what `rewrite` makes of it, and its float model."""
    monkeypatch.chdir(tmp_path)
    built = build(rows=64, cols=64, block=32)
    onnx.save(built.model, "model.onnx")
    np.savez("x.npz", **built.feeds)
    weight = numpy_helper.from_array(np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32), "w")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 64]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "float.onnx")
    return tmp_path


# -- errors are documents too

ERRORS = [
    (["inspect", "none.onnx"], 1, "StorageError", "cannot read none.onnx: no such file or directory"),
    (["rewrite", "model.onnx", "float.onnx"], 1, "RewriteError", "--force replaces it"),
    (["rewrite", "model.onnx", "no/out.onnx"], 1, "RewriteError", "the folder no does not exist"),
    (["expand", "none.onnx", "out.onnx"], 1, "StorageError", "none.onnx"),
    (["run", "float.onnx"], 1, "RunError", "input 'x' is missing"),
    (["run", "float.onnx", "--random", "--device", "tpu"], 2, "BadParameter", "'tpu' is not one of"),
    (["quantize", "float.onnx", "out.onnx", "--block-size", "3"], 2, "BadParameter", "even and at least 2, not 3"),
    (["bench", "float.onnx"], 1, "BenchError", "the model has no 4-bit product"),
    (["demo", "--dir", "float.onnx"], 1, "FileExistsError", "float.onnx: file exists"),
    (["selftest", "--device", "tpu"], 2, "BadParameter", "tpu"),
    (["inspect"], 2, "MissingParameter", "MODEL"),
    (["run", "float.onnx", "--nope"], 2, "NoSuchOption", "--nope"),
    (["run", "float.onnx", "--repeat", "x"], 2, "BadParameter", "--repeat"),
    (["run", "float.onnx", "--dim", "n=1"], 2, "BadParameter", "--random draws"),
    (["nope"], 2, "UsageError", "nope"),
]


@pytest.mark.parametrize(("words", "status", "kind", "part"), ERRORS, ids=lambda value: str(value)[:40])
def test_an_error_is_one_document_and_a_sentence(
    folder: Path, command: Command, words: list[str], status: int, kind: str, part: str
) -> None:
    done = command(*words, "--json")
    document = json.loads(done.stdout)
    assert list(document) == ["error"]
    assert {key: document["error"][key] for key in ("kind", "exit")} == {"kind": kind, "exit": done.returncode}
    assert done.returncode == status
    assert part in document["error"]["message"]
    assert "\n" not in document["error"]["message"]
    if status == 1:
        assert done.stderr == f"lut4tool: {document['error']['message']}\n"
    else:
        assert part in " ".join(done.stderr.replace("│", " ").split())
    assert command(*words).stdout == ""


def test_an_interrupt_is_a_document_too(folder: Path) -> None:
    program = """if True:
        import os, signal, sys
        from lut4tool import cli
        from lut4tool.recognize import summary
        summary.summarize = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
        sys.argv = ["lut4tool", "inspect", "model.onnx", "--json"]
        cli.main()
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = {"kind": "KeyboardInterrupt", "message": "interrupted", "exit": 130}
    assert (done.returncode, json.loads(done.stdout)) == (130, {"error": said})


def test_numbers_that_json_lacks_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    cli._print_json({"a": [math.nan, {"b": math.inf}], "c": (1.5, None, "NaN")})
    assert json.loads(capsys.readouterr().out) == {"a": [None, {"b": None}], "c": [1.5, None, "NaN"]}


# -- help


def test_every_command_has_an_example() -> None:
    assert all(name in COMMANDS[name].epilog for name in COMMANDS)


@pytest.mark.parametrize("name", [name for name in sorted(COMMANDS) if name != "demo"])
def test_examples_are_true(folder: Path, command: Command, name: str) -> None:
    """As printed, but for the sizes of `bench`, which would take a minute; `demo` has tests of its own."""
    assert command("rewrite", "model.onnx", "small.onnx").returncode == 0
    words = shlex.split(COMMANDS[name].epilog.removeprefix("Example: lut4tool "))
    if name in ("rewrite", "quantize"):
        words.append("--force")
    if name == "bench":
        words = [word.replace("14336,4096", "96,64") for word in words] + ["--seconds", "0"]
    done = command(*words)
    assert (done.returncode, done.stderr) == (0, "")


# -- weights that are not there


@pytest.mark.parametrize("change", ["gone", "cut"])
def test_inspect_says_which_weights_it_cannot_read(folder: Path, command: Command, change: str) -> None:
    model = onnx.load("model.onnx")
    onnx.save(model, "model.onnx", save_as_external_data=True, location="w é.bin", size_threshold=128)
    whole = json.loads(command("inspect", "model.onnx", "--json").stdout)
    assert whole["unreadable"] == []
    data = Path("w é.bin")
    data.unlink() if change == "gone" else data.write_bytes(data.read_bytes()[:100])
    done = command("inspect", "model.onnx", "--json")
    document = json.loads(done.stdout)
    (missing,) = document.pop("unreadable")
    assert done.returncode == 1
    assert document == {key: value for key, value in whole.items() if key != "unreadable"}  # the rest holds
    sizes = [2048, 512]  # packed and scales
    assert (missing["file"], missing["tensors"], missing["bytes"]) == ("w é.bin", 2, sum(sizes))
    assert ("no such file" if change == "gone" else "ends at byte 2048 of") in missing["reason"]
    assert re.fullmatch(rf"lut4tool: {re.escape(missing['reason'])} \(2 tensors of it, 2.6 KB\); .*\n", done.stderr)
    table = command("inspect", "model.onnx")
    assert (table.returncode, table.stderr) == (1, done.stderr)
    assert "1 found" in table.stdout
    assert command("rewrite", "model.onnx", "out.onnx").returncode == 1


def test_inspect_may_be_told_of_a_folder(folder: Path, command: Command) -> None:
    Path("blobs").mkdir()
    Path("in").mkdir()
    onnx.save(onnx.load("model.onnx"), "in/m.onnx", save_as_external_data=True, location="w.bin", size_threshold=128)
    Path("in/w.bin").rename("blobs/w.bin")
    Path("in/w.bin").symlink_to("../blobs/w.bin")
    assert "leads outside" in command("inspect", "in/m.onnx").stderr
    assert command("inspect", "in/m.onnx", "--allow-external", "blobs").returncode == 0


# -- pipes, terminals and locales


@pytest.mark.parametrize("words", [["ops"], ["ops", "--json"], ["inspect", "model.onnx"], ["--help"]])
def test_a_reader_that_leaves_early_gets_no_traceback(folder: Path, words: list[str]) -> None:
    done = process(*words, text=" | true")
    assert done.stderr == ""


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("words", [["ops", "--json"], ["inspect", "model.onnx"]])
def test_a_full_disk_under_stdout_is_a_line(folder: Path, words: list[str]) -> None:
    done = process(*words, text=" >/dev/full")
    assert done.returncode == 1
    assert done.stderr == "lut4tool: a file, or what this is printed to: no space left on device\n"


def test_names_of_any_kind_in_any_locale(folder: Path) -> None:
    name = "mö del 量.onnx"
    Path("model.onnx").rename(name)
    for environment in ({"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        done = process("rewrite", name, "ö ut.onnx", "--force", env=environment | {"PATH": "/usr/bin:/bin"})
        assert (done.returncode, done.stderr) == (0, "")
        assert Path("ö ut.onnx").is_file()
        done = process("inspect", name, "--json", env=environment | {"PATH": "/usr/bin:/bin"})
        assert len(json.loads(done.stdout)["found"]) == 1


@pytest.mark.parametrize("name", ["rewrite", "quantize", "expand"])
@pytest.mark.parametrize("threshold", [0, 16, 256])
@pytest.mark.parametrize("change", ["gone", "cut"])
def test_data_that_cannot_be_read_is_an_error_and_not_nothing_to_do(
    folder: Path, command: Command, name: str, threshold: int, change: str
) -> None:
    """Also where it is the data of small literals, without which no chain can be proved."""
    options = {"save_as_external_data": True, "location": "w.bin", "size_threshold": threshold}
    onnx.save(onnx.load("model.onnx"), "ext.onnx", **options)
    data = Path("w.bin")
    data.unlink() if change == "gone" else data.write_bytes(data.read_bytes()[:10])
    done = command(name, "ext.onnx", "o.onnx", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert document["error"]["kind"] == "StorageError"
    assert ("no such file" if change == "gone" else "the file is cut") in document["error"]["message"]
    done = command(name, "ext.onnx", "o.onnx")
    assert (done.returncode, done.stdout) == (1, "")
    assert not Path("o.onnx").exists()


def test_sizes_count_the_data_that_moved_to_a_file(folder: Path, command: Command) -> None:
    onnx.save(onnx.load("model.onnx"), "ext.onnx", save_as_external_data=True, location="w.bin", size_threshold=256)
    document = json.loads(command("rewrite", "ext.onnx", "--json", "o.onnx", "--verify").stdout)
    assert (document["input_data_bytes"], document["output_data_bytes"]) == (2560, 2560)  # packed and scales
    said = command("rewrite", "ext.onnx", "o.onnx", "--force").stdout.splitlines()[-1]
    assert re.fullmatch(r"wrote o.onnx: [\d.]+ KB with its data \(was [\d.]+ KB with its data\); weights .*", said)
    total = (Path("o.onnx").stat().st_size + 2560) / 1000
    assert f"{total:.1f} KB with its data (was" in said
    said = command("expand", "o.onnx", "e.onnx").stdout.splitlines()[-1]
    assert re.fullmatch(r"wrote e.onnx: .* KB with its data \(was .* KB with its data\)", said)


def test_a_report_is_a_line_in_python(folder: Path, command: Command) -> None:
    from lut4tool.rewrite import rewrite

    report = rewrite("model.onnx", "o.onnx")
    said = command("rewrite", "model.onnx", "o.onnx", "--force").stdout.splitlines()[-1]
    assert str(report) == f"1 rewritten, 0 refused; {said.removeprefix('wrote o.onnx: ')}"
    assert repr(report) == f"<RewriteReport: {report}>"
    assert str(rewrite("float.onnx", "n.onnx")) == "0 rewritten, 0 refused"


def test_what_is_no_error_is_called_a_note(folder: Path, command: Command) -> None:
    done = command("run", "model.onnx", "--inputs", "x.npz")
    assert done.returncode == 0
    assert re.fullmatch("lut4tool: note: 1 product of this model decodes .*\n", done.stderr)
    wrong = onnx.load("model.onnx")
    next(node for node in wrong.graph.node if node.op_type == "Concat").attribute[0].i = 0
    onnx.save(wrong, "wrong.onnx")
    done = command("run", "wrong.onnx", "--rewrite", "--random")
    assert done.stderr.startswith("lut4tool: note: refused: ")
    assert command("inspect", "wrong.onnx").stdout.endswith("no 4-bit decode chain found, 1 refused\n")
    done = command("rewrite", "float.onnx", "o.onnx")
    assert "note: this model has 1 MatMul or Gemm node with float weights" in done.stdout
    onnx.save(onnx.load("model.onnx"), "ext.onnx", save_as_external_data=True, location="w.bin", size_threshold=128)
    Path("w.bin").unlink()
    assert command("inspect", "ext.onnx").stderr.endswith(
        "; a chain that cannot be proved without this file counts as refused\n"
    )
