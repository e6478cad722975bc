"""Runtime: a model that runs on MLX, with the interface of onnxruntime.InferenceSession."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from lut4tool.runtime import backend
from lut4tool.runtime.backend import mx
from lut4tool.runtime.dtypes import to_mx, to_numpy
from lut4tool.runtime.plan import plan
from lut4tool.storage import parse_model, read_model


class Runtime:
    """A model planned for a device.

    model: a path, the bytes of a model, or a ModelProto; base_dir: the folder of its external data (a path's own folder
    by default). Raises Unsupported, StorageError.
    """

    def __init__(self, model: str | os.PathLike[str] | bytes | onnx.ModelProto, device: str = "auto", base_dir: str | None = None) -> None:  # fmt: skip
        if isinstance(model, onnx.ModelProto):
            proto = model
        elif isinstance(model, bytes):
            proto = parse_model(model)
        else:
            proto = read_model(model)
            base_dir = base_dir or os.path.dirname(os.fspath(model)) or "."
        self.device = backend.device(device)
        self.plan = plan(proto, self.device, base_dir)
        self._lock = threading.Lock()

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], as_numpy: bool = True) -> list[Any]:
        """Run once and return the values of `output_names` (None: all), in that order."""
        names = [value.name for value in self.plan.outputs]
        with self._lock, mx.stream(self.device), np.errstate(all="ignore"):
            values = [to_mx(np.asarray(feeds[value.name])) for value in self.plan.inputs]
            results = dict(zip(names, self.plan.graph(*values), strict=True))
            wanted = [results[name] for name in (names if output_names is None else output_names)]
            mx.eval(*[value for value in wanted if isinstance(value, mx.array)])
            return [to_numpy(value) for value in wanted] if as_numpy else wanted

    def __call__(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run once and return every output by name."""
        return dict(zip((value.name for value in self.plan.outputs), self.run(None, feeds), strict=True))
