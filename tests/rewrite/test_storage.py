"""Reading models and external data that are hostile, cut or misplaced, and writing whole files or none."""

from __future__ import annotations

import errno
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from lut4tool import storage
from lut4tool.storage import StorageError, Tensors, nbytes, read_model, write_atomic

NUMERIC = [number for name, number in TensorProto.DataType.items() if name not in ("UNDEFINED", "STRING")]


def small_model() -> onnx.ModelProto:
    graph = helper.make_graph([], "g", [], [], [numpy_helper.from_array(np.arange(50, dtype=np.float32), "w")])
    return helper.make_model(graph)


def external(place: str, dims=(4,), kind: int = TensorProto.FLOAT, **entries: int | str) -> TensorProto:
    tensor = TensorProto(name="w", data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": place, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with a data file of 64 bytes, in a folder of its own."""
    inside = tmp_path / "model"
    inside.mkdir()
    (inside / "w.bin").write_bytes(np.arange(16, dtype=np.float32).tobytes())
    (tmp_path / "secret.bin").write_bytes(b"s" * 64)
    return inside


# Models


def test_read_model_keeps_external_data_in_its_file(folder):
    model = small_model()
    model.graph.initializer.append(external("nowhere.bin"))
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    assert read_model(folder / "m.onnx") == model


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"hello, this is no model at all", "cut short or is not an ONNX model"),
        (bytes(100), "cut short or is not an ONNX model"),
        (b"\x08\x08", "it has no graph"),
        (small_model().SerializeToString()[:100], "cut short or is not an ONNX model"),
    ],
)
def test_unreadable_content_is_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=sentence) as caught:
        read_model(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_not_utf_8_is_refused(tmp_path):
    """Protobuf gives such a name as bytes, which no text can be joined to."""
    inner = helper.make_graph([helper.make_node("Inner_op", ["in_er"], ["out_er"], "nam_e")], "body", [], [])
    node = helper.make_node("Outer_op", ["x"], ["y_output"], domain="dom_ain", body_attribute=inner)
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("gr_aph", 1, None)], [], [external("w_.bin")])
    function = helper.make_function("f", "Fun_ction", ["for_mal"], [], [], [])
    whole = helper.make_model(graph, functions=[function]).SerializeToString()
    names = "Inner_op in_er out_er nam_e Outer_op y_output dom_ain body_attribute gr_aph w_.bin Fun_ction for_mal"
    (tmp_path / "m.onnx").write_bytes(whole)
    read_model(tmp_path / "m.onnx")
    for name in names.encode().split():
        assert whole.count(name) == 1, name
        (tmp_path / "m.onnx").write_bytes(whole.replace(name, name[:2] + b"\xff" + name[3:]))
        with pytest.raises(StorageError, match="is not UTF-8"):
            read_model(tmp_path / "m.onnx")


def test_a_model_cut_anywhere_is_refused(tmp_path):
    """Also between two fields, where protobuf itself has nothing to say."""
    whole = small_model().SerializeToString()
    for length in range(1, len(whole)):
        (tmp_path / "m.onnx").write_bytes(whole[:length])
        with pytest.raises(StorageError, match="cut short"):
            read_model(tmp_path / "m.onnx")


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(StorageError, match="no such file"):
        read_model(tmp_path / "none.onnx")
    with pytest.raises(StorageError, match="directory"):
        read_model(tmp_path)


def test_a_model_over_2_gib_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "big.onnx"
    with path.open("wb") as file:
        file.truncate((1 << 31) + 5)  # a hole: no disk is used
    with pytest.raises(StorageError, match=r"2\.1 GB; protobuf reads at most 2 GiB"):
        read_model(path)


def test_permission_denied_is_said_in_words(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "m.onnx").touch()
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(StorageError, match=r"cannot read .*m\.onnx: permission denied"):
        read_model(tmp_path / "m.onnx")


# Values of tensors


@pytest.mark.parametrize("kind", NUMERIC, ids=TensorProto.DataType.Name)
def test_every_type_inline_and_external(tmp_path, kind):
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    expected = np.arange(15).astype(dtype).reshape(3, 5)  # odd: the last byte of a sub-byte type is half used
    raw = numpy_helper.from_array(expected, "w")
    (tmp_path / "w.bin").write_bytes(b"abc" + raw.raw_data)
    outside = external("w.bin", (3, 5), kind, offset=3, length=len(raw.raw_data))
    typed = helper.make_tensor("w", kind, [3, 5], expected.ravel().tolist())
    assert nbytes(raw) == len(raw.raw_data)
    for tensor in (raw, outside, typed):
        actual = Tensors(tmp_path).array(tensor)
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tobytes() == expected.tobytes()
        assert not actual.flags.writeable


