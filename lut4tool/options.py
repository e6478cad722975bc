"""What options of the command line take: their choices, and values that suit no machine as errors of usage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lut4tool.errors import Lut4Error


class Device(StrEnum):
    """Where a model runs; "auto" is a GPU where one works."""

    AUTO = "auto"
    METAL = "metal"
    CUDA = "cuda"
    CPU = "cpu"


class Float(StrEnum):
    """The float types of products."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Half(StrEnum):
    """What a decoded weight may be rounded to."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else there.")]
VendorOption = Annotated[bool, typer.Option("--vendor", help="com.microsoft's MatMulBnb4 and MatMulNBits too.")]
DeviceOption = Annotated[Device, typer.Option(help="auto: a GPU where one works, else the CPU.")]
ExternalOption = Annotated[
    list[Path] | None,
    typer.Option("--allow-external", metavar="DIR", help="A folder outside the model's that its weights may lie in."),
]


@contextmanager
def usage(option: str) -> Iterator[None]:
    """What is refused inside is an option's value, which suits no model: an error of usage."""
    try:
        yield
    except Lut4Error as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def numbers(text: str, option: str, counts: tuple[int, ...] = ()) -> list[int]:
    """Positive whole numbers with commas between them, so many of them where that is said."""
    listed = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(listed) < 1 or (counts and len(listed) not in counts):
        such = "4096,4096" if counts else "1,16,128"
        raise typer.BadParameter(f"'{text}' is not a list of positive numbers such as {such}", param_hint=option)
    return listed
