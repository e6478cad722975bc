"""What a step calls: an operator's function with its attributes bound, its inputs read from fixed places of the frame.

The frame is the plan's one list of values. A step's call takes no arguments: it reads its slots, brings each value to
where the operator wants it (host or MLX) and returns what the operator returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from lut4tool.runtime.backend import mx
from lut4tool.runtime.dtypes import to_mx, to_numpy

Call = Callable[[], Any]
Frame = list[Any]


def bind_host(run: Callable[..., Any], frame: Frame, slots: Sequence[int]) -> Call:
    """Call `run` with the values as they are: on a CPU all of them are on the host."""
    places = tuple(slots)
    if not places:
        return run
    values = itemgetter(*places)  # one value of one place, else a tuple
    return (lambda: run(values(frame))) if len(places) == 1 else (lambda: run(*values(frame)))


def bind(run: Callable[..., Any], frame: Frame, slots: Sequence[int], host: frozenset[int]) -> Call:
    """Call `run` with MLX values, except at the positions in `host`, which are NumPy arrays."""
    places = tuple(slots)
    wanted = tuple((place, to_numpy if index in host else None) for index, place in enumerate(places))
    ndarray = np.ndarray

    if not host and len(places) == 1:
        (only,) = places

        def call_one() -> Any:
            value = frame[only]
            return run(to_mx(value) if type(value) is ndarray else value)

        return call_one
    if not host:

        def call_device() -> Any:
            values = [frame[place] for place in places]
            return run(*[to_mx(value) if type(value) is ndarray else value for value in values])

        return call_device

    def call_mixed() -> Any:
        values = []
        for place, convert in wanted:
            value = frame[place]
            if convert is not None:
                value = convert(value)
            elif type(value) is ndarray:
                value = to_mx(value)
            values.append(value)
        return run(*values)

    return call_mixed


def bind_either(
    run: Callable[..., Any], frame: Frame, slots: Sequence[int], device_slots: Sequence[int], host: frozenset[int]
) -> Call:
    """Call `run` with numpy where every value is on the host, with mlx.core where any is not.

    slots: where each input lies, constants in their host form where they are small; device_slots: the same with
    constants as MLX arrays. A value whose type MLX lacks brings all of them to the host.
    """
    places, device_places = tuple(slots), tuple(device_slots)
    deciding = tuple(place for index, place in enumerate(places) if index not in host)
    array, ndarray = mx.array, np.ndarray

    def call() -> Any:
        for place in deciding:
            if type(frame[place]) is array:
                break
        else:
            return _on_host(run, [frame[place] for place in places])
        values = [frame[place] for place in device_places]
        for index, value in enumerate(values):
            if index in host:
                values[index] = to_numpy(value)
            elif type(value) is ndarray:
                values[index] = value = to_mx(value)
                if type(value) is ndarray:
                    return _on_host(run, [frame[place] for place in places])
        return run(mx, *values)

    return call


def _on_host(run: Callable[..., Any], values: list[Any]) -> Any:
    """Run with NumPy."""
    return run(np, *[to_numpy(value) for value in values])
