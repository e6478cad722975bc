"""The command line: exit status, one-line errors, JSON alone on stdout, files whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from build_nbits import nbits
from commanding import Run
from onnx import TensorProto, helper
from typer.main import get_command

from lut4tool import cli


def test_help_names_every_command_and_version_is_printed(run: Run) -> None:
    result = run("--help")
    assert result.status == 0
    for command in ("rewrite", "inspect", "run", "quantize", "ops", "demo", "selftest"):
        assert re.search(rf"\b{command}\b", result.out)
    assert run("--version").out.startswith("lut4tool 0.")
    words = [sys.executable, "-m", "lut4tool", "--version"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == run("--version").out


@pytest.mark.parametrize(
    "words",
    [
        ["nope"],
        ["rewrite"],
        ["run", "m.onnx", "--repeat", "0"],
        ["run", "m.onnx", "--seed", "-1"],
        ["rewrite", "--what", "a"],
        ["rewrite", "m.onnx", "o.onnx", "--report", "r.txt"],
        ["run", "m.onnx", "--device", "tpu"],
        ["run", "m.onnx", "--rtol", "-1"],
        ["run", "m.onnx", "-i", "x"],
        ["run", "m.onnx", "-i", "x=make.py"],
        ["run", "m.onnx", "-i", "x=" + "[" * 100_000],
        *(["run", "m.onnx", "--random", "--dim", dim] for dim in ("n", "n=x", "n=²", "n=" + "9" * 5000, "=3", "n=-1")),
        ["bench", "--shape", "8,8", "--device", "tpu"],
        ["bench", "--shape", "8,8", "--dtype", "float64"],
        ["bench", "--shape", "8,8", "--m", "1,x"],
        ["selftest", "--device", "tpu"],
        ["quantize", "m.onnx", "o.onnx", "--block-size", "7"],
        ["quantize", "m.onnx", "o.onnx", "--rounding", "float8"],
        ["quantize", "m.onnx", "o.onnx", "--codebook", "nf5"],
        ["quantize", "m.onnx", "o.onnx", "--match", "("],
    ],
    ids=lambda words: " ".join(words)[:50],
)
def test_usage_errors_exit_2(run: Run, words: list[str]) -> None:
    """Values of options that suit no machine too, whatever the files."""
    result = run(*words)
    assert (result.status, result.out) == (2, "")
    if len(words) > 3:
        assert words[-2] in result.err  # the option


def test_choices_are_in_the_help_and_are_the_librarys(run: Run) -> None:
    from lut4tool import formats, produce
    from lut4tool.options import Device, Float, Half
    from lut4tool.runtime import backend

    assert tuple(Device) == backend.DEVICES
    assert tuple(Float) == tuple(formats.FLOAT_DTYPES)
    assert (None, *Half) == produce._ROUNDINGS
    for command in ("run", "bench", "selftest"):
        assert "auto|metal|cuda|cpu" in "".join(run(command, "--help").out.split())
    assert "float16|bfloat16" in "".join(run("quantize", "--help").out.split())


def test_the_help_of_bench_is_what_it_does(run: Run) -> None:
    """MODEL or --shape is needed, so neither has a standard; --m has one."""
    parameters = {parameter.name: parameter for parameter in get_command(cli.app).commands["bench"].params}
    assert parameters["shape"].default is None
    assert "standard" in parameters["shape"].help
    assert "[default" not in run("bench", "--help").out.split("--shape")[1].split("--m ")[0]
    assert re.search(r"1,16,128,256,512\..*\[default:\s+1,16,128\]", _flat(run("bench", "--help").out))
    assert run("bench").status == 2


def _flat(text: str) -> str:
    """The words of a help page, without its frame."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def test_rewrite_json_is_alone_on_stdout(run: Run, chain: Path, tmp_path: Path) -> None:
    result = run("rewrite", chain, "out.onnx", "--json", "--report", "report.json", "--verify")
    assert result.status == 0
    document = json.loads(result.out)
    (site,) = document["rewritten"]
    assert {key: site[key] for key in ("op", "rows", "cols", "block_size", "weight_dtype", "bytes")} == {
        "op": "Lookup4MatMul",
        "rows": 12,
        "cols": 10,
        "block_size": 8,
        "weight_dtype": "float32",
        "bytes": "kept",
    }
    assert site["witness"] == {"compared": 120, "elements": 120, "all": True}
    assert document["refused"] == []
    assert json.loads(Path("report.json").read_text()) == document
    assert onnx.load("out.onnx").functions[0].name == "Lookup4MatMul"


