"""Saving a rewritten model: data first under a new name, then the proto; a crash leaves every old file whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import BinaryIO

import numpy as np
import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

from lut4tool import storage
from lut4tool.recognize.layout import Laid, Layout
from lut4tool.recognize.proof import Proof
from lut4tool.rewrite.edit import NewTensor, RewriteError
from lut4tool.rewrite.place import ALIGNMENT, Folder, point
from lut4tool.storage import StorageError, Tensors

Progress = Callable[[str, int, int], None]

#: Where a model grows past protobuf's limit, initializers of at least this many bytes move to a file.
_LEAST_EXTERNAL = 1024
#: Tensors laid out anew that are larger than this go to a file.
_MOST_INLINE = 1 << 20
#: A model that is replaced is looked at up to this size: one with external data is small.
_MOST_LOOKED_AT = 1 << 24


def check_target(source: str, target: str, force: bool) -> None:
    """Raise RewriteError where OUT must not or cannot be written: found before any work is done."""
    for folder in (os.path.dirname(target) or ".", os.path.dirname(os.path.realpath(target))):  # OUT may be a link
        if not os.path.isdir(folder):
            raise RewriteError(f"cannot write {target}: the folder {folder} does not exist")
    if os.path.exists(target) and not os.path.isfile(target):
        raise RewriteError(f"cannot write {target}: it is not a regular file")
    if os.path.exists(target) and not os.path.samefile(source, target) and not force:
        raise RewriteError(
            f"{target} exists; --force replaces it (force=True in Python), and OUT equal to IN rewrites in place"
        )


def data_bytes(model: onnx.ModelProto, tensors: Tensors | None = None) -> int:
    """Bytes of external data that a model uses; what several tensors share is counted once.

    With `tensors` StorageError is raised where data is missing or cut; no byte is read: the files are mapped.
    """
    held: dict[tuple[str, str], int] = {}
    for tensor in storage.external_tensors(model):
        if tensors is not None:
            tensors.raw(tensor)
        offset = next((entry.value for entry in tensor.external_data if entry.key == "offset"), "0")
        place = storage.location(tensor), offset
        held[place] = max(held.get(place, 0), storage.nbytes(tensor))
    return sum(held.values())


def save(
    model: onnx.ModelProto,
    source: str,
    target: str,
    tensors: Tensors,
    progress: Progress | None = None,
    added: Sequence[NewTensor] = (),
    used_only: bool = False,
) -> tuple[int, tuple[str, ...]]:
    """Write `model`, read from `source`, to `target`; return the bytes of its proto and notes for the user.

    External data is kept by reference where both are in one folder, otherwise copied under its name or, where that
    is taken by other bytes, another (`used_only`: at new offsets, without what the model does not use). Of the tensors
    that were laid out anew, large ones are streamed to a file of their own. A target that is a link stays one. On any
    error, Ctrl-C included, what was there before is whole and nothing else is left.
    """
    real = os.path.realpath(target)
    external = storage.external_tensors(model)
    former = _data_files(target)
    tensors.check_unchanged()
    try:
        with Folder(os.path.dirname(target) or ".", os.path.basename(target)) as folder:
            folder.hold(os.path.dirname(real))
            with storage.temporary(real) as file:
                notes = _write_large(added, folder, tensors, progress)
                fill(added, tensors)
                notes += _place_data(external, source, target, tensors, folder, used_only, progress)
                data = serialized(model)
                if data is None:
                    notes.append(_move_out(model, folder, target))
                    data = model.SerializeToString()
                size = file.write(data)
                file.flush()
                tensors.check_unchanged()
                _commit(file, real, folder)
        return size, (*notes, *_left_over(former, model, target))
    except OSError as error:
        raise StorageError(f"cannot write {target}: {storage.reason(error)}") from error


def _data_files(target: str) -> set[str]:
    """The locations of external data of a model that is about to be replaced, where it is one and is small."""
    with contextlib.suppress(OSError, StorageError):
        if os.path.getsize(target) <= _MOST_LOOKED_AT:
            return {os.path.normpath(storage.location(t)) for t in storage.external_tensors(storage.read_model(target))}
    return set()


def _left_over(former: set[str], model: onnx.ModelProto, target: str) -> list[str]:
    """A note for each file that only the replaced model had: it is not removed, as other models may use it."""
    if not former:
        return []
    used = {os.path.normpath(storage.location(tensor)) for tensor in storage.external_tensors(model)}
    paths = {name: os.path.join(os.path.dirname(target), name) for name in sorted(former - used)}
    return [
        f"{name} ({storage.size_text(os.path.getsize(path))}) held data of the model that was replaced; this one does"
        " not use it"
        for name, path in paths.items()
        if os.path.isfile(path)
    ]


def _commit(file: BinaryIO, path: str, folder: Folder) -> None:
    """Give the model its name; its data stays from then on, also where an interrupt comes right after."""
    written = os.fstat(file.fileno())
    try:
        storage.commit(file, path)
    finally:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), written):
                folder.keep()


def laid_out(proofs: Iterable[Proof], tensors: Tensors) -> dict[Hashable, bytes]:
    """The data of every tensor that is laid out anew, by Proof.tensor_key. Raises LayoutError."""
    data: dict[Hashable, bytes] = {}
    for proof in proofs:
        layout = Layout(proof, tensors)
        for role, held in proof.roles.items():
            if isinstance(held, Laid) and not held.view and proof.tensor_key(role) not in data:
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
        offset += -offset % ALIGNMENT
        size = storage.nbytes(new.tensor)
        point(new.tensor, name, offset, size)
        offset += size


def _large(added: Sequence[NewTensor]) -> list[NewTensor]:
    """Those that go to a file: not a function's, whose Constant nodes hold their data in every runtime."""
    return [new for new in added if storage.nbytes(new.tensor) > _MOST_INLINE and not new.in_function]


