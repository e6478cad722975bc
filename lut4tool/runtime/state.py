"""A decoding loop's state: outputs of one run that are inputs of the next, kept where they were computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lut4tool.runtime.backend import mx
from lut4tool.runtime.cache import Cache
from lut4tool.runtime.dtypes import BY_NUMBER
from lut4tool.runtime.feeds import ValueInfo
from lut4tool.runtime.graph import RunError

if TYPE_CHECKING:
    from lut4tool.runtime.session import Runtime

#: Operators that can write a cache in place: the inputs that it may be, and the output that each comes out as.
_IN_PLACE = {("", "Concat"): {0: 0}, ("com.microsoft", "GroupQueryAttention"): {3: 1, 4: 2}}


class State:
    """Runs a model again and again, each run's `outputs` being the next one's `inputs`: a cache, a recurrent state.

    carry: input name -> output name. A carried value stays the array that the run made: no copy, no NumPy. Before the
    first run it is zeros, of the sizes that the other feeds give to the named dimensions and 0 for those that nothing
    names (an empty cache); a feed of its name stands in its place.

    A cache that one Concat or GroupQueryAttention reads, and gives as the carried output, is a buffer of the state with
    room at its end: written in place, growing by `chunk` steps at a time. Any other grows in the graph.

    One state serves one loop, in one thread at a time; a Runtime may have several.
    """

    def __init__(self, runtime: Runtime, carry: Mapping[str, str], chunk: int = 256) -> None:
        self._runtime, self._carry, self._chunk = runtime, dict(carry), chunk
        self._inputs = {info.name: info for info in runtime.get_inputs()}
        outputs = {info.name: info for info in runtime.get_outputs()}
        for name, source in carry.items():
            if name not in self._inputs or source not in outputs:
                what, unknown = ("output", source) if name in self._inputs else ("input", name)
                raise RunError(f"'{name}' cannot carry '{source}': the model has no {what} '{unknown}'")
            if self._inputs[name].type != outputs[source].type:
                types = f"{self._inputs[name].type}, not {outputs[source].type}"
                raise RunError(f"'{name}' cannot carry '{source}': it is {types}")
        if chunk < 1:
            raise RunError(f"a cache grows by at least 1 step at a time, not {chunk}")
        self._in_place = {name for name, source in carry.items() if _is_in_place(runtime, name, source)}
        self._held: dict[str, Any] = {}

    @property
    def in_place(self) -> frozenset[str]:
        """The carried inputs that are written in place."""
        return frozenset(self._in_place)

    @property
    def values(self) -> dict[str, Any]:
        """What the next run will get, by input name, as MLX arrays; nothing before the first run."""
        values = [_array(value) for value in self._held.values()]
        return dict(zip(self._held, self._runtime.results(values, as_numpy=False), strict=True))

    def reset(self) -> None:
        """Forget every carried value."""
        self._held = {}

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], as_numpy: bool = True) -> list[Any]:
        """Run once, as Runtime.run does, with the carried values as feeds; keep their successors.

        After an error the carried values are what they were; only a run that took steps of a cache back has lost those.
        """
        held = {**self._held} if self._held else self._empty(feeds)
        held |= {name: feeds[name] for name in self._carry if name in feeds}
        held = {name: self._owned(name, value) for name, value in held.items()}
        lengths = {name: value.length for name, value in held.items() if isinstance(value, Cache)}
        names = [info.name for info in self._runtime.get_outputs()] if output_names is None else list(output_names)
        try:
            results = self._runtime.evaluate([*names, *self._carry.values()], {**feeds, **held})
        except BaseException:
            for name, length in lengths.items():
                held[name].length = length
            raise
        carried = zip(self._carry, results[len(names) :], strict=True)
        self._held = {name: held[name] if name in lengths else _apart(value, feeds) for name, value in carried}
        asked = [_array(value) for value in results[: len(names)]]
        return self._runtime.results(asked, as_numpy)

    def _owned(self, name: str, value: Any) -> Any:
        if name not in self._in_place or isinstance(value, Cache):
            return value
        with mx.stream(self._runtime.device):
            return Cache(self._inputs[name].accept(value, {}), self._chunk)

    def _empty(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Zeros for every carried input that the feeds lack."""
        sizes = {
            dim: size
            for name, value in feeds.items()
            if name in self._inputs and isinstance(getattr(value, "shape", None), tuple)
            for dim, size in zip(self._inputs[name].shape or (), value.shape, strict=False)
            if isinstance(dim, str)
        }
        return {name: _zeros(self._inputs[name], sizes) for name in self._carry if name not in feeds}


def _zeros(info: ValueInfo, sizes: Mapping[str, int]) -> Any:
    kind = BY_NUMBER.get(info.proto.tensor_type.elem_type)
    if kind is None or info.shape is None or kind.numpy.kind not in "biufcV":
        raise RunError(f"input '{info.name}' is {info}: its first value must be given")
    shape = [dim if isinstance(dim, int) else sizes.get(dim or "", 0) for dim in info.shape]
    return np.zeros(shape, kind.numpy)


def _array(value: Any) -> Any:
    return value.array() if isinstance(value, Cache) else value


def _apart(value: Any, feeds: Mapping[str, Any]) -> Any:
    """A value that is no view of a feed, which its owner may change before the next run."""
    given = [feed for feed in feeds.values() if isinstance(feed, np.ndarray)]
    if isinstance(value, np.ndarray) and any(np.may_share_memory(value, feed) for feed in given):
        return value.copy()
    return value


def _is_in_place(runtime: Runtime, name: str, source: str) -> bool:
    """Whether an input is read by nothing but one operator that can write a cache, which gives it as that output."""
    plan = runtime.plan
    slot = plan.graph.inputs[[value.name for value in plan.inputs].index(name)]
    successor = plan.graph.outputs[[value.name for value in plan.outputs].index(source)]
    captured = set().union(*(graph.captured for graph in plan.subgraphs.values()))
    readers = [step for step in plan.graph.steps if slot in step.inputs]
    if slot in plan.graph.outputs or slot in captured or len(readers) != 1:
        return False
    (step,) = readers
    places = [place for place, read in enumerate(step.inputs) if read == slot]
    written = _IN_PLACE.get((step.operator.domain, step.operator.name), {}).get(places[0])
    if written is None or len(places) != 1 or len(step.inputs) < 2 or step.outputs[written] != successor:
        return False
    # Concat's result is an array, which anything may read; the other's is the cache itself, which nothing else can.
    others = plan.graph.outputs.count(successor) > 1 or any(successor in other.inputs for other in plan.graph.steps)
    return step.operator.name == "Concat" or not (others or successor in captured)