def test_rewrite_writes_a_self_contained_page(run: Run, chain: Path) -> None:
    assert run("rewrite", chain, "out.onnx", "--report", "report.html").status == 0
    page = Path("report.html").read_text()
    assert "Lookup4MatMul" in page
    assert "http" not in re.sub(r"http://www\.w3\.org\S*", "", page)
    result = run("rewrite", chain, "other.onnx", "--report", "report.pdf")
    assert result.status == 2
    assert not Path("other.onnx").exists()


def test_rewrite_refuses_to_replace_without_force(run: Run, chain: Path) -> None:
    Path("out.onnx").write_bytes(b"mine")
    result = run("rewrite", chain, "out.onnx")
    assert (result.status, Path("out.onnx").read_bytes()) == (1, b"mine")
    assert "--force" in result.err
    assert run("rewrite", chain, "out.onnx", "--force").status == 0
    assert run("rewrite", chain, chain).status == 0  # in place needs none
    assert chain.read_bytes() == Path("out.onnx").read_bytes()


def test_dry_run_writes_nothing(run: Run, chain: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    assert run("rewrite", chain, "out.onnx", "--dry-run").status == 0
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_to_rewrite_exits_3_and_writes_nothing(run: Run, plain: Path) -> None:
    result = run("rewrite", plain, "out.onnx", "--json")
    assert (result.status, json.loads(result.out)["rewritten"]) == (3, [])
    assert not Path("out.onnx").exists()


def test_inspect_says_found_and_refused(run: Run, plain: Path, chain: Path) -> None:
    found = json.loads(run("inspect", chain, "--json").out)
    assert [site["op"] for site in found["found"]] == ["Lookup4MatMul"]
    assert found["operators"]["MatMul"] == 1
    assert found["packed_bytes"] == 60 + 4 * 15 + 64  # 15 blocks of 8
    assert found["dense_bytes"] == 4 * 120
    wrong = onnx.load(chain)
    next(node for node in wrong.graph.node if node.op_type == "Concat").attribute[0].i = 0
    onnx.save(wrong, "wrong.onnx")
    refused = run("inspect", "wrong.onnx")
    assert refused.status == 0
    assert re.search(r"refused: .*: Concat .*, at node ", refused.out)
    assert "no 4-bit decode chain found" in run("inspect", plain).out


def test_inspect_lists_the_vendors_operators_where_they_are_asked_for(run: Run) -> None:
    onnx.save(nbits()[0], "nbits.onnx")
    assert json.loads(run("inspect", "nbits.onnx", "--json").out)["found"] == []
    document = json.loads(run("inspect", "nbits.onnx", "--vendor", "--json").out)
    (site,) = document["found"]
    assert (site["op"], site["chain"], site["onnxruntime_bytes"]) == ("QMM", "matmul_nbits", None)
    assert document["onnxruntime_bytes"] == 0
    assert document["advice"][0] == "`lut4tool rewrite --vendor` will keep 1 weight packed"


def test_the_bodies_of_our_operators_are_no_sites(run: Run, chain: Path) -> None:
    assert run("rewrite", chain, "packed.onnx").status == 0
    for command in (["inspect", "packed.onnx"], ["rewrite", "packed.onnx", "again.onnx"]):
        result = run(*command)
        assert "packed weights already: 1 product" in result.out
        assert "refused:" not in result.out


def test_inspect_counts_external_data_of_subgraphs(run: Run) -> None:
    data = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 4], data_location=TensorProto.EXTERNAL)
    data.external_data.add(key="location", value="w.bin")
    Path("w.bin").write_bytes(bytes(32))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])
    branch = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "branch", [], [y], [data])
    choice = helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch)
    inputs = [helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    graph = helper.make_graph([choice], "g", inputs, [helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 4])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), "if.onnx")
    assert json.loads(run("inspect", "if.onnx", "--json").out)["external_bytes"] == 2 * 32


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["inspect", "missing.onnx"], "missing.onnx"),
        (["rewrite", "missing.onnx", "out.onnx"], "missing.onnx"),
        (["run", "missing.onnx"], "missing.onnx"),
        (["run", "cut.onnx", "--random"], "cut short"),
        (["rewrite", "cut.onnx", "out.onnx"], "cut short"),
        (["quantize", "cut.onnx", "out.onnx"], "cut short"),
        (["inspect", "noise.onnx"], "not an ONNX model"),
        (["run", "plain.onnx"], "input 'x' is missing"),
        (["run", "plain.onnx", "-i", "z=1"], "'z'"),
        (
            ["run", "plain.onnx", "--inputs", "missing.npz"],
            "lut4tool: cannot read missing.npz: no such file or directory\n",
        ),
        (["run", "plain.onnx", "--inputs", "text.npz"], "lut4tool: text.npz is no .npz or .npy file\n"),
        (
            ["run", "plain.onnx", "-i", "x=text.npz.npy"],
            "lut4tool: cannot read text.npz.npy: no such file or directory\n",
        ),
        (["run", "plain.onnx", "-i", "x=objects.npy"], "plain arrays: it holds objects, which are not read\n"),
        (["run", "plain.onnx", "--inputs", "noise.onnx"], "noise.onnx"),
        (["run", "plain.onnx", "--random", "--dim", "m=3"], "there is 'n'"),
        (["run", "plain.onnx", "--random", "--dim", "n=99999999999999999"], "too large to be drawn"),
        (["run", "plain.onnx", "-i", "x=1e39"], "rank"),
        (["run", "plain.onnx", "--inputs", "objects.npz"], "objects"),
        (["run", "plain.onnx", "--inputs", "deflated.npz"], "damaged"),
        (["run", "plain.onnx", "--inputs", "method.npz"], "damaged"),
        (["run", "plain.onnx", "--inputs", "encrypted.npz"], "damaged"),
        (["quantize", "chain.onnx", "out.onnx", "--codebook", "huge.txt"], "finite in float32"),
        (
            ["quantize", "chain.onnx", "out.onnx", "--codebook", "missing.txt"],
            "codebook file missing.txt: no such file",
        ),
        (["quantize", "chain.onnx", "out.onnx", "--codebook", "objects.npy"], "holds objects, which are not read"),
        (["run", "plain.onnx", "--inputs", "wrong_type.npz"], "tensor(float)"),
        (["run", "plain.onnx", "--inputs", "wrong_rank.npz"], "rank"),
        (["run", "plain.onnx", "--random", "--expected", "wrong_name.npz"], "no output 'q'"),
        (["run", "unknown.onnx", "--random"], "NoSuchOperator"),
        (["run", "plain.onnx", "--random", "--outputs", "no/such/folder/y.npz"], "no/such/folder"),
        (["rewrite", "chain.onnx", "no/such/folder/out.onnx"], "no/such/folder"),
    ],
)
def test_bad_input_gives_one_clear_line(run: Run, plain: Path, chain: Path, words: list[str], fragment: str) -> None:
    Path("cut.onnx").write_bytes(chain.read_bytes()[:300])
    Path("noise.onnx").write_bytes(np.random.default_rng(0).bytes(500))
    np.savez("wrong_type.npz", x=np.zeros((1, 4), np.float64))
    np.savez("wrong_rank.npz", x=np.zeros(4, np.float32))
    np.savez("wrong_name.npz", q=np.zeros(4, np.float32))
    np.savez("objects.npz", x=np.array([{}], object))
    np.save("objects.npy", np.array([{}], object))
    Path("text.npz").write_text("x, y\n1, 2\n")
    np.savez_compressed("deflated.npz", x=np.arange(400, dtype=np.float32))
    np.savez("method.npz", x=np.arange(4, dtype=np.float32))
    damage("deflated.npz", 100, b"\xff" * 200)  # in the compressed bytes
    damage("method.npz", 8, b"\x63")
    Path("encrypted.npz").write_bytes(Path("method.npz").read_bytes())
    damage("method.npz", Path("method.npz").read_bytes().index(b"PK\1\2") + 10, b"\x63")  # in the directory too
    damage("encrypted.npz", 6, b"\1")
    damage("encrypted.npz", 8, b"\0")
    damage("encrypted.npz", Path("encrypted.npz").read_bytes().index(b"PK\1\2") + 8, b"\1")
    Path("huge.txt").write_text("1e300 " * 16)
    unknown = onnx.load(plain)
    unknown.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(unknown, "unknown.onnx")
    before = sorted(Path().iterdir())
    result = run(*words)
    assert (result.status, result.out) == (1, "")
    assert fragment in result.err
    assert "pickle" not in result.err  # NumPy advises to allow it
    assert result.err.startswith("lut4tool: ")
    assert result.err.count("\n") == 1
    assert sorted(Path().iterdir()) == before


