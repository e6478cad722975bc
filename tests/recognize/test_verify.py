"""Every block of every weight, compared by several processes."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path

import onnx
import pytest

from build import Chain, build_many
from lut4tool import rewrite as module
from lut4tool.recognize import recognize, verify
from lut4tool.rewrite import rewrite
from lut4tool.storage import StorageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere one process compares them all")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two large weights in a file of their own, and two processes."""
    monkeypatch.setattr(verify, "_LEAST_ELEMENTS", 1 << 20)
    monkeypatch.setattr(verify.native, "thread_count", lambda: 2)
    monkeypatch.setattr("lut4tool.recognize.witness._PART_ELEMENTS", 1 << 19)
    chains = [Chain(rows=rows, cols=1000, block=64, prefix=f"c{rows}/", seed=rows) for rows in (1500, 2000)]
    onnx.save(build_many(chains).model, tmp_path / "in.onnx", save_as_external_data=True, location="w.bin")
    return tmp_path / "in.onnx"


def test_every_element_by_processes_with_progress(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    monkeypatch.setattr(verify, "_alone", None)  # it is not this process that compares
    report = rewrite(source, source.parent / "out.onnx", verify=True, progress=lambda *said: seen.append(said))
    assert [witness.compared for _, witness in report.rewritten if witness] == [1_500_000, 2_000_000]
    assert all(witness is not None and witness.all for _, witness in report.rewritten)
    parts = [done for what, done, total in seen if (what, total) == ("checking weights", 3_500_000)]
    assert parts == sorted(parts)
    assert len(parts) == 2 + 3
    assert parts[-1] == 3_500_000


def test_a_wrong_proof_is_found_by_a_process(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bent(model, **options):
        report = recognize(model, **options)
        first, last = report.proofs
        wrong = dataclasses.replace(last, attributes={**last.attributes, "high_nibble_first": 0})
        return dataclasses.replace(report, proofs=(first, wrong))

    monkeypatch.setattr(module, "recognize", bent)
    report = rewrite(source, source.parent / "out.onnx", verify=True)
    assert report.rewritten == ()
    assert [refusal.node for refusal in report.differing] == ["MatMul1"]
    assert "differ between onnx.reference and the proof" in report.differing[0].reason


def test_a_process_that_is_killed_is_an_error_and_no_hang(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getpid()
    compare = verify.Chain.compare

    def killed(self, units):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return compare(self, units)

    monkeypatch.setattr(verify.Chain, "compare", killed)
    with pytest.raises(verify.VerifyError, match="was ended by the system"):
        rewrite(source, source.parent / "out.onnx", verify=True)
    assert not (source.parent / "out.onnx").exists()


def test_data_that_is_cut_while_processes_read_it(source: Path) -> None:
    def cut(what: str, done: int, total: int) -> None:
        os.truncate(source.parent / "w.bin", 4096)

    with pytest.raises(StorageError, match=r"w\.bin"):
        rewrite(source, source.parent / "out.onnx", verify=True, progress=cut)
    assert not (source.parent / "out.onnx").exists()
