"""Saving a rewritten model: data first under a new name, then the proto; a crash leaves every old file whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import BinaryIO

import numpy as np
import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

from lut4tool import storage
from lut4tool.recognize.layout import Laid, Layout
from lut4tool.recognize.proof import Proof
from lut4tool.rewrite.edit import NewTensor, RewriteError
from lut4tool.storage import StorageError, Tensors

Progress = Callable[[str, int, int], None]

#: Where a model grows past protobuf's limit, initializers of at least this many bytes move to a file.
_LEAST_EXTERNAL = 1024
#: Tensors laid out anew that are larger than this go to a file.
_MOST_INLINE = 1 << 20
#: Tensors in a file that we write begin at multiples of this, so that a mapped view is aligned.
_ALIGNMENT = 64


def check_target(source: str, target: str, force: bool) -> None:
    """Raise RewriteError where OUT must not or cannot be written: found before any work is done."""
    folder = os.path.dirname(target) or "."
    if not os.path.isdir(folder):
        raise RewriteError(f"cannot write {target}: the folder {folder} does not exist")
    if os.path.exists(target) and not os.path.isfile(target):
        raise RewriteError(f"cannot write {target}: it is not a regular file")
    if os.path.exists(target) and not os.path.samefile(source, target) and not force:
        raise RewriteError(
            f"{target} exists; --force replaces it (force=True in Python), and OUT equal to IN rewrites in place"
        )


def save(
    model: onnx.ModelProto,
    source: str,
    target: str,
    tensors: Tensors,
    progress: Progress | None = None,
    added: Sequence[NewTensor] = (),
) -> tuple[int, tuple[str, ...]]:
    """Write `model`, read from `source`, to `target`; return the bytes of its proto and notes for the user.

    External data is kept by reference where both are in one folder, otherwise copied under its name or, where that
    is taken, another. Of the tensors that were laid out anew, large ones are streamed to a file of their own. On any
    error, Ctrl-C included, what was there before is whole and nothing else is left.
    """
    made: list[str] = []
    written: os.stat_result | None = None
    try:
        with storage.temporary(target) as file:
            external = external_tensors(model)
            notes = _write_large(added, target, tensors, made, progress)
            fill(added, tensors)
            notes += _place_data(external, source, target, tensors, made, progress)
            data = serialized(model)
            if data is None:
                notes.append(_move_out(model, target, made))
                data = model.SerializeToString()
            size = file.write(data)
            written = os.fstat(file.fileno())
            storage.commit(file, target)
            return size, tuple(notes)
    except BaseException as error:
        if written is None or not _is_file(target, written):
            _remove(made)
        if isinstance(error, OSError):
            raise StorageError(f"cannot write {target}: {storage.reason(error)}") from error
        raise


def laid_out(proofs: Iterable[Proof], tensors: Tensors) -> dict[Hashable, bytes]:
    """The data of every tensor that is laid out anew, by Proof.tensor_key. Raises LayoutError."""
    data: dict[Hashable, bytes] = {}
    for proof in proofs:
        layout = Layout(proof, tensors)
        for role, held in proof.roles.items():
            if isinstance(held, Laid) and proof.tensor_key(role) not in data:
                data[proof.tensor_key(role)] = b"".join(map(_raw, layout.pieces(role)))
        tensors.release()
    return data


def fill(added: Sequence[NewTensor], tensors: Tensors) -> None:
    """Lay out the data of new tensors inside the model, but of those whose data is in a file."""
    inline = [new for new in added if not storage.is_external(new.tensor)]
    data = laid_out((new.proof for new in inline), tensors)
    for new in inline:
        new.tensor.raw_data = data[new.proof.tensor_key(new.role)]


def point_out(added: Sequence[NewTensor], target: str) -> None:
    """Make the large ones of new tensors external, as they will be in the file that `save` writes."""
    name, offset = os.path.basename(target) + ".data", 0
    for new in _large(added):
        offset += -offset % _ALIGNMENT
        size = storage.nbytes(new.tensor)
        _point(new.tensor, name, offset, size)
        offset += size


def _large(added: Sequence[NewTensor]) -> list[NewTensor]:
    """Those that go to a file: not a function's, whose Constant nodes hold their data in every runtime."""
    return [new for new in added if storage.nbytes(new.tensor) > _MOST_INLINE and not new.in_function]


def _write_large(
    added: Sequence[NewTensor], target: str, tensors: Tensors, made: list[str], progress: Progress | None
) -> list[str]:
    """Stream large new tensors to a new file beside the model; return a note that says so."""
    large = _large(added)
    if not large:
        return []
    with _new_data(target, made) as (file, name):
        for done, new in enumerate(large):
            if progress:
                progress("laying out weights", done, len(large))
            file.write(bytes(-file.tell() % _ALIGNMENT))
            offset = file.tell()
            for piece in Layout(new.proof, tensors).pieces(new.role):
                file.write(_raw(piece))
                tensors.release()
            _point(new.tensor, name, offset, file.tell() - offset)
        size = file.tell()
    count = f"{len(large)} tensor{'s' * (len(large) > 1)}"
    return [f"{count} laid out anew: {storage.size_text(size)} of external data, in {name}"]