def _write_large(added: Sequence[NewTensor], folder: Folder, tensors: Tensors, progress: Progress | None) -> list[str]:
    """Stream large new tensors to a new file beside the model; return a note that says so."""
    large = _large(added)
    if not large:
        return []
    with folder.new_data(folder.model + ".data") as data:
        for done, new in enumerate(large):
            if progress:
                progress("laying out weights", done, len(large))
            data.add(new.tensor, _released(Layout(new.proof, tensors).pieces(new.role), tensors))
    count = f"{len(large)} tensor{'s' * (len(large) > 1)}"
    return [f"{count} laid out anew: {storage.size_text(data.size)} of external data, in {data.name}"]


def _released(pieces: Iterable[np.ndarray], tensors: Tensors) -> Iterator[np.ndarray]:
    """Let go of the pages of each piece once it was used."""
    for piece in pieces:
        yield piece
        tensors.release()


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
    folder: Folder,
    used_only: bool,
    progress: Progress | None,
) -> list[str]:
    """Check every external tensor, and copy their files to another folder; return notes that say so."""
    files: dict[str, list[onnx.TensorProto]] = {}
    for tensor in given:
        files.setdefault(tensors.path(tensor), []).append(tensor)
    for real, users in files.items():
        if os.path.exists(target) and os.path.samefile(real, target):
            raise RewriteError(
                f"cannot write {target}: it holds the model's external data '{storage.location(users[0])}'"
            )
    if folder.path == os.path.realpath(os.path.dirname(source) or "."):
        return []
    notes = []
    for done, (real, users) in enumerate(files.items()):
        if progress:
            progress("copying weights", done, len(files))
        place, copy = storage.location(users[0]), _copy_used if used_only else _copy_whole
        name, size = copy(real, users, tensors, folder)
        part = "what is used of " if used_only else ""
        notes.append(f"{part}external data '{place}' ({storage.size_text(size)}) was copied as '{name}'")
    return notes


def _copy_whole(real: str, users: Sequence[onnx.TensorProto], tensors: Tensors, folder: Folder) -> tuple[str, int]:
    """Copy a data file as it is; return the location and its bytes."""
    name = folder.copy(real, storage.location(users[0]))
    for tensor in users:
        if os.path.normpath(storage.location(tensor)) != os.path.normpath(name):
            next(entry for entry in tensor.external_data if entry.key == "location").value = name
    return name, os.path.getsize(real)


def _copy_used(real: str, users: Sequence[onnx.TensorProto], tensors: Tensors, folder: Folder) -> tuple[str, int]:
    """Copy what the model uses of a data file; return the location and its bytes."""
    with folder.new_data(folder.place(storage.location(users[0]))) as data:
        for tensor in users:
            data.add(tensor, [tensors.raw(tensor)])
            tensors.release()
    return data.name, data.size


def _move_out(model: onnx.ModelProto, folder: Folder, target: str) -> str:
    """Move the large initializers of a model that protobuf cannot hold to a new file; return a note that says so."""
    with folder.new_data(os.path.basename(target) + ".data") as data:
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) >= _LEAST_EXTERNAL:
                data.add(tensor, [tensor.raw_data])
                tensor.ClearField("raw_data")
    size = storage.size_text(data.size)
    return f"the model passes protobuf's 2 GiB: {size} of weights are external data now, in {data.name}"
