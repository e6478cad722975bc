"""`lut4tool expand` on files: where external data goes, what is printed, what is refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from test_expand import attribute, qmm_model, rewritten, same

from build import Built, build
from lut4tool.rewrite import rewrite
from lut4tool.rewrite.expand import expand
from lut4tool.storage import StorageError


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "lut4tool.cli", "expand", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def save_external(built: Built, path: Path) -> None:
    model = copy.deepcopy(built.model)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=16)


def test_external_data_stays_where_it_is(tmp_path):
    built = build(rows=32, cols=32, block=32, literals="constant", perm="written")
    source = tmp_path / "model.onnx"
    save_external(built, source)
    rewrite(source, tmp_path / "small.onnx")
    data = (tmp_path / "weights.bin").read_bytes()
    report = expand(tmp_path / "small.onnx", tmp_path / "back.onnx")
    assert [site.node for site in report.expanded] == ["dec/MatMul"]
    assert report.output_bytes == (tmp_path / "back.onnx").stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "back.onnx", "model.onnx", "small.onnx", "weights.bin",
    ]  # fmt: skip
    assert (tmp_path / "weights.bin").read_bytes() == data
    back = onnx.load(tmp_path / "back.onnx")
    same(built.model, back, built.feeds)


def test_another_folder_gets_a_copy(tmp_path):
    built = build(rows=32, cols=32, block=32, literals="constant")
    save_external(built, tmp_path / "model.onnx")
    rewrite(tmp_path / "model.onnx", tmp_path / "model.onnx")
    (tmp_path / "out").mkdir()
    report = expand(tmp_path / "model.onnx", tmp_path / "out" / "model.onnx")
    assert "was copied as 'weights.bin'" in report.notes[0]
    same(built.model, onnx.load(tmp_path / "out" / "model.onnx"), built.feeds)


def test_data_outside_the_folder_is_refused(tmp_path):
    built = build(rows=32, cols=32, block=32, literals="constant")
    save_external(built, tmp_path / "model.onnx")
    rewrite(tmp_path / "model.onnx", tmp_path / "model.onnx")
    (tmp_path / "in").mkdir()
    (tmp_path / "model.onnx").rename(tmp_path / "in" / "model.onnx")
    (tmp_path / "in" / "weights.bin").symlink_to(tmp_path / "weights.bin")
    with pytest.raises(StorageError, match="leads outside the model's folder"):
        expand(tmp_path / "in" / "model.onnx", tmp_path / "in" / "back.onnx")
    assert expand(tmp_path / "in" / "model.onnx", tmp_path / "in" / "back.onnx", allow_external=[tmp_path]).expanded


def test_the_command(tmp_path):
    built = build()
    small, back = tmp_path / "small.onnx", tmp_path / "back.onnx"
    onnx.save(rewritten(built.model), small)
    done = command(small, back)
    assert done.returncode == 0, done.stderr
    assert "expanded dec/MatMul: Lookup4MatMul, 6 x 10, float32" in done.stdout
    assert f"wrote {back}" in done.stdout
    same(built.model, onnx.load(back), built.feeds)

    again = command(small, back)
    assert (again.returncode, again.stdout) == (1, "")
    assert "--force" in again.stderr
    forced = command(small, back, "--force", "--json")
    document = json.loads(forced.stdout)
    assert document["expanded"] == [
        {"node": "dec/MatMul", "op": "Lookup4MatMul", "rows": 6, "cols": 10, "block_size": 8, "weight_dtype": "float32"}
    ]
    assert (document["refused"], document["output_bytes"]) == ([], back.stat().st_size)
    assert document["input_bytes"] == small.stat().st_size

    in_place = command(small, small)
    assert in_place.returncode == 0
    assert small.read_bytes() == back.read_bytes()


def test_nothing_to_expand(tmp_path):
    onnx.save(build().model, tmp_path / "model.onnx")
    done = command(tmp_path / "model.onnx", tmp_path / "out.onnx")
    assert done.returncode == 3
    assert "nothing to expand; nothing written" in done.stdout
    assert not (tmp_path / "out.onnx").exists()


def test_a_refusal_is_printed(tmp_path):
    model, _ = qmm_model()
    attribute("bits", 8)(model)
    onnx.save(model, tmp_path / "model.onnx")
    done = command(tmp_path / "model.onnx", tmp_path / "out.onnx")
    assert done.returncode == 3
    assert "refused: site: QMM of 8 bits, not 4, at node 'site'" in done.stdout
