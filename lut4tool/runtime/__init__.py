"""Runs ONNX models with MLX."""

from lut4tool.runtime.graph import RunError
from lut4tool.runtime.registry import Unsupported
from lut4tool.runtime.session import Runtime

__all__ = ["RunError", "Runtime", "Unsupported"]
