"""Tables fit the terminal: no line is wider, figures are whole, names keep both their ends; the document is not cut."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import onnx
import pytest
from rich.cells import cell_len
from rich.console import Console

from build import build
from lut4tool import tables

NAME = "/model/layers.0/self_attn/q_proj/MatMul_量子化"
SITE = {
    "node": NAME,
    "op": "Lookup4MatMul",
    "rows": 14336,
    "cols": 4096,
    "block_size": 64,
    "weight_dtype": "bfloat16",
    "bytes": "repacked",
    "chain": "lookup in columns",
    "packed_bytes": 33_000_000,
    "dense_bytes": 235_000_000,
    "onnxruntime_bytes": 13_600_000_000,
    "witness": {"compared": 1216, "elements": 58720256, "all": False},
}
FIGURES = ["14336 x 4096", "64", "bfloat16", "repacked"]
WIDTHS = [200, 120, 100, 80, 60, 40]


def printed(width: int, show: Any, *arguments: Any) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, soft_wrap=True, markup=False, emoji=False, highlight=False)
    show(console, *arguments)
    return stream.getvalue()


def assert_fits(text: str, width: int) -> None:
    wide = [line for line in text.splitlines() if cell_len(line.rstrip()) > width and line != NAME]
    assert not wide


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("key", "figures"), [("found", ["33.0 MB", "235.0 MB", "13.6 GB"]), ("rewritten", ["1,216 elements"])]
)
def test_sites_fit(key: str, figures: list[str], width: int) -> None:
    text = printed(width, tables.print_sites, {key: [SITE, SITE | {"node": "b"}], "refused": []}, key)
    assert_fits(text, width)
    for figure in (*FIGURES, *figures):
        assert text.count(figure) >= 2
    assert text.count("量子化") == 1  # the end of the name
    assert text.count("/model") == 1
    if width >= 200:
        assert NAME in text


@pytest.mark.parametrize("width", WIDTHS)
def test_the_outputs_of_a_run_fit(width: int) -> None:
    output = {"name": NAME, "type": "float16", "shape": [1, 16, 1024], "min": -1.23456e-12, "mean": 0.25, "max": None}
    compared = {"name": NAME, "max_abs": 1e-3, "max_rel": 2.0, "cosine": 0.5, "nan": 0, "nan_expected": 1}
    times = {"count": 1, "min": 1.0, "median": 1.0, "max": 1.0}
    document = {
        "outputs": [output],
        "expected": [compared | {"within": False, "why": "8 of 8 elements are over 2e-06"}],
        "kernels": [],
        "profile": [],
        "milliseconds": times,
        "load_milliseconds": 1.0,
        "device": "cpu",
        "peak_bytes": 1,
    }
    *lines, why, _ = printed(width, tables.print_run, document).splitlines()
    assert_fits("\n".join(lines), width)
    for figure in ("-1.23456e-12", "[1, 16, 1024]", "0.25", "0.001", "0 / 1"):
        assert figure in "\n".join(lines)
    assert why == f"{NAME}: 8 of 8 elements are over 2e-06"


@pytest.mark.parametrize("width", WIDTHS)
def test_times_and_cases_fit(width: int) -> None:
    timing = {"shape": "14336 x 4096, block 64, W [N, K]", "m": 1, "cold": False, "best": 123.456, "median": 234.567}
    rows = [
        timing | {"engine": "lut4tool", "kernel": "cpu amx", "ours_over_it": None},
        timing | {"engine": "bitsandbytes", "kernel": "0.50.2, torch 2.13.0+cpu", "ours_over_it": 0.06},
    ]
    missing = {"shape": timing["shape"], "engine": "onnxruntime", "reason": "not installed"}
    document = {"machine": {"device": "cpu"}, "threads": 2, "dtype": "float32", "bandwidth": 17.0, "timed": "wall time"}
    text = printed(width, tables.print_bench, document | {"timings": rows, "missing": [missing]})
    *lines, last, _ = text.splitlines()
    assert_fits("\n".join(lines[1:]), width)
    assert text.count("123.456") == text.count("234.567") == 2
    assert last == "onnxruntime: not installed"
    case = {"case": "14336 x 4096, block 64, M 130, float16 weight, both orders", "ratio": 0.0123, "ok": True}
    document = {"machine": "a", "cases": [case | {"kernel": "cpu/tile avx512"}], "unavailable": {}}
    text = printed(width, tables.print_selftest, document, True)
    assert_fits("\n".join(text.splitlines()[:-1]), max(width, 60))  # its name is whole where it has a line of its own
    assert "0.0123" in text


def test_a_busy_machine_is_said() -> None:
    timing = {
        "shape": "8 x 8",
        "m": 1,
        "cold": False,
        "engine": "dense",
        "kernel": "",
        "ours_over_it": 1.0,
        "best": 1.0,
    }
    document = {"machine": {"device": "cpu"}, "threads": 2, "dtype": "float32", "bandwidth": 17.0, "timed": "wall time"}
    document |= {"missing": []}
    rows = [timing | {"median": 2.5}, timing | {"median": 1.9, "m": 2}]
    said = printed(200, tables.print_bench, document | {"timings": rows})
    assert "the machine was busy: the median is over twice the best in 1 of 2 rows; do not trust the ratios" in said
    assert "busy" not in printed(200, tables.print_bench, document | {"timings": rows[1:]})


def test_the_selftest_is_a_line_for_each_kernel_and_what_fails() -> None:
    cases = [{"kernel": "cpu amx", "case": f"case {m}", "ratio": 0.25 * m, "ok": 0.25 * m <= 1} for m in range(6)]
    document = {"machine": "a", "cases": [*cases, cases[0] | {"kernel": "reference"}], "unavailable": {"cuda": "no"}}
    lines = [line.split() for line in printed(60, tables.print_selftest, document).splitlines()]
    assert ["│", "cpu", "amx", "│", "6", "│", "1.25", "│", "1", "WRONG", "│"] in lines
    assert ["│", "reference", "│", "1", "│", "0", "│", "ok", "│"] in lines
    assert sum("case" in line[1:2] and line[0] == "│" for line in lines) == 1  # the wrong one
    every = printed(60, tables.print_selftest, document, True).splitlines()
    assert sum(line.startswith("│ case") for line in every) == 7
    assert every[-1] == "6 of 7 cases hold their bound"


def test_refusals_of_a_kind_are_one_line() -> None:
    reason = "weight '{0}' is INT8 [{1}, 768], not INT4 or UINT4, at node 'layer.{0}'"
    rows = [{"node": f"l{i}/MatMul", "reason": reason.format(i, 768 * i), "at": ""} for i in range(37)]
    rows.insert(5, {"node": "odd", "reason": "Concat along axis 0, at node 'c'", "at": ""})
    assert tables.refusals(rows) == [
        f"refused: 37 products, e.g. l0/MatMul: {rows[0]['reason']}",
        "refused: odd: Concat along axis 0, at node 'c'",
    ]
    document: dict[str, Any] = {"found": [], "refused": rows, "outside": [], "operators": {"MatMul": 38}, "advice": []}
    document |= {"file_bytes": 1, "external_bytes": 0, "onnxruntime_bytes": 0, "unsupported": ["this"]}
    said = printed(200, tables.print_summary, document).splitlines()
    assert said[-1] == "no 4-bit decode chain found, 38 refused"
    assert "`lut4tool run` does not serve it, for 1 reason:" in said
    document |= {"found": [SITE], "refused": [], "unsupported": ["this", "that"], "packed_bytes": 1, "dense_bytes": 1}
    said = printed(200, tables.print_summary, document).splitlines()
    assert said[-1] == "1 chain found, 0 refused"
    assert "`lut4tool run` does not serve it, for 2 reasons:" in said


def test_the_demo_says_how_its_figures_agree() -> None:
    row = {"model": "rewritten", "engine": "lut4tool", "difference": 0.0, "load_milliseconds": 1.0, "peak_bytes": 1}
    row |= {"run_milliseconds": 1.0, "model_bytes": 1, "kernels": ["q/forward: cpu amx", "q/adjoint: cpu amx"]}
    document = {"dim": 1024, "hidden": 2816, "sites": 14, "witness_elements": 25_690_112, "dense_bytes": 51_380_224}
    document |= {"original_bytes": 1, "rewritten_bytes": 1, "rows": [row], "missing": {}}
    said = printed(200, tables.print_demo, document)
    assert (
        "25,690,112 decoded weights were compared (each weight serves two products, and is compared for both)" in said
    )
    assert "its 12,845,056 weights would be 51.4 MB as float32" in said
    assert said.endswith("lut4tool's products of packed weights were served by cpu amx\n")


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [
        ("abcdefghij", 10, "abcdefghij"),
        ("abcdefghij", 9, "abc...hij"),
        ("abcdefghij", 8, "abc...ij"),
        ("abcdefghij", 4, "a..."),
        ("量子化された重み", 11, "量子...重み"),
        ("量子化された重み", 10, "量子...み"),
        ("", 4, ""),
    ],
)
def test_names_lose_their_middle(text: str, width: int, short: str) -> None:
    assert tables.shortened(text, width) == short
    assert cell_len(short) <= width


def columns(width: int, *words: str) -> str:
    """What a command prints on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, "-m", "lut4tool.cli", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment | {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
    ) as process:
        os.close(theirs)
        pieces = []
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # Linux's end of a terminal
                break
            if not piece:
                break
            pieces.append(piece)
        assert process.stderr is not None
        assert process.stderr.read() == b""
    os.close(ours)
    assert process.returncode == 0
    return b"".join(pieces).decode()


@pytest.mark.parametrize("width", [80, 60])
def test_on_a_terminal_and_in_a_pipe(width: int, tmp_path: Path) -> None:
    model = build(rows=12, cols=10, block=8).model
    next(node for node in model.graph.node if node.op_type == "MatMul").name = NAME
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    head = columns(width, "inspect", str(path)).split("operators:")[0]
    assert_fits(head, width)
    assert head.splitlines()[:2] == ["1 found", NAME]
    piped = subprocess.run(
        [sys.executable, "-m", "lut4tool.cli", "inspect", str(path)], capture_output=True, text=True, check=True
    ).stdout
    row = next(line for line in piped.splitlines() if NAME in line)
    assert "Lookup4MatMul" in row
    assert "12 x 10" in row
