"""Model files and the weights beside them: safe paths, mapped views, clear limits, atomic writes."""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath, PureWindowsPath
from typing import BinaryIO, NamedTuple

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import AttributeProto

from lut4tool import native
from lut4tool.errors import Lut4Error

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    _LOCKS = False
else:
    _LOCKS = True

#: Protobuf reads and writes no message from this size on.
PROTO_LIMIT = (1 << 31) - 1

#: Types that share bytes in raw data: TensorProto name -> bits an element.
_SUB_BYTE = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}

#: Types of attributes that hold no tensor and no graph; what is there in spite of its type, nobody reads.
PLAIN = frozenset(
    {
        AttributeProto.INT,
        AttributeProto.FLOAT,
        AttributeProto.STRING,
        AttributeProto.INTS,
        AttributeProto.FLOATS,
        AttributeProto.STRINGS,
    }
)

#: Names of our temporary files.
_TEMPORARY = re.compile(r"\..{0,40}\.[0-9a-f]{12}\.lut4tool", re.DOTALL)
#: Seconds that a folder is waited for, and between two looks at it.
_PATIENCE, _PAUSE = 600.0, 0.05
#: Signs of a name that is said whole.
_MOST_SIGNS = 1000
#: Bytes read at a time.
_PIECE = 1 << 22

#: Dims of more are refused: the largest that NumPy has, elements of 8 bytes included.
_MOST_DIMS, _MOST_ELEMENTS = 64, 1 << 59

PathLike = str | os.PathLike[str]


class StorageError(Lut4Error):
    """A file that cannot be read or written as asked, or external data that is not where the model says."""


def read_model(path: PathLike) -> onnx.ModelProto:
    """Read an ONNX model; external data stays in its files.

    Raises StorageError, one sentence, for a missing, empty, cut, oversized, unreadable or foreign file.
    """
    name = os.fspath(path)
    try:
        check_file(name, "an .onnx file")
        with open(name, "rb") as file:
            facts = os.fstat(file.fileno())
            if facts.st_size == 0:
                raise StorageError(f"{name} is empty")
            if facts.st_size > PROTO_LIMIT:
                size = size_text(facts.st_size)
                raise StorageError(f"{name} is {size}; protobuf reads at most 2 GiB: its weights must be external data")
            data = file.read()
    except OSError as error:
        raise StorageError(f"cannot read {name}: {reason(error)}") from error
    return parse_model(data, name)


def check_file(path: PathLike, wanted: str) -> None:
    """Raise StorageError for a pipe, a socket or a device, which cannot be read from its start or never end.

    Before it is opened: that waits at a pipe. What is missing, or a folder, says so itself when it is opened.
    """
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise StorageError(f"{os.fspath(path)} is not a regular file; {wanted} is expected")


def parse_model(data: bytes, name: str = "the model") -> onnx.ModelProto:
    """Parse the bytes of an ONNX model; `name` is what an error calls it. Raises StorageError."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise StorageError(f"{name} is cut short or is not an ONNX model") from error
    if not model.HasField("graph") or (model.ir_version >= 3 and not model.opset_import):
        missing = "opset_import" if model.HasField("graph") else "graph"
        raise StorageError(f"{name} is cut short or is not an ONNX model: it has no {missing}")
    for names in _names(model):
        for text in names:
            if type(text) is bytes:  # what protobuf gives for text that is not UTF-8
                raise StorageError(f"{name} is damaged or is not an ONNX model: its name {text!r} is not UTF-8")
    return model


def _names(model: onnx.ModelProto) -> Iterator[Iterable[str | bytes]]:
    """Every name that a model gives to values, operators, attributes, domains, functions and files, some at a time."""
    yield [entry.domain for entry in model.opset_import]
    for function in model.functions:
        yield (function.domain, function.name, function.overload, *function.input, *function.output)
        yield (*function.attribute, *(entry.domain for entry in function.opset_import))
    tensors: list[onnx.TensorProto] = []
    bodies: list[onnx.GraphProto | onnx.FunctionProto] = [model.graph, *model.functions]
    for body in bodies:
        for node in body.node:
            yield (node.op_type, node.name, node.domain, node.overload, *node.input, *node.output)
            yield (text for attribute in node.attribute for text in (attribute.name, attribute.ref_attr_name))
            tensors += [a.t for a in node.attribute if a.type not in PLAIN and a.HasField("t")]
            bodies += subgraphs(node)
        if isinstance(body, onnx.GraphProto):
            yield (value.name for value in (*body.input, *body.output))
            tensors += body.initializer
    for tensor in tensors:
        yield (tensor.name, *(text for entry in tensor.external_data for text in (entry.key, entry.value)))


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs among a node's attributes."""
    found: list[onnx.GraphProto] = []
    for attribute in node.attribute:
        if attribute.type in PLAIN:
            continue
        if attribute.HasField("g"):  # reading a field that is not there makes one
            found.append(attribute.g)
        found += attribute.graphs
    return found


