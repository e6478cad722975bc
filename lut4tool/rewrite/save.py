"""Saving a rewritten model: data first under a new name, then the proto; a crash leaves every old file whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import BinaryIO

import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

from lut4tool import storage
from lut4tool.rewrite.edit import RewriteError
from lut4tool.storage import StorageError, Tensors

Progress = Callable[[str, int, int], None]

#: Where a model grows past protobuf's limit, initializers of at least this many bytes move to a file.
_LEAST_EXTERNAL = 1024
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
    model: onnx.ModelProto, source: str, target: str, tensors: Tensors, progress: Progress | None = None
) -> tuple[int, tuple[str, ...]]:
    """Write `model`, read from `source`, to `target`; return the bytes of its proto and notes for the user.

    External data is kept by reference where both are in one folder, otherwise copied under its name or, where that
    is taken, another. On any error, Ctrl-C included, what was there before is whole and nothing else is left.
    """
    made: list[str] = []
    written: os.stat_result | None = None
    try:
        with storage.temporary(target) as file:
            notes = _place_data(model, source, target, tensors, made, progress)
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


def serialized(model: onnx.ModelProto) -> bytes | None:
    """The bytes of a model; None where they pass what protobuf can read again."""
    try:
        data = model.SerializeToString()
    except EncodeError:  # its text is "Failed to serialize proto", and nothing else is ever the cause
        return None
    return data if len(data) <= storage.PROTO_LIMIT else None


def _place_data(
    model: onnx.ModelProto, source: str, target: str, tensors: Tensors, made: list[str], progress: Progress | None
) -> list[str]:
    """Check every external tensor, and copy their files to another folder; `made` gets what was created."""
    folder = os.path.realpath(os.path.dirname(target) or ".")
    external = [(tensor, tensors.path(tensor)) for tensor in external_tensors(model)]
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
    folder, base = os.path.split(target)
    name = next(name for name in _names(PurePath(base + ".data")) if not os.path.lexists(os.path.join(folder, name)))
    path = os.path.join(folder, name)
    with open(path, "xb") as file:
        made.append(path)
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) >= _LEAST_EXTERNAL:
                _append(file, tensor, name)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return f"the model passes protobuf's 2 GiB: {storage.size_text(size)} of weights are external data now, in {name}"


def _append(file: BinaryIO, tensor: onnx.TensorProto, name: str) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))
    offset = file.tell()
    length = file.write(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", name), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


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
