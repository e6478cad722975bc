"""lut4tool proves, rewrites and runs ONNX models whose 4-bit weights are decoded through a lookup table."""

__version__ = "0.1.0"
