"""Runtime: a model that runs on MLX, with the interface of onnxruntime.InferenceSession."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from lut4tool.kernels import decoded
from lut4tool.runtime import backend, channels, regions
from lut4tool.runtime.backend import mx
from lut4tool.runtime.cache import Cache
from lut4tool.runtime.dtypes import on_host, to_mx, to_numpy
from lut4tool.runtime.feeds import Sizes, ValueInfo, describe
from lut4tool.runtime.graph import NodeError, RunError
from lut4tool.runtime.planning import plan
from lut4tool.runtime.profile import Profile
from lut4tool.runtime.state import State
from lut4tool.storage import PathLike, Tensors, parse_model, read_model


class Runtime:
    """A model planned for a device.

    model: a path, the bytes of a model, or a ModelProto. device: "auto", "metal", "cuda" or "cpu".
    base_dir: the folder of its external data (a path's own folder by default), or the Tensors that read it.
    Raises Unsupported with every problem of the model, StorageError, BackendError.
    """

    def __init__(
        self,
        model: PathLike | bytes | onnx.ModelProto,
        device: str = "auto",
        base_dir: PathLike | Tensors | None = None,
    ) -> None:
        if isinstance(model, onnx.ModelProto):
            proto = model
        elif isinstance(model, bytes):
            proto = parse_model(model)
        else:
            proto = read_model(model)
            base_dir = base_dir if base_dir is not None else Path(model).parent
        tensors = base_dir if isinstance(base_dir, Tensors) else Tensors(base_dir)
        self.device = backend.device(device)
        self.plan = plan(proto, self.device, tensors)
        tensors.check_whole()
        self._tensors = tensors
        with mx.stream(self.device):
            if not on_host():
                channels.lay_out(self.plan)
            regions.install(self.plan)
        self._inputs = [describe(value) for value in self.plan.inputs]
        self._outputs = [describe(value) for value in self.plan.outputs]
        self._places = {output.name: index for index, output in enumerate(self._outputs)}
        self._lock = threading.Lock()

    def get_inputs(self) -> list[ValueInfo]:
        """The model's inputs: .name, .shape (ints, names and None) and .type, such as "tensor(float)"."""
        return list(self._inputs)

    def get_outputs(self) -> list[ValueInfo]:
        """The model's outputs, described as the inputs are."""
        return list(self._outputs)

    @property
    def kernels(self) -> Mapping[str, Any]:
        """The kernel chosen for each 4-bit product, by node, with what refused to serve it."""
        return self.plan.kernels

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], as_numpy: bool = True) -> list[Any]:
        """Run once and return the values of `output_names` (None: all), in that order.

        feeds: NumPy arrays (ml_dtypes' types for bfloat16, int4, float8; strings as str or object arrays) or MLX
        arrays, by input name; lists of them for sequences. as_numpy=False leaves MLX arrays where MLX has the type.
        Callable from several threads, which take turns. Raises RunError before anything runs for names, types, ranks
        and shapes that do not fit, and for a node that fails, by its name; StorageError where its weights were cut.
        """
        return self.results(self.evaluate(output_names, feeds), as_numpy)

    def evaluate(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Run once and return the values as the steps made them: MLX arrays, and NumPy arrays of host values."""
        wanted = range(len(self._outputs)) if output_names is None else [self._place(name) for name in output_names]
        with self._lock, mx.stream(self.device), np.errstate(all="ignore"):
            values = self._values(feeds)
            try:
                with decoded.one_run():  # ends before values are computed: what is shared goes with its last use
                    results = self.plan.graph(*values)
                chosen = [results[place] for place in wanted]
                _evaluate(chosen)
                self._tensors.check_whole()
            except BaseException:
                self.plan.clear()
                raise
            for place, value in zip(wanted, chosen, strict=True):
                self._outputs[place].check_type(value, "output")
            return chosen

    def results(self, values: Sequence[Any], as_numpy: bool = True) -> list[Any]:
        """Values of `evaluate` as NumPy arrays of their own memory, or as MLX arrays where MLX has the type."""
        with mx.stream(self.device):
            return [_copy(value) if as_numpy else _device(value) for value in values]

    def state(self, carry: Mapping[str, str], chunk: int = 256) -> State:
        """Return what carries outputs to inputs from run to run: {"past.key": "present.key"}; see State."""
        return State(self, carry, chunk)

    def profile(self, feeds: Mapping[str, Any], path: PathLike | None = None) -> list[dict[str, Any]]:
        """Run once, each step evaluated before the next; return the ten costliest kinds of step, the costliest first.

        A row has op, where ("mlx", "host", on a CPU "numpy", or the kernel), type and shape of the results, count,
        milliseconds and bytes.
        path: where a Chrome trace of every step is written. A step with subgraphs contains the time of theirs.
        """
        with Profile(self.plan) as profile:
            self.run(None, feeds)
        if path is not None:
            profile.write(path)
        return profile.costliest(10)

    def __call__(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run once and return every output by name."""
        return dict(zip(self._places, self.run(None, feeds), strict=True))

    def _place(self, name: str) -> int:
        if name not in self._places:
            raise RunError(f"the model has no output '{name}'; it has {_names(self._places)}")
        return self._places[name]

    def _values(self, feeds: Mapping[str, Any]) -> list[Any]:
        """The feeds in the order of the inputs, checked, on the device."""
        names = dict.fromkeys(wanted.name for wanted in self._inputs)
        extra = [name for name in feeds if name not in names]
        if extra:
            raise RunError(f"the model has no input {_names(extra)}; it has {_names(names)}")
        values: list[Any] = []
        sizes: Sizes = {}
        for wanted in self._inputs:
            if wanted.name in feeds:
                values.append(wanted.accept(feeds[wanted.name], sizes))
            elif wanted.name in self.plan.defaults:
                values.append(self.plan.defaults[wanted.name])
            elif wanted.optional:
                values.append(None)
            else:
                raise RunError(f"input '{wanted.name}' is missing; it is {wanted}")
        return values


def _evaluate(values: Sequence[Any]) -> None:
    try:
        mx.eval(*[value for value in _leaves(values) if isinstance(value, mx.array)])
    except NodeError:
        raise
    except Exception as error:
        raise RunError(f"the outputs could not be evaluated: {error}") from error


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Cache):
        return [value.buffer]
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, list) else [value]


def _copy(value: Any) -> Any:
    """A NumPy array that shares no memory with the model or the feeds, so that writing to it changes neither."""
    if isinstance(value, list):
        return [_copy(part) for part in value]
    if isinstance(value, dict):
        return dict(value)
    return None if value is None else np.array(to_numpy(value), order="C")


def _device(value: Any) -> Any:
    return [_device(part) for part in value] if isinstance(value, list) else to_mx(value)


def _names(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