def damage(name: str, position: int, content: bytes) -> None:
    """Overwrite bytes of a file."""
    with Path(name).open("r+b") as file:
        file.seek(position)
        file.write(content)


def test_names_are_printed_as_they_are(run: Run, chain: Path) -> None:
    """No markup, no emoji, and signs that stdout's encoding lacks as escapes."""
    model = onnx.load(chain)
    model.graph.node.append(helper.make_node("Odd[/b]:x:", ["x"], ["other"], domain="dom[b]"))
    next(node for node in model.graph.node if node.op_type == "MatMul").name = "[red]a:x:[/b]\u2603"
    onnx.save(model, "odd.onnx")
    result = run("inspect", "odd.onnx")
    assert (result.status, result.err) == (0, "")
    assert "dom[b]::Odd[/b]:x: 1" in result.out
    assert "[red]a:x:[/b]\u2603" in result.out
    Path("out[").mkdir()
    Path("[").mkdir()
    result = run("rewrite", "odd.onnx", "out[/b]:x:.onnx", "--report", "[/b].html")
    assert (result.status, result.err) == (0, "")
    assert "wrote out[/b]:x:.onnx: " in result.out
    assert "[red]a:x:[/b]\u2603" in Path("[/b].html").read_text()
    words = [sys.executable, "-m", "lut4tool.cli", "inspect", "odd.onnx"]
    done = subprocess.run(words, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"[red]a:x:[/b]\u2603" in done.stdout
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *words], capture_output=True, check=False)
    assert done.stderr == b""