def test_strings_and_empty_tensors(tmp_path):
    strings = numpy_helper.from_array(np.array(["a", "bc"], object), "s")
    assert Tensors(None).array(strings).tolist() == ["a", "bc"]
    assert nbytes(strings) == 3
    (tmp_path / "empty.bin").touch()
    assert Tensors(tmp_path).array(external("empty.bin", (0, 3))).shape == (0, 3)
    assert Tensors(None).array(numpy_helper.from_array(np.empty((2, 0), np.int64), "e")).shape == (2, 0)


def test_external_data_is_a_view_of_one_map(folder):
    tensors = Tensors(folder)
    first, second = tensors.array(external("w.bin")), tensors.array(external("./w.bin", offset=16))
    assert isinstance(first, np.memmap)
    assert second.tolist() == [4, 5, 6, 7]
    assert second.ctypes.data - first.ctypes.data == 16
    tensors.release()
    assert first.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (external("/etc/passwd"), "absolute path '/etc/passwd'"),
        (external("C:\\data\\w.bin"), "absolute path"),
        (external("../secret.bin"), "outside the model's folder"),
        (external("sub/../../secret.bin"), "outside the model's folder"),
        (external(""), "no usable location"),
        (external("a\0b"), "no usable location"),
        (external("none.bin"), "no such file"),
        (external("."), "outside the model's folder|not a regular file"),
        (external("w.bin", offset=-4), "offset -4"),
        (external("w.bin", offset=60), "ends at byte 76 of 'w.bin', which has 64"),
        (external("w.bin", length=12), "length 12; its type and dims need 16"),
        (external("w.bin", offset="x"), "no number"),
        (external("w.bin", dims=(1 << 40,)), "ends at byte"),
        (external("w.bin", dims=(1 << 40, 1 << 40)), "which no array can have"),
        (external("w.bin", dims=(-1,)), "negative dims"),
        (external("w.bin", kind=99), "unknown type 99"),
    ],
)
def test_hostile_external_data_is_refused(folder, tensor, sentence):
    with pytest.raises(StorageError, match=sentence):
        Tensors(folder).array(tensor)


def test_links_may_not_leave_the_folder(folder):
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    (blobs / "abc").write_bytes((folder / "w.bin").read_bytes())
    (folder / "link.bin").symlink_to(blobs / "abc")
    (folder / "inner.bin").symlink_to("w.bin")
    (folder / "loop.bin").symlink_to("loop.bin")
    assert Tensors(folder).array(external("inner.bin")).tolist() == [0, 1, 2, 3]
    with pytest.raises(StorageError, match=rf"outside.*--allow-external {blobs}"):
        Tensors(folder).array(external("link.bin"))
    assert Tensors(folder, [blobs]).array(external("link.bin")).tolist() == [0, 1, 2, 3]
    with pytest.raises(StorageError, match="outside"):
        Tensors(folder, [folder.parent / "blob"]).array(external("link.bin"))  # a prefix of the name is no parent
    with pytest.raises(StorageError, match=r"loop\.bin"):
        Tensors(folder).array(external("loop.bin"))


def test_a_pipe_is_refused_without_waiting_for_it(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(StorageError, match="not a regular file"):
        Tensors(folder).array(external("pipe"))


def test_a_model_that_is_a_pipe_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "m.onnx")
    with pytest.raises(StorageError, match="is not a regular file"):
        read_model(tmp_path / "m.onnx")


def test_a_model_without_a_folder_has_no_external_data():
    with pytest.raises(StorageError, match="give base_dir"):
        Tensors(None).array(external("w.bin"))


@pytest.mark.parametrize(
    "tensor",
    [
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], raw_data=b"12345"),
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], float_data=[1, 2]),
        TensorProto(name="w", data_type=TensorProto.INT4, dims=[3], raw_data=b"1"),
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], raw_data=b"1234", segment={"begin": 0, "end": 1}),
    ],
)
def test_inline_data_that_is_not_what_it_says(tensor):
    with pytest.raises(StorageError, match="tensor 'w'"):
        Tensors(None).array(tensor)


# Writing


def test_write_atomic_writes_bytes_or_what_a_function_writes(tmp_path):
    path = tmp_path / "out.bin"
    write_atomic(path, b"one")
    assert path.read_bytes() == b"one"
    write_atomic(path, lambda file: file.write(b"two"))
    assert path.read_bytes() == b"two"
    assert names(tmp_path) == ["out.bin"]