def nbytes(tensor: onnx.TensorProto) -> int:
    """Bytes of a tensor as raw data, from its type and dims alone (strings: the bytes they hold)."""
    if tensor.data_type == onnx.TensorProto.STRING:
        return sum(map(len, tensor.string_data))
    if not tensor.data_type:
        raise StorageError(f"tensor '{tensor.name}' has no type")
    try:
        kind = onnx.TensorProto.DataType.Name(tensor.data_type)
        bits = _SUB_BYTE.get(kind) or 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, ValueError) as error:
        raise StorageError(f"tensor '{tensor.name}' has unknown type {tensor.data_type}") from error
    if any(dim < 0 for dim in tensor.dims):
        raise StorageError(f"tensor '{tensor.name}' has negative dims {list(tensor.dims)}")
    if len(tensor.dims) > _MOST_DIMS or math.prod(dim or 1 for dim in tensor.dims) >= _MOST_ELEMENTS:
        dims = list(tensor.dims) if len(tensor.dims) <= _MOST_DIMS else f"of rank {len(tensor.dims)}"
        raise StorageError(f"tensor '{tensor.name}' has dims {dims}, which no array can have")
    return -(-math.prod(tensor.dims) * bits // 8)


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the tensor's data is in a file beside the model."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def location(tensor: onnx.TensorProto) -> str:
    """The path that an external tensor gives, as written."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def external_tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Every tensor of a model whose data is in a file: initializers and attributes, functions and training included."""
    training = (graph for info in model.training_info for graph in (info.initialization, info.algorithm))
    bodies: list[onnx.GraphProto | onnx.FunctionProto] = [model.graph, *training, *model.functions]
    tensors: list[onnx.TensorProto] = []
    for body in bodies:  # grows: no recursion on the depth of subgraphs
        if isinstance(body, onnx.GraphProto):
            tensors += body.initializer
            for sparse in body.sparse_initializer:
                tensors += (sparse.values, sparse.indices)
        for node in body.node:
            bodies += subgraphs(node)
            for attribute in node.attribute:
                if attribute.type in PLAIN:
                    continue
                holds = attribute.HasField
                tensors += (*([attribute.t] if holds("t") else ()), *attribute.tensors)
                single = [attribute.sparse_tensor] if holds("sparse_tensor") else ()
                for sparse in (*single, *attribute.sparse_tensors):
                    tensors += (sparse.values, sparse.indices)
    return [tensor for tensor in tensors if is_external(tensor)]


class Tensors:
    """Values of a model's tensors; a file of external data is mapped once, read-only.

    base_dir: the model's folder (None: no file, so external data is refused).
    allow_external: folders outside it that may hold data, such as the blobs that a model hub's links lead to.
    """

    def __init__(self, base_dir: PathLike | None, allow_external: Iterable[PathLike] = ()) -> None:
        self.base_dir = None if base_dir is None else os.fspath(base_dir) or "."
        self._folders = [os.path.realpath(folder) for folder in allow_external]
        if self.base_dir is not None:
            self._folders.append(os.path.realpath(self.base_dir))
        self._maps: dict[str, _Map] = {}
        self._touched: set[str] = set()  # of the maps, since `release`
        self._paths: dict[str, str] = {}  # by location, checked
        self._versions: dict[str, tuple[int, int]] = {}

    def array(self, tensor: onnx.TensorProto) -> np.ndarray:
        """Return the tensor as a read-only array: a view where bytes are stored as they are used.

        bfloat16, float8 and the sub-byte types come as ml_dtypes (sub-byte: one element a byte, a copy).
        A view of external data may be unaligned. Raises StorageError.
        """
        if tensor.HasField("segment"):
            raise StorageError(f"tensor '{tensor.name}' is stored in segments, which ONNX runtimes do not read")
        if tensor.data_type == onnx.TensorProto.STRING and (is_external(tensor) or tensor.HasField("raw_data")):
            raise StorageError(f"tensor '{tensor.name}' holds strings as raw data, which ONNX does not define")
        if is_external(tensor):
            raw = self.raw(tensor)
        elif tensor.HasField("raw_data"):
            raw, size = np.frombuffer(tensor.raw_data, np.uint8), nbytes(tensor)
            if raw.size != size:
                raise StorageError(f"tensor '{tensor.name}' holds {raw.size} bytes; its type and dims need {size}")
        else:
            return _converted(tensor)
        if onnx.TensorProto.DataType.Name(tensor.data_type) in _SUB_BYTE:
            packed = onnx.TensorProto(
                data_type=tensor.data_type, dims=tensor.dims, name=tensor.name, raw_data=raw.tobytes()
            )
            return _converted(packed)
        return raw.view(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).reshape(tuple(tensor.dims))

    def path(self, tensor: onnx.TensorProto) -> str:
        """Return the real path of an external tensor's file, checked. Raises StorageError."""
        place = location(tensor)
        if place in self._paths:
            return self._paths[place]
        what = f"external data of tensor '{tensor.name}'"
        if self.base_dir is None:
            raise StorageError(f"{what} is in file '{place}', but the model came without a folder: give base_dir")
        if not place or "\0" in place:
            raise StorageError(f"{what} has no usable location")
        if PurePosixPath(place).is_absolute() or PureWindowsPath(place).anchor:
            raise StorageError(f"{what} has the absolute path '{place}'; a path relative to the model is expected")
        real = os.path.realpath(os.path.join(self.base_dir, place))
        if not any(inside(real, folder) for folder in self._folders):
            raise StorageError(
                f"{what} is '{place}', which leads outside the model's folder to {real} "
                f"(--allow-external {os.path.dirname(real)} would accept it)"
            )
        try:
            mode = os.stat(real).st_mode
        except OSError as error:
            raise StorageError(f"{what}, file '{place}', cannot be read: {reason(error)}") from error
        if not stat.S_ISREG(mode):
            raise StorageError(f"{what} is '{place}', which is not a regular file")
        self._paths[place] = real
        return real

    def touch(self, tensor: onnx.TensorProto) -> None:
        """Count a tensor's file as read since the last `release`, for those who kept its array."""
        if is_external(tensor):
            self._map(tensor)

    def release(self) -> None:
        """Let go of the mapped pages that were read: they come back from the file when they are needed again."""
        for real in self._touched:
            source = getattr(self._maps[real].data, "_mmap", None)
            if source is not None and hasattr(mmap, "MADV_DONTNEED"):
                source.madvise(mmap.MADV_DONTNEED)
        self._touched.clear()

    def check_whole(self) -> None:
        """Raise StorageError where a mapped file was cut, or its disk failed, so that zeros were read instead."""
        for real, held in self._maps.items():
            if held.watch is not None and held.watch.lost:
                raise StorageError(f"{real} was cut while it was read, or its disk failed")

    def check_unchanged(self) -> None:
        """Raise StorageError where a mapped or noted file was cut, written to or replaced since then."""
        self.check_whole()
        for name, version in self._versions.items():
            if not os.path.exists(name) or _version(os.stat(name)) != version:
                raise StorageError(f"{name} changed while it was read")

    def note(self, path: PathLike) -> None:
        """Let `check_unchanged` look at another file too, from now on. Raises StorageError where it is missing."""
        try:
            self._versions[os.fspath(path)] = _version(os.stat(path))
        except OSError as error:
            raise StorageError(f"cannot read {os.fspath(path)}: {reason(error)}") from error

    def raw(self, tensor: onnx.TensorProto) -> np.ndarray:
        """Bytes of an external tensor: a view of its file's map. Raises StorageError."""
        data, size = self._map(tensor), nbytes(tensor)
        what = f"external data of tensor '{tensor.name}'"
        entries = {entry.key: entry.value for entry in tensor.external_data}
        try:
            offset, length = int(entries.get("offset") or 0), int(entries.get("length") or size)
        except ValueError as error:
            raise StorageError(f"{what} has an offset or length that is no number") from error
        if offset < 0 or length != size:
            raise StorageError(
                f"{what} has offset {offset} and length {length}; its type and dims need {size} bytes from 0 or later"
            )
        if offset + size > data.size:
            raise StorageError(
                f"{what} ends at byte {offset + size} of '{location(tensor)}', which has {data.size}: "
                "the file is cut or belongs to another model"
            )
        return data[offset : offset + size]

    def _map(self, tensor: onnx.TensorProto) -> np.ndarray:
        real = self.path(tensor)
        if real not in self._maps:
            try:
                self._versions[real] = _version(os.stat(real))
                self._maps[real] = _map(real)
            except (OSError, ValueError) as error:
                raise StorageError(
                    f"external data of tensor '{tensor.name}' in '{location(tensor)}' cannot be read: {reason(error)}"
                ) from error
        self._touched.add(real)
        return self._maps[real].data


class _Map(NamedTuple):
    """A mapped file, and who watches it (None: an empty file has no map)."""

    data: np.ndarray
    watch: native.Watch | None


def _map(path: str) -> _Map:
    if not os.path.getsize(path):
        return _Map(np.empty(0, np.uint8), None)
    data = np.memmap(path, np.uint8, "r")
    return _Map(data, native.Watch(data))


def write_atomic(path: PathLike, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file whole or not at all: a temporary file beside it, fsync, then os.replace.

    `content` is the bytes, or a function that writes them to the open file. On any error, Ctrl-C included, the
    temporary file is removed and what was at `path` stays. An old file's mode is kept; a new one's is the umask's.
    A link is followed. Raises StorageError where the system refuses.
    """
    name = os.path.realpath(path)
    if os.path.exists(name) and not (os.path.isfile(name) or os.path.isdir(name)):
        raise StorageError(f"cannot write {os.fspath(path)}: it is not a regular file")
    try:
        with held(os.path.dirname(name)), temporary(name) as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            commit(file, name)
    except OSError as error:
        raise StorageError(f"cannot write {os.fspath(path)}: {reason(error)}") from error


@contextlib.contextmanager
def held(folder: str) -> Iterator[bool]:
    """Hold a folder: one lut4tool at a time places files in it, and removes what a killed one left there.

    Yield whether the system can lock folders. Raises StorageError where another holds it for very long.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # missing, or one that may be written and not listed: what writes says so
        yield False
        return
    try:
        alone = _lock(handle, folder)
        if alone:
            _sweep(folder)
        yield alone
    finally:
        os.close(handle)  # and so unlocked


def _lock(handle: int, folder: str) -> bool:
    """Lock a folder, in turn; return whether its file system can."""
    if not _LOCKS:
        return False
    for _ in range(int(_PATIENCE / _PAUSE)):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE)
        except OSError:
            return False
        else:
            return True
    raise StorageError(f"another process has been writing into {folder} for {_PATIENCE:.0f} seconds")


def _sweep(folder: str) -> None:
    """Remove temporary files that a killed process left: nobody else has any while the folder is held."""
    for name in os.listdir(folder):
        if _TEMPORARY.fullmatch(name):
            with contextlib.suppress(OSError):  # another user's
                os.unlink(os.path.join(folder, name))


@contextlib.contextmanager
def temporary(path: str) -> Iterator[BinaryIO]:
    """Open a new file beside `path`, whose folder is held; it is removed at the end unless `commit` named it."""
    folder, base = os.path.split(path)
    name = os.path.join(folder, f".{base[:40]}.{secrets.token_hex(6)}.lut4tool")  # a name has at most 255 bytes
    try:
        with open(name, "xb") as file:
            yield file
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def commit(file: BinaryIO, path: str) -> None:
    """Give an open temporary file its name, durably."""
    file.flush()
    if os.path.isfile(path):
        shutil.copymode(path, file.name)
    os.fsync(file.fileno())
    os.replace(file.name, path)
    _sync_folder(os.path.dirname(path) or ".")


@contextlib.contextmanager
def new_file(path: str) -> Iterator[BinaryIO]:
    """Open a file that gets its name at the end, whole and durably; on any error nothing is left.

    Raises FileExistsError where the name is taken: an existing file is never touched.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    with temporary(path) as file:
        yield file
        settle(file, path)


def settle(file: BinaryIO, path: str) -> None:
    """Give an open temporary file a name that nothing has, durably. Raises FileExistsError."""
    file.flush()
    os.fsync(file.fileno())
    try:
        os.link(file.name, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        os.rename(file.name, path)
    _sync_folder(os.path.dirname(path) or ".")


def copy_new(source: PathLike, path: PathLike) -> None:
    """Copy a file to a new name by the kernel, durably, holes as holes; an existing file is never touched.

    Raises StorageError, or FileExistsError where the name is taken; nothing is left at `path` on any error or Ctrl-C.
    """
    target = os.fspath(path)
    try:
        with open(source, "rb") as reader, new_file(target) as writer:
            before = _version(os.fstat(reader.fileno()))
            _copy_bytes(reader, writer)
            if _version(os.fstat(reader.fileno())) != before:
                raise StorageError(f"{os.fspath(source)} changed while it was copied")
    except FileExistsError:
        raise
    except OSError as error:
        raise StorageError(f"cannot copy {os.fspath(source)} to {target}: {reason(error)}") from error


def same_bytes(one: PathLike, other: PathLike) -> bool:
    """Whether two regular files can be read and hold the same bytes."""
    with contextlib.suppress(OSError), open(one, "rb", buffering=0) as first, open(other, "rb", buffering=0) as second:
        if os.fstat(first.fileno()).st_size != os.fstat(second.fileno()).st_size:
            return False
        while piece := first.read(_PIECE):
            if piece != second.read(len(piece)):
                return False
        return True
    return False


def _version(facts: os.stat_result) -> tuple[int, int]:
    """What changes when a file's bytes do."""
    return facts.st_size, facts.st_mtime_ns


def size_text(size: int) -> str:
    """A size as a person reads it: 61 bytes, 12.7 MB, 4.5 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"


def with_data(file: int, data: int) -> str:
    """The size of a model in words: of its file and of the external data that it uses, in bytes."""
    return f"{size_text(file + data)} with its data" if data else size_text(file)


def abridged(text: str) -> str:
    """A name or a sentence as it is said; the middle of a very long one is left out.

    Names are put in front of others, of all that is in a subgraph or a function: a megabyte would be there many times.
    """
    return text if len(text) <= _MOST_SIGNS else f"{text[: _MOST_SIGNS // 2]} ... {text[-_MOST_SIGNS // 2 :]}"


def _copy_bytes(reader: BinaryIO, writer: BinaryIO) -> None:
    """Copy the whole of one file into another, new one; only stretches that hold data are moved."""
    size = os.fstat(reader.fileno()).st_size
    os.ftruncate(writer.fileno(), size)
    for start, stop in _stretches(reader.fileno(), size):
        done = start
        with contextlib.suppress(OSError, AttributeError):  # another file system, or not Linux: plain reads below
            while done < stop:
                moved = os.copy_file_range(reader.fileno(), writer.fileno(), stop - done, done, done)
                if not moved:
                    break
                done += moved
        reader.seek(done)
        writer.seek(done)
        while done < stop:
            piece = reader.read(min(stop - done, _PIECE))
            if not piece:
                raise OSError(errno.EIO, "the file shrank while it was copied")
            writer.write(piece)
            done += len(piece)
    writer.flush()


def _stretches(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of a file that are not holes; all of it where the system does not say."""
    start = 0
    while start < size:
        try:
            start = os.lseek(file, start, os.SEEK_DATA)
            stop = os.lseek(file, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            stop = size
        except AttributeError:  # no SEEK_DATA on this system
            stop = size
        yield start, stop
        start = stop


def _sync_folder(folder: str) -> None:
    """Make a rename in `folder` durable, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def inside(path: str, folder: str) -> bool:
    """Whether a real path lies below a real folder."""
    return path.startswith(folder.rstrip(os.sep) + os.sep)


def reason(error: BaseException) -> str:
    """What went wrong, in the system's words and without its number."""
    text = getattr(error, "strerror", None) or str(error)
    return text[:1].lower() + text[1:]


def _converted(tensor: onnx.TensorProto) -> np.ndarray:
    """A tensor of typed fields, strings or shared bytes, by onnx."""
    try:
        array = onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise StorageError(f"tensor '{tensor.name}' cannot be read: {error}") from error
    array.flags.writeable = False
    return array