def test_a_report_never_replaces_a_model(run: Run, chain: Path) -> None:
    model = Path("model.json")
    model.write_bytes(chain.read_bytes())
    for words in (("out.json", "out.json"), ("out.onnx", "model.json"), ("out.onnx", "no/such/r.json")):
        assert run("rewrite", model, words[0], "--report", words[1]).status == 2
        assert sorted(Path().iterdir()) == [Path("chain.onnx"), model]
        assert model.read_bytes() == chain.read_bytes()


def test_an_unforeseen_error_is_one_line_too(run: Run, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lut4tool.recognize import summary

    monkeypatch.setattr(summary, "summarize", lambda *_: 1 / 0)
    result = run("inspect", plain)
    assert result.status == 1
    assert re.fullmatch(r"lut4tool: internal error, ZeroDivisionError: .*\n", result.err)
    monkeypatch.setenv("LUT4TOOL_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        run("inspect", plain)


def test_a_wrong_witness_exits_4_and_writes_nothing(run: Run, chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lut4tool.recognize import witness

    decode = witness.native.decode_elements
    monkeypatch.setattr(witness.native, "decode_elements", lambda *a, **k: decode(*a, **k) + np.float32(1))
    result = run("rewrite", chain, "out.onnx")
    assert (result.status, Path("out.onnx").exists()) == (4, False)


def test_quantize_then_rewrite(run: Run) -> None:
    weight = np.random.default_rng(0).standard_normal((32, 48), np.float32)
    Path("float.onnx").write_bytes(_float_model(weight))
    result = run("quantize", "float.onnx", "chain.onnx", "--block-size", "16", "--codebook", "fp4", "--json")
    assert result.status == 0
    assert json.loads(result.out)["quantized"][0]["rows"] == 32
    assert run("rewrite", "chain.onnx", "out.onnx").status == 0
    assert run("quantize", "float.onnx", "none.onnx", "--match", "nothing").status == 3


def _float_model(weight: np.ndarray) -> bytes:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", weight.shape[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", weight.shape[1]])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()


def test_quantize_reads_data_outside_where_it_is_allowed_and_says_how_it_was_copied(run: Run) -> None:
    for name in ("in", "blobs", "out"):
        Path(name).mkdir()
    weights = {name: np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) for name in ("w", "v")}
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 64])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("MatMul", ["z", "v"], ["y"])]
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", [value], [helper.make_tensor_value_info("y", 1, [3, 64])], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, "in/m.onnx", save_as_external_data=True, location="w.bin")
    Path("in/w.bin").rename("blobs/w.bin")
    Path("in/w.bin").symlink_to("../blobs/w.bin")
    Path("out/w.bin").write_text("taken")
    words = ("quantize", "in/m.onnx", "out/m.onnx", "--match", "^w$")
    assert "leads outside" in run(*words).err
    result = run(*words, "--allow-external", "blobs")
    assert (result.status, result.err) == (0, "")
    assert re.search(r"'w.bin' \(.*\) was copied as 'w-1.bin'", result.out)
    assert Path("out/w.bin").read_text() == "taken"
    (left,) = (tensor for tensor in onnx.load("out/m.onnx").graph.initializer if tensor.name == "v")
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(left), weights["v"])


