"""MSL text to a library for this CPU: the few spellings that macros cannot replace, then clang, with a cache."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .signature import ATTRIBUTES, Signature

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("METAL_SIM_CACHE", Path(tempfile.gettempdir()) / "lut4tool-metal-sim"))

#: clang from 17 knows __bf16 arithmetic; Debian names each version.
CLANGS = ("clang++-19", "clang++-20", "clang++-18", "clang++-17", "clang++")

FLAGS = [
    "-std=c++20",
    "-fPIC",
    f"-I{HERE}",
    f"-I{HERE / 'include'}",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    "-mf16c",
    "-mfma",
    "-DUNROLL=",  # a CPU gains nothing, and clang would take long
    "-Werror=return-type",
    "-Wno-unknown-attributes",
    "-Wno-ignored-attributes",
]
#: fast: as a release build. check: every access to memory that threads share calls the checker, at its source line.
MODES = {
    "fast": ["-O2"],
    "check": [
        *("-O1", "-gdwarf-4", "-fno-vectorize", "-fno-slp-vectorize", "-fsanitize=thread"),
        *("-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-instrument-read-before-write=1"),
        "-fsanitize=bounds,shift,alignment,signed-integer-overflow,integer-divide-by-zero,unreachable",
        "-fsanitize-trap=undefined",
    ],
}

_STORAGE = re.compile(r"\bthreadgroup\s+(\w+)\s+(\w+)((?:\[[^\];]*\])+)\s*;")
_INSTANCE = re.compile(r"\ntemplate \[\[host_name.*\Z", re.DOTALL)


def _unsupported() -> str:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the Metal simulator runs on x86-64 Linux"
    if not any(map(shutil.which, CLANGS)):
        return f"the Metal simulator needs {CLANGS[0]} (Debian: apt-get install clang-19)"
    return ""


#: Why the simulator does not run here; empty where it does.
UNSUPPORTED = _unsupported()


class CompileError(Exception):
    """clang's own words."""


@functools.cache
def clang() -> str:
    """The compiler's path; RuntimeError where there is none."""
    if UNSUPPORTED:
        raise RuntimeError(UNSUPPORTED)
    return next(path for path in map(shutil.which, CLANGS) if path)


def translate(signature: Signature) -> str:
    """The C++ text of a kernel, with an entry that takes its buffers and attributes as arrays."""
    text = _INSTANCE.sub("\n", signature.text)
    text = _STORAGE.sub(r"SIM_THREADGROUP(\1, \2, \3);", text)
    arguments = []
    for index, parameter in enumerate(signature.parameters):
        const, space = ("", "device") if parameter.kind == "output" else ("const ", _space(signature, parameter.name))
        pointer = f"({const}{space} {parameter.type} *)uintptr_t(buffers[{index}])"
        arguments.append(f"*{pointer}" if parameter.is_reference else pointer)
    for name in signature.attributes:
        values = [f"info->{name}[{d}]" for d in range(3)]
        arguments.append(f"uint3{{{', '.join(values)}}}" if ATTRIBUTES[name] == 3 else f"info->{name}")
    return (
        "#include <metal_stdlib>\nusing namespace metal;\n"
        f'#line 1 "kernel.metal"\n{text}\n#line 1 "entry"\n'
        f'extern "C" void entry(void *const *buffers, const ThreadInfo *info) {{\n'
        f"    {signature.call}({', '.join(arguments)});\n}}\n"
    )


def _space(signature: Signature, name: str) -> str:
    """The address space that MLX gave a buffer."""
    found = re.search(rf"const (device|constant) \w+[*&] {name} \[\[", signature.text)
    assert found, name
    return found[1]


def compiled(signature: Signature, mode: str, contract: bool = False) -> Path:
    """The library of a kernel in a mode; `contract` lets clang fuse multiplications and additions, as Apple's may."""
    flags = [*FLAGS, "-shared", *MODES[mode], f"-ffp-contract={'on' if contract else 'off'}"]
    return _library(translate(signature), flags)


@functools.cache
def scheduler() -> Path:
    """The library that runs kernels."""
    text = "".join((HERE / name).read_text() for name in ("simulator.h", "checker.h", "scheduler.cpp"))
    return _library(text, ["-O2", "-std=c++20", "-fPIC", "-shared", f"-I{HERE}"], HERE / "scheduler.cpp")


def _library(text: str, flags: list[str], source: Path | None = None) -> Path:
    key = hashlib.sha256("\0".join([text, _shim(), clang(), *flags]).encode()).hexdigest()[:20]
    path = CACHE / f"{key}.so"
    if path.exists():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    written = CACHE / f"{key}-{os.getpid()}"
    if source is None:
        source = written.with_suffix(".cpp")
        source.write_text(text)
    made = subprocess.run(
        [clang(), *flags, str(source), "-o", str(written.with_suffix(".tmp"))], capture_output=True, text=True
    )
    if made.returncode:
        raise CompileError(made.stderr)
    written.with_suffix(".tmp").replace(path)
    return path


@functools.cache
def _shim() -> str:
    return "".join(path.read_text() for path in sorted((HERE / "include").iterdir()))
