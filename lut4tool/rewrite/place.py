"""Placing a model's data beside it: free names, bytes that are there already, and the way back after an error."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import BinaryIO, Self

import numpy as np
import onnx

from lut4tool import storage

#: Tensors in a file that we write begin at multiples of this, so that a mapped view is aligned.
ALIGNMENT = 64


class Folder:
    """The folder of a model while its data is placed there; it is held, so that one process at a time does that.

    model: its file name. Leave it by an error and what was created is removed, unless `keep` was
    called; existing files are never touched, and one that holds the very bytes that are to be placed serves as it is.
    """

    def __init__(self, path: str, model: str) -> None:
        self.path = os.path.realpath(path)
        self.model = model
        self._held: dict[str, bool] = {}  # folder -> whether it could be locked
        self._made: list[str] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.hold(self.path)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for path in reversed(self._made):
                with contextlib.suppress(OSError):
                    os.rmdir(path) if os.path.isdir(path) else os.unlink(path)
        self._stack.close()

    def hold(self, folder: str) -> None:
        """Hold another folder too, until the end."""
        if folder not in self._held:
            self._held[folder] = self._stack.enter_context(storage.held(folder))

    def keep(self) -> None:
        """What was created has its model now: it stays."""
        self._made.clear()

    def place(self, location: str) -> str:
        """The location here of data that the model has at `location`: its name alone where that leads elsewhere."""
        wanted = PurePath(os.path.normpath(location))
        parent = os.path.realpath(os.path.join(self.path, wanted.parent))
        leaves = ".." in wanted.parts or not storage.inside(os.path.join(parent, wanted.name), self.path)
        return wanted.name if leaves else wanted.as_posix()

    def copy(self, source: str, place: str) -> str:
        """Bring a data file here under the location that the model gives it, or the next free one; return that."""
        wanted = PurePath(self.place(place))
        self._make_parents(wanted)
        for name, path in self._places(wanted):
            if self._serves(source, path):
                return name
            with contextlib.suppress(FileExistsError):  # taken, perhaps by another process since: the next name
                storage.copy_new(source, path)
                self._made.append(path)
                return name
        raise AssertionError("names do not end")

    @contextlib.contextmanager
    def new_data(self, place: str) -> Iterator[NewData]:
        """A new data file under this location or the next free one; its tensors point there at the end."""
        wanted = PurePath(place)
        self._make_parents(wanted)
        with storage.temporary(os.path.join(self.path, place)) as file:
            data = NewData(file)
            yield data
            file.flush()
            data.point(self._name(file, wanted))

    def _name(self, file: BinaryIO, wanted: PurePath) -> str:
        """Give a temporary file a name; where a file holds its bytes already return that one's."""
        for name, path in self._places(wanted):
            if self._serves(file.name, path):
                return name
            with contextlib.suppress(FileExistsError):
                storage.settle(file, path)
                self._made.append(path)
                return name
        raise AssertionError("names do not end")

    def _serves(self, source: str, path: str) -> bool:
        """Whether a file of its own at `path` holds the bytes of `source`, and nobody is about to remove it."""
        if not all(self._held.values()) or not os.path.lexists(path):
            return False
        facts = os.lstat(path)  # runtimes refuse data that is a link, a hard one too
        return stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1 and storage.same_bytes(source, path)

    def _make_parents(self, wanted: PurePath) -> None:
        for parent in reversed(wanted.parents[:-1]):
            folder = os.path.join(self.path, parent)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
                self._made.append(folder)
            self.hold(os.path.realpath(folder))

    def _places(self, wanted: PurePath) -> Iterator[tuple[str, str]]:
        """A location and its numbered variants, weights.bin, weights-1.bin, ..., with their paths."""
        number = 0
        while True:
            name = f"{wanted.stem}-{number}{wanted.suffix}" if number else wanted.name
            place = wanted.with_name(name).as_posix()
            if place != self.model:
                yield place, os.path.join(self.path, place)
            number += 1


class NewData:
    """A file of external data while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.size, self.name = 0, ""
        self._file = file
        self._tensors: list[tuple[onnx.TensorProto, int, int]] = []

    def add(self, tensor: onnx.TensorProto, pieces: Iterable[bytes | np.ndarray]) -> None:
        """Write a tensor's bytes at the next aligned offset; it becomes external at the end."""
        self.size += self._file.write(bytes(-self.size % ALIGNMENT))
        offset = self.size
        for piece in pieces:
            self.size += self._file.write(piece if isinstance(piece, bytes) else np.ascontiguousarray(piece).data)
        self._tensors.append((tensor, offset, self.size - offset))

    def point(self, name: str) -> None:
        """Say in each tensor where its data is."""
        self.name = name
        for tensor, offset, length in self._tensors:
            point(tensor, name, offset, length)


def point(tensor: onnx.TensorProto, name: str, offset: int, length: int) -> None:
    """Say where a tensor's external data is."""
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", name), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
