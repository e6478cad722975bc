"""The HTML report, written by the command line and read in headless Chromium: what it says, draws and loads."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

from lut4tool.cli import app
from tests.build import Chain, build_many, find_node

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

HOSTILE = '</summary><b onclick="x()">&amp;'

# Runs in the page: what a reader sees, in pixels, and every resource that was fetched.
_READ = """<script>addEventListener("load", () => {
  const every = (selector, what, root = document) => [...root.querySelectorAll(selector)].map(what);
  const edges = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  every("details", d => d.open = true);
  const box = g => ({kind: g.getAttribute("class"), title: g.querySelector("title").textContent,
    text: g.querySelector("text").textContent, rect: edges(g.querySelector("rect")),
    words: edges(g.querySelector("text"))});
  const pre = document.createElement("pre");
  pre.id = "read";
  pre.textContent = JSON.stringify({
    heading: document.querySelector("h1").innerText, sites: every("summary", e => e.innerText),
    tables: every("table", t => every("tr", r => [...r.cells].map(c => c.innerText), t)),
    sizes: every(".bars span", e => e.innerText), bars: every(".bar", e => e.getBoundingClientRect().width),
    drawings: every("svg", s => ({view: edges(s), boxes: every("g", box, s), arrows: every("path", p => p, s).length})),
    width: document.documentElement.scrollWidth, images: document.images.length, scripts: document.scripts.length,
    fetched: performance.getEntriesByType("resource").map(e => e.name)});
  document.body.append(pre);
});</script>"""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Chromium shows of the report on a model with two sites, one refused, one inside hostile names."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed here, so nothing can open the page")
    folder = tmp_path_factory.mktemp("page")
    onnx.save(_model(), folder / "m.onnx")
    report = folder / "r.html"
    done = CliRunner().invoke(
        app, ["rewrite", str(folder / "m.onnx"), str(folder / "out.onnx"), "--report", str(report)]
    )
    assert done.exit_code == 0, done.output
    text = report.read_text()
    assert "http" not in text
    Path(folder, "read.html").write_text(text + _READ)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,900", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", f"file://{folder / 'read.html'}"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    dumped = shown.partition('<pre id="read">')[2].partition("</pre>")[0]
    for name, letter in (("&lt;", "<"), ("&gt;", ">"), ("&nbsp;", "\u00a0"), ("&amp;", "&")):
        dumped = dumped.replace(name, letter)
    found: dict[str, Any] = json.loads(dumped)
    return found


def _model() -> onnx.ModelProto:
    model = build_many(
        [
            Chain(prefix="first/", rows=64, cols=96, block=64, rounding="float16", perm="written"),
            Chain(prefix="second/", rows=96, cols=24, block=8),
            Chain(prefix="third/", rows=96, cols=24, block=8),
        ]
    ).model
    find_node(model, "MatMul0").name = HOSTILE
    model.graph.initializer.append(helper.make_tensor("fifteen", TensorProto.INT64, [1], [15]))
    find_node(model, "third/Mod").input[1] = "fifteen"
    return model


def test_the_tables_say_what_was_done(read: dict[str, Any]) -> None:
    rewritten, refused = read["tables"]
    assert [row[0] for row in rewritten[1:]] == [HOSTILE, "MatMul1"]
    assert rewritten[1][1:6] == ["Lookup4MatMul", "64 × 96", "64", "float16", "kept"]
    assert refused[1][0] == "MatMul2"
    assert "Mod by 15, not 16" in refused[1][1]
    assert refused[1][2]
    assert read["heading"].startswith("rewrite: m.onnx to out.onnx, by lut4tool")


def test_the_bars_are_drawn_to_one_scale(read: dict[str, Any]) -> None:
    """Dense float32 weights, 6144 + 2304 elements, against what the file holds."""
    before, after, dense, packed = read["bars"]
    assert dense == max(read["bars"])
    assert packed < dense / 4
    assert after > 0
    assert before > packed
    assert read["sizes"][4::2][0] == "weights, once a runtime decodes them"
    assert "33.8 KB" in read["sizes"]  # 4 * (64 * 96 + 96 * 24) bytes


def test_each_site_is_drawn_before_and_after(read: dict[str, Any]) -> None:
    assert read["sites"] == [HOSTILE, "MatMul1"]
    assert len(read["drawings"]) == 4
    before, after = read["drawings"][:2]
    operators = [box["text"].split()[0] for box in before["boxes"] if box["kind"] == "chain"]
    wanted = {"Cast", "Div", "Mod", "Concat", "Gather", "Mul", "Slice", "Transpose", "Reshape", "Unsqueeze"}
    assert set(operators) == wanted
    assert len(operators) == len({box["title"] for box in before["boxes"] if box["kind"] == "chain"})
    assert [box["text"] for box in after["boxes"] if box["kind"] == "packed"] == ["Lookup4MatMul"]
    assert {box["text"] for box in after["boxes"] if box["kind"] == "constant"} == {
        "packed uint8 [3072]",
        "scales float [96]",
        "codebook float [16]",
    }
    assert before["arrows"] > after["arrows"] >= 5


def test_boxes_hold_their_words_and_do_not_meet(read: dict[str, Any]) -> None:
    for drawing in read["drawings"]:
        left, top, right, bottom = drawing["view"]
        rects = [box["rect"] for box in drawing["boxes"]]
        for box, rect in zip(drawing["boxes"], rects, strict=True):
            assert rect[0] <= box["words"][0] < box["words"][2] <= rect[2], box["text"]
            assert left <= rect[0] < rect[2] <= right
            assert top <= rect[1] < rect[3] <= bottom
        for (l1, t1, r1, b1), (l2, t2, r2, b2) in combinations(rects, 2):
            assert r1 <= l2 or r2 <= l1 or b1 <= t2 or b2 <= t1


def test_nothing_is_fetched_and_nothing_is_run(read: dict[str, Any]) -> None:
    assert read["fetched"] == []
    assert read["scripts"] == 1  # this test's own
    assert read["images"] == 0
    assert read["width"] <= 1300
