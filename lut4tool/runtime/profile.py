"""Times of the steps of a run, each evaluated before the next: where the time of a model goes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from lut4tool.runtime.backend import mx
from lut4tool.runtime.binding import Call
from lut4tool.runtime.dtypes import type_of
from lut4tool.runtime.graph import Step
from lut4tool.runtime.plan import Plan
from lut4tool.storage import PathLike, write_atomic


@dataclass(frozen=True)
class Event:
    """One call of a step: start and length in seconds, and what it gave."""

    step: Step
    start: float
    seconds: float
    where: str
    type: str
    shape: str
    nbytes: int


class Profile:
    """Within `with`, a plan's steps are timed, one by one; afterwards its events can be summed or written."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.events: list[Event] = []

    def __enter__(self) -> Self:
        self._lines = [graph.lines for graph in self.plan.graphs()]
        for graph in self.plan.graphs():
            graph.watch(self._timed)
        return self

    def __exit__(self, *_: object) -> None:
        for graph, lines in zip(self.plan.graphs(), self._lines, strict=True):
            graph.lines = lines

    def costliest(self, count: int) -> list[dict[str, Any]]:
        """The kinds of step (operator, place, type and shape) that took longest, in milliseconds."""
        rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        for event in self.events:
            key = (event.step.operator.name, event.where, event.type, event.shape)
            empty = {**dict(zip(("op", "where", "type", "shape"), key, strict=True)), "count": 0, "milliseconds": 0.0}
            row = rows.setdefault(key, empty | {"bytes": 0})
            row["count"] += 1
            row["milliseconds"] += 1e3 * event.seconds
            row["bytes"] += event.nbytes
        return sorted(rows.values(), key=lambda row: -row["milliseconds"])[:count]

    def write(self, path: PathLike) -> None:
        """Write the events as a Chrome (Perfetto) trace."""
        first = self.events[0].start if self.events else 0.0
        events = [
            {
                "name": event.step.operator.name,
                "ph": "X",
                "pid": 0,
                "tid": 0,
                "ts": 1e6 * (event.start - first),
                "dur": 1e6 * event.seconds,
                "args": {
                    "node": event.step.name,
                    "fused": [part.name for part in event.step.fused],
                    "where": event.where,
                    "type": event.type,
                    "shape": event.shape,
                    "bytes": event.nbytes,
                },
            }
            for event in self.events
        ]
        write_atomic(path, json.dumps({"traceEvents": events}).encode())

    def _timed(self, step: Step) -> Call:
        choice = self.plan.kernels.get(step.name)

        def call() -> Any:
            start = time.perf_counter()
            result = step.call()
            arrays = list(_arrays(result))
            mx.eval(*[array for array in arrays if isinstance(array, mx.array)])
            seconds = time.perf_counter() - start
            on_host = bool(arrays) and not any(isinstance(array, mx.array) for array in arrays)
            place = "host" if on_host and self.plan.place == "mlx" else self.plan.place
            where = choice.name if choice is not None else place
            types = ", ".join(kind.name if (kind := type_of(array)) else "?" for array in arrays)
            shapes = ", ".join(str(list(array.shape)) for array in arrays)
            nbytes = sum(array.nbytes for array in arrays)
            self.events.append(Event(step, start, seconds, where, types, shapes, nbytes))
            return result

        return call


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, np.ndarray | mx.array):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _arrays(part)
