"""Images (onnx/defs/image): decoded on the host by Pillow, an extra."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

import numpy as np

from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import Unsupported, op

_MODES = {"RGB": "RGB", "BGR": "RGB", "Grayscale": "L"}
#: The formats that the standard lists; Pillow's other readers stay shut to a model's bytes.
_FORMATS = ("BMP", "JPEG", "JPEG2000", "TIFF", "PNG", "WEBP", "PPM")


def _check(node: Node) -> None:
    """Refuse it without Pillow, which the extra `images` installs."""
    if importlib.util.find_spec("PIL") is None:
        raise Unsupported("images are decoded by Pillow, which is not installed: pip install 'lut4tool[images]'")
    wanted = node.attributes.get("pixel_format", "RGB")
    if wanted not in _MODES:
        raise Unsupported(f"pixel_format is '{wanted}', not RGB, BGR or Grayscale")


@op("ImageDecoder", host=(0,), check=_check, on_host=True)
def image_decoder(encoded: Any, *, pixel_format: str = "RGB") -> Any:
    """uint8 [height, width, channels]; bytes that are no image give an empty one."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(encoded.tobytes()), formats=_FORMATS) as image:
            pixels = np.array(image.convert(_MODES[pixel_format]))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return np.zeros((0, 0, 0), np.uint8)
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    return np.ascontiguousarray(pixels[..., ::-1]) if pixel_format == "BGR" else pixels
