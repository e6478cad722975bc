"""`lut4tool run`: results, inputs, files, and how it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from commanding import Run
from onnx import TensorProto, helper, parser


def test_a_run_equals_numpy_and_says_what_ran(run: Run, plain: Path) -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.savez("x.npz", x=x)
    np.savez("expected.npz", y=2 * x)
    result = run("run", plain, "--inputs", "x.npz", "--outputs", "y.npz", "--expected", "expected.npz", "--json")
    assert result.status == 0
    document = json.loads(result.out)
    assert document["expected"][0]["within"]
    assert (document["device"], document["milliseconds"]["count"]) == ("cpu", 1)
    np.testing.assert_array_equal(np.load("y.npz")["y"], 2 * x)
    np.savez("expected.npz", y=2 * x + 1)
    result = run("run", plain, "--inputs", "x.npz", "--expected", "expected.npz")
    assert result.status == 4
    assert "8 of 8 elements" in result.out
    np.save("x.npy", x)
    assert run("run", plain, "-i", "x=x.npy", "--expected", "expected.npz", "--atol", "1").status == 0


def test_run_advises_a_rewrite_and_can_do_it(run: Run, chain: Path) -> None:
    left = run("run", chain, "--random", "--outputs", "left.npz", "--json")
    assert (left.status, json.loads(left.out)["kernels"]) == (0, [])
    assert "lut4tool rewrite" in left.err
    assert left.err.count("\n") == 1
    done = run("run", chain, "--rewrite", "--random", "--expected", "left.npz", "--json")
    assert (done.status, done.err) == (0, "")
    assert json.loads(done.out)["kernels"][0]["kernel"].startswith(("cpu", "reference"))


def test_random_inputs_take_the_sizes_of_those_that_are_given(run: Run, plain: Path) -> None:
    model = onnx.load(plain)
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 2]))
    onnx.save(model, "two.onnx")
    np.save("x.npy", np.ones((3, 4), np.float32))
    assert run("run", "two.onnx", "-i", "x=x.npy", "--random").status == 0
    assert "dimension 0, 'n'" in run("run", "two.onnx", "-i", "x=x.npy", "--random", "--dim", "n=2").err


def test_random_inputs_take_seed_and_dimensions(run: Run, plain: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run("run", plain, "--random", "--seed", seed, "--dim", "n=3", "--outputs", f"{name}.npz").status == 0
    a, b, c = (np.load(f"{name}.npz")["y"] for name in "abc")
    assert a.shape == (3, 4)
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_bfloat16_travels_through_npz(run: Run, tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.BFLOAT16, [3])
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "g",
        [value],
        [helper.make_tensor_value_info("y", TensorProto.BFLOAT16, [3])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), "half.onnx")
    x = np.array([1.5, -2, 3], ml_dtypes.bfloat16)
    np.savez("x.npz", x=x.view(np.uint16))
    np.savez("y.npz", y=(-x).view(np.uint16))
    result = run("run", "half.onnx", "--inputs", "x.npz", "--expected", "y.npz", "--outputs", "z.npz")
    assert result.status == 0, result.err
    np.testing.assert_array_equal(np.load("z.npz")["y"], (-x).view(np.uint16))


def test_a_profile_is_a_chrome_trace(run: Run, plain: Path) -> None:
    assert run("run", plain, "--random", "--profile", "t.json").status == 0
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    assert any("Add" in event["name"] for event in events)


def test_outputs_of_any_name_are_written(run: Run, plain: Path) -> None:
    model = onnx.load(plain)
    names = ["file", "allow_pickle", "a/b", "../y", "y.npy"]
    for name in names:
        model.graph.node.append(helper.make_node("Identity", ["y"], [name]))
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]))
    onnx.save(model, "names.onnx")
    assert run("run", "names.onnx", "--random", "--outputs", "y.npz").status == 0
    assert run("run", "names.onnx", "--random", "--expected", "y.npz").status == 0
    with np.load("y.npz") as written:
        assert sorted(written.files) == sorted(["y", *names])


def test_run_rewrite_says_what_it_refused(run: Run, chain: Path) -> None:
    wrong = onnx.load(chain)
    next(node for node in wrong.graph.node if node.op_type == "Concat").attribute[0].i = 0
    onnx.save(wrong, "wrong.onnx")
    assert re.search(r"refused: .*: Concat .*, at node ", run("run", "wrong.onnx", "--rewrite", "--random").err)


@pytest.mark.parametrize("option", [["--outputs", "x.npz"], ["--profile", "m.json"], ["--profile", "trace.html"]])
def test_run_replaces_nothing_that_it_reads(run: Run, chain: Path, option: list[str]) -> None:
    np.savez("x.npz", x=np.zeros((2, 2), np.float32))
    Path("m.json").write_bytes(chain.read_bytes())
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    result = run("run", "m.json", "--inputs", "x.npz", *option)
    assert result.status == 2
    assert "replaced" in result.err or "ends in .json" in result.err
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


ENDLESS = """<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y) {
    m = Constant <value_int = 1099511627776> ()
    y = Loop (m, , x) <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t) { t = Neg (s) d = Identity (c) }>
}"""


def test_ctrl_c_ends_a_loop_that_would_take_years(tmp_path: Path) -> None:
    onnx.save(parser.parse_model(ENDLESS), tmp_path / "m.onnx")
    program = """if True:
        import signal, sys
        from lut4tool import cli
        from lut4tool.runtime.session import Runtime
        evaluate = Runtime.evaluate
        def begin(*arguments):
            signal.setitimer(signal.ITIMER_REAL, 1)
            return evaluate(*arguments)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        Runtime.evaluate = begin
        sys.argv = ["lut4tool", "run", sys.argv[1], "--random", "--device", "cpu"]
        cli.main()
    """
    command = [sys.executable, "-c", program, tmp_path / "m.onnx"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout) == (130, "")
    told = r"lut4tool: interrupted; node 'Loop:y' \(Loop\) had done [1-9]\d* of 1099511627776 iterations\n"
    assert re.fullmatch(told, done.stderr), done.stderr


def test_a_random_run_that_fails_says_which_dimensions_were_taken_as_1(run: Run) -> None:
    sizes = {"picture": ["N", 1, "H", "W"], "nameless": ["N", 1, None, None]}
    for name, shape in sizes.items():
        value = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
        node = helper.make_node("AveragePool", ["x"], ["y"], "pool", kernel_shape=[3, 3])
        graph = helper.make_graph([node], "g", [value], [helper.make_tensor_value_info("y", 1, None)])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), f"{name}.onnx")
    result = run("run", "picture.onnx", "--random")
    assert result.status == 1
    assert result.err.endswith(" (N, H, W of the model were taken as 1: --dim NAME=N)\n")
    assert "Error" not in result.err  # no name of a class: the sentence is ours
    result = run("run", "picture.onnx", "--random", "--dim", "N=2", "--dim", "H=8")
    assert result.err.endswith(" (W of the model was taken as 1: --dim NAME=N)\n")
    assert run("run", "picture.onnx", "--random", "--dim", "W=8", "--dim", "H=8").status == 0
    np.save("x.npy", np.zeros((1, 1, 1, 1), np.float32))
    assert "taken as 1" not in run("run", "picture.onnx", "--random", "-i", "x=x.npy").err
    result = run("run", "nameless.onnx", "--random", "--dim", "N=1")
    assert result.err.endswith(" (dimensions without a name of x were taken as 1: give these inputs)\n")