@contextlib.contextmanager
def _new_data(target: str, made: list[str]) -> Iterator[tuple[BinaryIO, str]]:
    """A new file of external data for a model, and its name; durable at the end."""
    folder, base = os.path.split(target)
    name = next(name for name in _names(PurePath(base + ".data")) if not os.path.lexists(os.path.join(folder, name)))
    with open(os.path.join(folder, name), "xb") as file:
        made.append(file.name)
        yield file, name
        file.flush()
        os.fsync(file.fileno())


def _point(tensor: onnx.TensorProto, name: str, offset: int, length: int) -> None:
    """Say where a tensor's external data is."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", name), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def _raw(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def serialized(model: onnx.ModelProto) -> bytes | None:
    """The bytes of a model; None where they pass what protobuf can read again."""
    try:
        data = model.SerializeToString()
    except EncodeError:  # its text is "Failed to serialize proto", and nothing else is ever the cause
        return None
    return data if len(data) <= storage.PROTO_LIMIT else None


def _place_data(
    given: Sequence[onnx.TensorProto],
    source: str,
    target: str,
    tensors: Tensors,
    made: list[str],
    progress: Progress | None,
) -> list[str]:
    """Check every external tensor, and copy their files to another folder; `made` gets what was created."""
    folder = os.path.realpath(os.path.dirname(target) or ".")
    external = [(tensor, tensors.path(tensor)) for tensor in given]
    files = {real: storage.location(tensor) for tensor, real in reversed(external)}
    for real, place in files.items():
        if os.path.exists(target) and os.path.samefile(real, target):
            raise RewriteError(f"cannot write {target}: it holds the model's external data '{place}'")
    if folder == os.path.realpath(os.path.dirname(source) or "."):
        return []
    copies = {}
    for done, (real, place) in enumerate(files.items()):
        if progress:
            progress("copying weights", done, len(files))
        copies[real] = _copy(real, place, folder, os.path.basename(target), made)
    for tensor, real in external:
        if os.path.normpath(storage.location(tensor)) != os.path.normpath(copies[real]):
            next(entry for entry in tensor.external_data if entry.key == "location").value = copies[real]
    return [
        f"external data '{files[real]}' ({storage.size_text(os.path.getsize(real))}) was copied as '{name}'"
        for real, name in copies.items()
    ]


def _copy(real: str, place: str, folder: str, reserved: str, made: list[str]) -> str:
    """Copy a data file into `folder` under its own name or the next free one; return the location."""
    wanted = PurePath(os.path.normpath(place))
    real_parent = os.path.realpath(os.path.join(folder, wanted.parent))
    if ".." in wanted.parts or not storage.inside(os.path.join(real_parent, wanted.name), folder):  # or through a link
        wanted = PurePath(wanted.name)
    for parent in reversed(wanted.parents[:-1]):
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.join(folder, parent))
            made.append(os.path.join(folder, parent))
    for name in _names(wanted):
        path = os.path.join(folder, name)
        if name == reserved or os.path.lexists(path):
            continue
        with contextlib.suppress(FileExistsError):  # made by another process since: the next name
            storage.copy_new(real, path)
            made.append(path)
            return name
    raise AssertionError("names do not end")


def _names(wanted: PurePath) -> Iterator[str]:
    """A name and its numbered variants: weights.bin, weights-1.bin, ..."""
    yield wanted.as_posix()
    number = 1
    while True:
        yield wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}").as_posix()
        number += 1


def _move_out(model: onnx.ModelProto, target: str, made: list[str]) -> str:
    """Move the large initializers of a model that protobuf cannot hold to a new file; return a note that says so."""
    with _new_data(target, made) as (file, name):
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) >= _LEAST_EXTERNAL:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                offset = file.tell()
                length = file.write(tensor.raw_data)
                tensor.ClearField("raw_data")
                _point(tensor, name, offset, length)
        size = file.tell()
    return f"the model passes protobuf's 2 GiB: {storage.size_text(size)} of weights are external data now, in {name}"


def external_tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Every tensor of a model whose data is in a file: initializers and attributes, functions and training included."""
    tensors: list[onnx.TensorProto] = []
    for graph in (
        model.graph,
        *(graph for info in model.training_info for graph in (info.initialization, info.algorithm)),
    ):
        _collect_graph(graph, tensors)
    for function in model.functions:
        _collect(function.node, tensors)
    return [tensor for tensor in tensors if storage.is_external(tensor)]


def _collect_graph(graph: onnx.GraphProto, tensors: list[onnx.TensorProto]) -> None:
    tensors += graph.initializer
    for sparse in graph.sparse_initializer:
        tensors += (sparse.values, sparse.indices)
    _collect(graph.node, tensors)


def _collect(nodes: Iterable[onnx.NodeProto], tensors: list[onnx.TensorProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            tensors += (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                tensors += (sparse.values, sparse.indices)
            for graph in (attribute.g, *attribute.graphs):
                _collect_graph(graph, tensors)


def _is_file(path: str, facts: os.stat_result) -> bool:
    """Whether `path` is the very file that `facts` are of: then the rename happened before the error."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(path), facts)
    return False


def _remove(made: list[str]) -> None:
    """Remove what was created, the newest first."""
    for path in reversed(made):
        with contextlib.suppress(OSError):
            if os.path.isdir(path):
                os.rmdir(path)
            else:
                os.unlink(path)
