"""Coverage-guided fuzzing of whole files, for a short while (`make soak`: long), and properties over damaged models."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from build import build
from lut4tool.errors import Lut4Error
from lut4tool.recognize import recognize
from lut4tool.rewrite import rewrite_model
from lut4tool.storage import StorageError, Tensors, parse_model


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this machine")
@pytest.mark.parametrize(
    ("seconds", "seeds"),
    [(20, [2046]), pytest.param(600, [1, 2, 3], marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_fuzzed_files_are_served_or_refused(tmp_path: Path, seconds: int, seeds: list[int]) -> None:
    """The seeds at once. What a run finds stays where the failure says, for `python tests/fuzz_files.py FILE`."""
    script = Path(__file__).parents[1] / "fuzz_files.py"
    kept = Path(tempfile.mkdtemp(prefix="lut4tool-fuzz-"))
    options = [f"-max_total_time={seconds}", f"-artifact_prefix={kept}/"]
    running = []
    for seed in seeds:
        log = (tmp_path / f"{seed}.log").open("w")
        running.append(subprocess.Popen([sys.executable, script, *options, f"-seed={seed}"], stderr=log))
    statuses = [process.wait() for process in running]
    said = [(tmp_path / f"{seed}.log").read_text() for seed in seeds]
    failed = [text[-3000:] for text, status in zip(said, statuses, strict=True) if status]
    assert not failed, f"{failed}: {script} {' '.join(map(str, kept.iterdir()))}"
    kept.rmdir()
    for seed, text in zip(seeds, said, strict=True):
        assert "\tNEW " in text  # coverage guided it
        count, edges, features = re.findall(r"#(\d+)\tDONE +cov: (\d+) ft: (\d+)", text)[-1]
        print(f"fuzz: seed {seed}, {seconds} s: {count} executions, {edges} edges, {features} features")


WHOLE = build(literals="constant").model.SerializeToString()
FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def serve(data: bytes) -> None:
    """Prove and rewrite; what is no Lut4Error fails the test."""
    with contextlib.suppress(Lut4Error):
        model = parse_model(data)
        recognize(model)
        rewrite_model(model, Tensors(None))


@FEW
@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    serve(data)


@FEW
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255), st.integers(0, len(WHOLE)))
def test_a_model_with_a_wrong_byte_or_an_early_end(place: int, value: int, end: int) -> None:
    changed = bytearray(WHOLE)
    changed[place] = value
    serve(bytes(changed))
    serve(WHOLE[:end])


WORDS = st.sampled_from(["-1", "0", "3", "16", "60", "64", "1e3", "0x4", " 8 ", "", "x", str(1 << 64), "-" + "9" * 30])
PLACES = st.sampled_from(
    ["w.bin", "./w.bin", "../w.bin", "/etc/passwd", "a/../w.bin", "", ".", "w.bin/", "none", "a\0b", "ä"]
)
DIMS = st.lists(st.sampled_from([0, 1, 2, 4, 16, -1, 1 << 31, 1 << 40, (1 << 63) - 1]), max_size=4)


@FEW
@given(place=PLACES, offset=WORDS, length=WORDS, dims=DIMS, kind=st.integers(0, 30))
def test_external_data_is_its_own_bytes_or_refused(
    tmp_path: Path, place: str, offset: str, length: str, dims: list[int], kind: int
) -> None:
    content = np.arange(64, dtype=np.uint8).tobytes()
    (tmp_path / "w.bin").write_bytes(content)
    (tmp_path / "a").mkdir(exist_ok=True)
    tensor = TensorProto(name="w", data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
    entries: dict[str, Any] = {"location": place, "offset": offset, "length": length}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    with contextlib.suppress(StorageError):
        raw, start = Tensors(tmp_path).raw(tensor), int(offset or 0)
        assert raw.tobytes() == content[start : start + raw.size]
        assert Tensors(tmp_path).array(tensor).shape == tuple(dims)
