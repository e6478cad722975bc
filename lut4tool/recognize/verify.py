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
from lut4tool.recognize.proof import Proof, Witness
from lut4tool.recognize.witness import Chain, Progress, check
from lut4tool.storage import Tensors, is_external

#: Below so many elements in all a process is not worth its start.
_LEAST_ELEMENTS = 1 << 24
#: Linux's prctl option: the signal that a process gets when its parent ends.
_PARENT_DEATH_SIGNAL = 1

#: In a worker: what it compares. A fork has it from its parent, with the maps of the files.
_work: tuple[Sequence[Proof], Tensors]


class VerifyError(Lut4Error):
    """A check that could not be brought to its end."""


def check_every(proofs: Sequence[Proof], tensors: Tensors, progress: Progress | None = None) -> list[Witness]:
    """Compare every element of each proof's weight, as `witness.check` does with `full`; on Linux over all cores.

    Raises what `check` raises, and VerifyError where the system ended a process.
    """
    elements = [proof.rows * proof.cols for proof in proofs]
    processes = native.thread_count()
    if processes < 2 or sum(elements) < _LEAST_ELEMENTS or sys.platform != "linux":
        return [_alone(proof, tensors, progress) for proof in proofs]
    done = 0
    try:
        for compared in _spread(proofs, tensors, processes):
            done += compared
            if progress:
                progress("checking weights", done, sum(elements))
    except BrokenProcessPool as error:
        raise VerifyError("a process that compared weights was ended by the system: is there enough memory?") from error
    if done != sum(elements):
        raise VerifyError(f"{done} elements of {sum(elements)} were compared")
    return [Witness(count, count) for count in elements]


def _alone(proof: Proof, tensors: Tensors, progress: Progress | None) -> Witness:
    witness = check(proof, tensors, full=True, progress=progress)
    tensors.release()
    return witness


def _spread(proofs: Sequence[Proof], tensors: Tensors, processes: int) -> Iterator[int]:
    """Compare in processes; yield the elements of each part that is done."""
    for tensor in (tensor for proof in proofs for tensor in proof.sources.values() if is_external(tensor)):
        tensors.raw(tensor)  # mapped before the fork, so that a change of its file is noticed here
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _begin, (proofs, tensors)) as pool:
        waiting: list[Future[int]] = []
        try:
            for index, proof in enumerate(proofs):
                waiting += [pool.submit(_compare, index, part) for part in range(Chain(proof, tensors).parts)]
            for future in as_completed(waiting):
                yield future.result()
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