def test_ops_lists_what_runs(run: Run) -> None:
    document = json.loads(run("ops", "--json").out)
    rows = {(row["domain"], row["op"], row["since"]): row for row in document["operators"]}
    assert rows["ai.lut4tool", "Lookup4MatMul", 1]["until"] is None
    assert rows["ai.onnx", "StringConcat", 20]["host"]
    assert rows["ai.onnx", "TopK", 11]["types"]["K"] == "int64"
    assert rows["com.microsoft", "RotaryEmbedding", 1]["refused"] == "Refuse scale other than 1.0."
    assert [row["op"] for row in document["refused"]] == ["Gradient"]
    text = run("ops").out
    assert "ai.onnx::MatMul" in text
    assert "Gradient is refused" in text


def test_inspect_says_what_run_does_not_serve(run: Run, plain: Path) -> None:
    assert json.loads(run("inspect", plain, "--json").out)["unsupported"] == []
    model = onnx.load(plain)
    model.graph.node[0].op_type = "Mystery"
    onnx.save(model, "odd.onnx")
    (reason,) = json.loads(run("inspect", "odd.onnx", "--json").out)["unsupported"]
    assert "ai.onnx::Mystery is not supported" in reason
    assert reason in run("inspect", "odd.onnx").out


def test_selftest_holds_every_bound(run: Run, chain: Path) -> None:
    run("rewrite", chain, "small.onnx")
    document = json.loads(run("selftest", "--device", "cpu", "--json").out)
    assert document["cases"]
    assert all(case["ok"] for case in document["cases"])
    served = json.loads(run("run", "small.onnx", "--random", "--device", "cpu", "--json").out)["kernels"]
    assert document["cases"][0]["kernel"] == served[0]["kernel"].partition(";")[0]  # named one way
    assert run("selftest", "--device", "cpu").out.count("\n") < 15
    assert run("selftest", "--device", "cpu", "--verbose").out.count(", M ") > 200