def test_the_content_is_whole_before_it_gets_its_name(tmp_path, monkeypatch):
    sizes = []
    replace = os.replace

    def noted(temporary, path):
        sizes.append(Path(temporary).stat().st_size)
        replace(temporary, path)

    monkeypatch.setattr(storage.os, "replace", noted)
    write_atomic(tmp_path / "out.bin", b"abc")
    assert sizes == [3]


def test_modes_of_new_and_replaced_files(tmp_path):
    plain, path = tmp_path / "plain", tmp_path / "out"
    plain.touch()
    write_atomic(path, b"x")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    path.chmod(0o600)
    write_atomic(path, b"y")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError()])
@pytest.mark.parametrize("moment", ["writer", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error, moment):
    path = tmp_path / "out.bin"
    path.write_bytes(b"old")

    def fail(*args):
        raise error

    if moment != "writer":
        monkeypatch.setattr(storage.os, moment, fail)
    expected = StorageError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        write_atomic(path, fail if moment == "writer" else b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["out.bin"]


def test_a_folder_is_held_by_one_at_a_time(tmp_path, monkeypatch):
    order = []

    def work(name):
        with storage.held(str(tmp_path)) as alone:
            assert alone
            order.append(name)
            time.sleep(0.01)
            order.append(name)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, "abcd"))
    assert len(order) == 8
    assert all(first == second for first, second in zip(order[::2], order[1::2], strict=True))
    monkeypatch.setattr(storage, "_PATIENCE", 0.1)
    with storage.held(str(tmp_path)), pytest.raises(StorageError, match="another process has been writing into"):
        write_atomic(tmp_path / "out.bin", b"x")
    assert names(tmp_path) == []


def test_what_a_killed_process_left_is_removed_where_the_folder_can_be_held(tmp_path, monkeypatch):
    left = tmp_path / ".out.bin.0123456789ab.lut4tool"
    left.touch()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_LOCKS", False)
        write_atomic(tmp_path / "out.bin", b"x")
        assert left.exists()  # it may be another process's
    write_atomic(tmp_path / "out.bin", b"y")
    assert names(tmp_path) == ["out.bin"]


def test_a_link_is_written_through(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_atomic(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_copy_of_a_file_that_changes_is_refused(tmp_path, monkeypatch):
    source, copy = tmp_path / "source", storage._copy_bytes
    source.write_bytes(b"x" * 100)

    def slow(reader, writer):
        copy(reader, writer)
        with source.open("ab") as file:
            file.write(b"more")

    monkeypatch.setattr(storage, "_copy_bytes", slow)
    with pytest.raises(StorageError, match="changed while it was copied"):
        storage.copy_new(source, tmp_path / "copy")
    assert names(tmp_path) == ["source"]


@pytest.mark.parametrize("link", [True, False])
def test_a_new_name_is_given_where_nothing_has_it(tmp_path, monkeypatch, link):
    """Also where the file system has no links."""
    if not link:
        monkeypatch.setattr(storage.os, "link", lambda *args: (_ for _ in ()).throw(OSError(errno.EPERM, "no")))
    with storage.new_file(str(tmp_path / "a")) as file:
        file.write(b"1")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_bytes() == b"1"
    with pytest.raises(FileExistsError), storage.temporary(str(tmp_path / "a")) as file:
        storage.settle(file, str(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == b"1"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("sign", ["n", "é", "日", "🌲"])
def test_the_longest_names_can_be_written(tmp_path, sign):
    path = tmp_path / (sign * (255 // len(sign.encode())))
    for content in (b"first", b"second"):
        write_atomic(path, content)
        assert [entry.read_bytes() for entry in tmp_path.iterdir()] == [content]


def test_write_into_a_missing_folder(tmp_path):
    with pytest.raises(StorageError, match=r"cannot write .*no such file"):
        write_atomic(tmp_path / "none" / "out", b"x")


@pytest.mark.parametrize("kernel", [True, False])
def test_copies_keep_bytes_and_holes(tmp_path, monkeypatch, kernel):
    if not kernel:
        monkeypatch.delattr(storage.os, "copy_file_range", raising=False)
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.write(b"head")
        file.seek(40 << 20)
        file.write(b"middle" * 1000)
        file.truncate(80 << 20)
    storage.copy_new(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert (tmp_path / "copy").stat().st_blocks <= source.stat().st_blocks + 16
    with pytest.raises(FileExistsError):
        storage.copy_new(source, tmp_path / "copy")


def test_a_failed_copy_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "source").write_bytes(b"x" * 100)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(StorageError, match="no space left"):
        storage.copy_new(tmp_path / "source", tmp_path / "copy")
    assert names(tmp_path) == ["source"]
