"""What a rewrite writes: files that are whole at every moment, and nothing else."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path

import onnx
import pytest
from differences import compare
from onnx import TensorProto
from rewriting import assert_same_results

from build import Built, build
from lut4tool import storage
from lut4tool.recognize import recognize
from lut4tool.rewrite import RewriteError, rewrite
from lut4tool.storage import StorageError


def write(model: onnx.ModelProto, path: Path, external: str = "") -> Path:
    """Write a model, its initializers in one external file where `external` names it (at offsets with gaps)."""
    model = copy.deepcopy(model)
    if external:
        (path.parent / external).parent.mkdir(exist_ok=True, parents=True)
        with (path.parent / external).open("wb") as data:
            for tensor in model.graph.initializer:
                if len(tensor.raw_data) < 64:  # the literals
                    continue
                data.seek(-(-(data.tell() + 1) // 4096) * 4096)
                entries = (("location", external), ("offset", data.tell()), ("length", len(tensor.raw_data)))
                data.write(tensor.raw_data)
                for key, value in entries:
                    tensor.external_data.add(key=key, value=str(value))
                tensor.data_location = TensorProto.EXTERNAL
                tensor.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def built() -> Built:
    return build(rows=64, cols=64, block=32, perm="written")


def load(path: Path) -> onnx.ModelProto:
    return onnx.load(path)


def test_to_a_new_file_with_a_witness(built, tmp_path):
    source = write(built.model, tmp_path / "in.onnx")
    report = rewrite(source, tmp_path / "out.onnx")
    assert load(source) == built.model
    assert_same_results(built, load(tmp_path / "out.onnx"))
    document = report.to_json()
    assert document["rewritten"] == [
        {
            "node": "dec/MatMul",
            "op": "Lookup4MatMul",
            "rows": 64,
            "cols": 64,
            "block_size": 32,
            "weight_dtype": "float32",
            "bytes": "kept",
            "witness": {"compared": 4096, "elements": 4096, "all": True},
        }
    ]
    assert document["refused"] == []
    assert document["output_bytes"] == (tmp_path / "out.onnx").stat().st_size
    assert document["input_bytes"] == source.stat().st_size
    assert (document["packed_bytes"], document["dense_bytes"]) == (2048 + 128 * 4 + 64, 64 * 64 * 4)


@pytest.mark.parametrize("external", ["", "w.bin", "data/w.bin"])
def test_in_place(built, tmp_path, external):
    source = write(built.model, tmp_path / "m.onnx", external)
    before = files(tmp_path)
    rewrite(source, source)
    after = files(tmp_path)
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] != before[name]] == ["m.onnx"]
    assert_same_results(built, load(source))


@pytest.mark.parametrize("external", ["w.bin", "data/w.bin"])
def test_the_same_folder_keeps_external_data_by_reference(built, tmp_path, external):
    source = write(built.model, tmp_path / "in.onnx", external)
    rewrite(source, tmp_path / "out.onnx")
    assert files(tmp_path).keys() == {"in.onnx", "out.onnx", external}
    assert compare(storage.read_model(source), storage.read_model(tmp_path / "out.onnx")).wrong == []
    assert_same_results(built, load(tmp_path / "out.onnx"))


@pytest.mark.parametrize("external", ["w.bin", "data/w.bin"])
def test_another_folder_gets_a_copy(built, tmp_path, external):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    source = write(built.model, tmp_path / "a" / "in.onnx", external)
    report = rewrite(source, tmp_path / "b" / "out.onnx")
    assert files(tmp_path / "b").keys() == {"out.onnx", external}
    assert files(tmp_path / "b")[external] == files(tmp_path / "a")[external]
    assert (tmp_path / "b" / external).stat().st_nlink == 1
    size = storage.size_text((tmp_path / "a" / external).stat().st_size)
    assert report.notes == (f"external data '{external}' ({size}) was copied as '{external}'",)
    assert compare(storage.read_model(source), storage.read_model(tmp_path / "b" / "out.onnx")).wrong == []
    assert_same_results(built, load(tmp_path / "b" / "out.onnx"))


def test_a_taken_name_gets_a_number(built, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "w.bin").write_bytes(b"of another model")
    source = write(built.model, tmp_path / "in.onnx", "w.bin")
    report = rewrite(source, tmp_path / "b" / "out.onnx")
    assert files(tmp_path / "b").keys() == {"out.onnx", "w.bin", "w-1.bin"}
    assert (tmp_path / "b" / "w.bin").read_bytes() == b"of another model"
    size = storage.size_text((tmp_path / "w.bin").stat().st_size)
    assert report.notes == (f"external data 'w.bin' ({size}) was copied as 'w-1.bin'",)
    before, after = storage.read_model(source), storage.read_model(tmp_path / "b" / "out.onnx")
    assert {storage.location(tensor) for tensor in after.graph.initializer} == {"w-1.bin"}
    for tensor in after.graph.initializer:
        next(entry for entry in tensor.external_data if entry.key == "location").value = "w.bin"
    assert compare(before, after).wrong == []
    assert_same_results(built, load(tmp_path / "b" / "out.onnx"))


def test_out_is_never_the_data(built, tmp_path):
    source = write(built.model, tmp_path / "in.onnx", "w.bin")
    (tmp_path / "b").mkdir()
    before = files(tmp_path)
    with pytest.raises(RewriteError, match=r"holds the model's external data 'w\.bin'"):
        rewrite(source, tmp_path / "w.bin", force=True)
    assert files(tmp_path) == before
    rewrite(source, tmp_path / "b" / "w.bin")
    assert_same_results(built, load(tmp_path / "b" / "w.bin"))


def test_data_of_a_replaced_model_is_named_and_kept(built, tmp_path):
    out = write(built.model, tmp_path / "out.onnx", external="out.onnx.data")
    data = (tmp_path / "out.onnx.data").read_bytes()
    source = write(built.model, tmp_path / "in.onnx")
    (note,) = rewrite(source, out, force=True).notes
    size = storage.size_text(len(data))
    assert note == f"out.onnx.data ({size}) held data of the model that was replaced; this one does not use it"
    assert (tmp_path / "out.onnx.data").read_bytes() == data
    assert rewrite(source, out, force=True).notes == ()  # the one that is replaced now has none
    out = write(built.model, tmp_path / "out.onnx", external="out.onnx.data")
    assert rewrite(out, out).notes == ()  # in place it is still used
    out.write_bytes(b"no model")
    assert rewrite(source, out, force=True).notes == ()


def test_an_existing_out_needs_force(built, tmp_path):
    source = write(built.model, tmp_path / "in.onnx")
    out = tmp_path / "out.onnx"
    out.write_bytes(b"precious")
    with pytest.raises(RewriteError, match="exists; --force replaces it"):
        rewrite(source, out)
    assert out.read_bytes() == b"precious"
    rewrite(source, out, force=True)
    assert_same_results(built, load(out))


def test_places_that_cannot_be_written(built, tmp_path):
    source = write(built.model, tmp_path / "in.onnx")
    with pytest.raises(RewriteError, match=r"the folder .* does not exist"):
        rewrite(source, tmp_path / "none" / "out.onnx")
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(RewriteError, match="not a regular file"):
            rewrite(source, target, force=True)
    with pytest.raises(StorageError, match="no such file"):
        rewrite(tmp_path / "none.onnx", tmp_path / "out.onnx")
    assert files(tmp_path).keys() == {"in.onnx"}


def test_a_dry_run_writes_nothing(built, tmp_path):
    source = write(built.model, tmp_path / "in.onnx")
    before = files(tmp_path)
    report = rewrite(source, tmp_path / "out.onnx", dry_run=True)
    assert files(tmp_path) == before
    rewrite(source, tmp_path / "out.onnx")
    assert report.output_bytes == (tmp_path / "out.onnx").stat().st_size


def test_nothing_to_rewrite_writes_nothing(built, tmp_path):
    source = write(built.model, tmp_path / "in.onnx")
    rewrite(source, source)
    before = files(tmp_path)
    assert rewrite(source, tmp_path / "out.onnx").rewritten == ()
    assert files(tmp_path) == before


def test_data_outside_the_folder_is_refused_and_may_be_allowed(built, tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "b").mkdir()
    source = write(built.model, tmp_path / "m" / "in.onnx", "w.bin")
    (tmp_path / "m" / "w.bin").rename(tmp_path / "blobs" / "abc")
    (tmp_path / "m" / "w.bin").symlink_to(tmp_path / "blobs" / "abc")
    with pytest.raises(StorageError, match="outside the model's folder"):
        rewrite(source, tmp_path / "b" / "out.onnx")
    assert files(tmp_path / "b") == {}
    rewrite(source, tmp_path / "b" / "out.onnx", allow_external=[tmp_path / "blobs"])
    assert not (tmp_path / "b" / "w.bin").is_symlink()
    assert_same_results(built, load(tmp_path / "b" / "out.onnx"))


def test_a_path_through_the_parent_lands_in_outs_folder(built, tmp_path):
    for name in ("m", "shared", "b"):
        (tmp_path / name).mkdir()
    source = write(built.model, tmp_path / "m" / "in.onnx", "../shared/w.bin")
    rewrite(source, tmp_path / "b" / "out.onnx", allow_external=[tmp_path / "shared"])
    assert files(tmp_path / "b").keys() == {"out.onnx", "w.bin"}
    assert_same_results(built, load(tmp_path / "b" / "out.onnx"))


def test_data_is_not_copied_through_a_link_out_of_outs_folder(built, tmp_path):
    for name in ("m", "b", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "b" / "sub").symlink_to("../elsewhere")
    source = write(built.model, tmp_path / "m" / "in.onnx", "sub/w.bin")
    rewrite(source, tmp_path / "b" / "out.onnx")
    assert files(tmp_path / "elsewhere") == {}
    assert files(tmp_path / "b").keys() == {"out.onnx", "w.bin"}
    assert_same_results(built, load(tmp_path / "b" / "out.onnx"))


FULL = OSError(errno.ENOSPC, "No space left on device")
CRASHES = [
    (error, moment, target)
    for target in ("m/in.onnx", "m/old.onnx", "b/old.onnx", "b/new.onnx")
    for moment in ("replace", "fsync")
    for error in (FULL, KeyboardInterrupt())
]
CRASHES += [(KeyboardInterrupt(), "copy_file_range", target) for target in ("b/old.onnx", "b/new.onnx")]


@pytest.mark.parametrize(("error", "moment", "target"), CRASHES)
def test_a_crash_leaves_every_file_whole(built, tmp_path, monkeypatch, error, moment, target):
    for name in ("m", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old.onnx").write_bytes(b"old")
    source = write(built.model, tmp_path / "m" / "in.onnx", "data/w.bin")
    before = files(tmp_path)

    def fail(*args):
        raise error

    monkeypatch.setattr(storage.os, moment, fail)
    with pytest.raises(StorageError if isinstance(error, OSError) else KeyboardInterrupt):
        rewrite(source, tmp_path / target, force=True)
    monkeypatch.undo()
    assert files(tmp_path) == before
    assert not (tmp_path / "b" / "data").exists()


def test_a_disk_that_fills_while_the_proto_is_written(built, tmp_path):
    """The kernel's own limit on a file's size stands in for the full disk."""
    import resource
    import signal

    source = write(built.model, tmp_path / "in.onnx")
    before = files(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(StorageError, match=r"cannot write .*file too large"):
            rewrite(source, source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert files(tmp_path) == before


def test_an_interrupt_after_the_rename_keeps_the_new_model_whole(built, tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    source = write(built.model, tmp_path / "in.onnx", "w.bin")
    replace = os.replace

    def late(*args):
        replace(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(storage.os, "replace", late)
    with pytest.raises(KeyboardInterrupt):
        rewrite(source, tmp_path / "b" / "out.onnx")
    assert files(tmp_path / "b").keys() == {"out.onnx", "w.bin"}
    assert_same_results(built, load(tmp_path / "b" / "out.onnx"))


def test_a_proto_past_the_limit_gets_external_data(built, tmp_path, monkeypatch):
    source = write(built.model, tmp_path / "in.onnx")
    read = storage.read_model(source)
    monkeypatch.setattr("lut4tool.rewrite.read_model", lambda path: read)
    monkeypatch.setattr(storage, "PROTO_LIMIT", 5000)
    whole, replace = copy.deepcopy(read), os.replace
    monkeypatch.setattr(storage.os, "replace", lambda *args: (_ for _ in ()).throw(FULL))
    with pytest.raises(StorageError, match="no space left"):
        rewrite(source, tmp_path / "out.onnx")
    assert files(tmp_path).keys() == {"in.onnx"}
    monkeypatch.setattr(storage.os, "replace", replace)
    read.CopyFrom(whole)
    report = rewrite(source, tmp_path / "out.onnx")
    assert files(tmp_path).keys() == {"in.onnx", "out.onnx", "out.onnx.data"}
    assert report.notes == (
        "the model passes protobuf's 2 GiB: 2.0 KB of weights are external data now, in out.onnx.data",
    )
    assert_same_results(built, load(tmp_path / "out.onnx"))


def test_a_witness_that_differs_writes_nothing(built, tmp_path, monkeypatch):
    """The proof is bent after the fact, as a bug of the recognizer would."""
    import dataclasses

    from lut4tool import rewrite as module

    source = write(built.model, tmp_path / "in.onnx")
    before = files(tmp_path)

    def bent(model, **options):
        report = recognize(model, **options)
        wrong = dataclasses.replace(
            report.proofs[0], attributes={**report.proofs[0].attributes, "high_nibble_first": 0}
        )
        return dataclasses.replace(report, proofs=(wrong,))

    monkeypatch.setattr(module, "recognize", bent)
    report = rewrite(source, tmp_path / "out.onnx")
    assert (report.rewritten, len(report.differing)) == ((), 1)
    assert files(tmp_path) == before