def test_without_mlx_rewrite_works_and_run_names_the_extra(chain: Path, tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'mlx'\", name='mlx')")
    command = [sys.executable, "-m", "lut4tool.cli"]
    environment = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PATH": "/usr/bin:/bin"}

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    assert call("rewrite", "chain.onnx", "out.onnx").returncode == 0
    assert call("inspect", "out.onnx").returncode == 0
    result = call("run", "out.onnx", "--random")
    assert result.returncode == 1
    assert "lut4tool[cpu]" in result.stderr
    assert result.stderr.count("\n") == 1


def test_where_there_is_nothing_to_rewrite_it_says_why(run: Run, plain: Path, chain: Path) -> None:
    Path("float.onnx").write_bytes(_float_model(np.ones((32, 48), np.float32)))
    assert "1 MatMul or Gemm node with float weights; `lut4tool quantize`" in run("rewrite", "float.onnx", "o.onnx").out
    assert "nothing for lut4tool to do" in run("inspect", plain).out
    assert run("rewrite", chain, "packed.onnx").status == 0
    again = run("rewrite", "packed.onnx", "again.onnx")
    assert (again.status, Path("again.onnx").exists()) == (3, False)
    assert "packed weights already: 1 product;" in again.out
    packed = json.loads(run("inspect", "packed.onnx", "--json").out)["operators"]
    assert packed == {"ai.lut4tool::Lookup4MatMul": 1}  # the body's own operators are not counted
    result = run("run", plain, "--rewrite", "--random")
    assert (result.status, result.err) == (0, "lut4tool: note: nothing to rewrite: no 4-bit decode chain found\n")


def test_quantize_says_what_stays_external_and_why_nothing_was_found(run: Run) -> None:
    model = onnx.load_from_string(_float_model(np.ones((32, 48), np.float32)))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(512, np.float32), "spare"))
    onnx.save(model, "float.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    Path("other").mkdir()
    result = run("quantize", "float.onnx", "other/q.onnx")
    assert result.status == 0
    assert re.search(r"what is used of external data 'w.bin' \(2.0 KB\) was copied as 'w.bin'", result.out)
    assert "2.0 KB of its weights are external data in w.bin (2.0 KB on disk), which must stay beside it" in result.out
    assert (
        "no MatMul or Gemm has a float weight whose name, or whose product's, 'z' finds"
        in run("quantize", "float.onnx", "none.onnx", "--match", "z").out
    )


def test_a_kernel_that_fails_is_wrong_in_the_selftest(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from lut4tool.runtime import backend  # noqa: F401 - first: it readies MLX

    from lut4tool.kernels import reference  # isort: skip

    def fail(*arguments: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(reference, "qmm", fail)
    result = run("selftest", "--device", "cpu", "--json")
    wrong = [case for case in json.loads(result.out)["cases"] if not case["ok"]]
    assert result.status == 4
    assert wrong
    assert all("no such instruction" in case["case"] for case in wrong)


def test_ctrl_c_is_said_in_a_line(chain: Path) -> None:
    program = """if True:
        import os, signal, sys
        from lut4tool import cli
        from lut4tool.recognize import summary
        summary.summarize = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
        sys.argv = ["lut4tool", "inspect", sys.argv[1]]
        cli.main()
    """
    done = subprocess.run([sys.executable, "-c", program, chain], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (130, "lut4tool: interrupted\n", "")
