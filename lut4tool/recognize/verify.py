"""Every block of every weight compared with its chain, over all cores: in processes, as onnx.reference is Python."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache

from lut4tool import native
from lut4tool.errors import Lut4Error
from lut4tool.recognize.layout import LayoutError
from lut4tool.recognize.proof import Proof, Witness
from lut4tool.recognize.witness import Chain, Progress, WitnessMismatch, check
from lut4tool.storage import Tensors, is_external

#: Below so many elements in all a process is not worth its start.
_LEAST_ELEMENTS = 1 << 24
#: Linux's prctl option: the signal that a process gets when its parent ends.
_PARENT_DEATH_SIGNAL = 1

#: In a worker: what it compares. A fork has it from its parent, with the maps of the files.
_work: tuple[Sequence[Proof], Tensors]


class VerifyError(Lut4Error):
    """A check that could not be brought to its end."""


def check_some(
    proofs: Sequence[Proof], tensors: Tensors, progress: Progress | None = None
) -> list[Witness | WitnessMismatch | LayoutError]:
    """Check each proof as `witness.check` does; what it finds wrong with one leaves the others as they are."""
    checked = []
    for done, proof in enumerate(proofs):
        if progress:
            progress("weights", done, len(proofs))
        checked.append(_alone(proof, tensors, progress, full=False))
    return checked


def check_every(
    proofs: Sequence[Proof], tensors: Tensors, progress: Progress | None = None
) -> list[Witness | WitnessMismatch | LayoutError]:
    """The same for every element of each proof's weight, as with `full`; on Linux over all cores.

    Raises VerifyError where the system ended a process, and StorageError.
    """
    elements = [proof.rows * proof.cols for proof in proofs]
    processes = native.thread_count()
    if processes < 2 or sum(elements) < _LEAST_ELEMENTS or sys.platform != "linux":
        return [_alone(proof, tensors, progress, full=True) for proof in proofs]
    compared, wrong = [0] * len(proofs), dict[int, WitnessMismatch | LayoutError]()
    try:
        for index, done in _spread(proofs, tensors, processes):
            if isinstance(done, int):
                compared[index] += done
            else:
                wrong.setdefault(index, done)
            if progress:
                progress("checking weights", sum(compared), sum(elements))
    except BrokenProcessPool as error:
        raise VerifyError("a process that compared weights was ended by the system: is there enough memory?") from error
    for index, count in enumerate(elements):
        if index not in wrong and compared[index] != count:
            raise VerifyError(f"{compared[index]} elements of {count} were compared")
    return [wrong.get(index) or Witness(count, count) for index, count in enumerate(elements)]


def _alone(
    proof: Proof, tensors: Tensors, progress: Progress | None, full: bool
) -> Witness | WitnessMismatch | LayoutError:
    try:
        return check(proof, tensors, full=full, progress=progress)
    except (WitnessMismatch, LayoutError) as error:
        return error.with_traceback(None)  # or it would keep the arrays alive
    finally:
        tensors.release()


def _spread(
    proofs: Sequence[Proof], tensors: Tensors, processes: int
) -> Iterator[tuple[int, int | WitnessMismatch | LayoutError]]:
    """Compare in processes; yield of each part that is done its proof's index and its elements, or what is wrong."""
    for tensor in (tensor for proof in proofs for tensor in proof.sources.values() if is_external(tensor)):
        tensors.raw(tensor)  # mapped before the fork, so that a change of its file is noticed here
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _begin, (proofs, tensors)) as pool:
        waiting: dict[Future[int], int] = {}
        try:
            for index, proof in enumerate(proofs):
                for part in range(Chain(proof, tensors).parts):
                    waiting[pool.submit(_compare, index, part)] = index
            for future in as_completed(waiting):
                try:
                    yield waiting[future], future.result()
                except (WitnessMismatch, LayoutError) as error:
                    yield waiting[future], error
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(proofs: Sequence[Proof], tensors: Tensors) -> None:
    """What a worker starts with: one thread, deaf to Ctrl-C, which its parent hears, and ended where that is killed."""
    global _work
    _work = proofs, tensors
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.environ["OMP_NUM_THREADS"] = "1"


@lru_cache(maxsize=2)
def _chain(index: int) -> Chain:
    proofs, tensors = _work
    return Chain(proofs[index], tensors)


def _compare(index: int, part: int) -> int:
    """Compare one part of one weight; return how many elements."""
    _, tensors = _work
    chain, done = _chain(index), 0
    for units in chain.every_unit(part):
        done += chain.compare(units)
    tensors.check_whole()
    tensors.release()
    return done
