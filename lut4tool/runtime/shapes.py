"""Tensors as a look at a model needs them: their types and shapes, and the few values that decide shapes."""

from __future__ import annotations

import numpy as np
import onnx

from lut4tool.storage import Tensors, is_external, nbytes


class Shapes(Tensors):
    """Tensors whose values are not read, but for literals in the model itself: zeros of their type and shape."""

    def array(self, tensor: onnx.TensorProto) -> np.ndarray:
        """The tensor's values where they are few and in the model, else zeros that take no memory."""
        few = nbytes(tensor) <= 1024  # refuses types and dims that no array has
        if few and not is_external(tensor):
            return super().array(tensor)
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return np.broadcast_to(np.zeros((), kind), tuple(tensor.dims))
