"""The wheel: with the compiled module where there is a compiler, pure and working where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import lut4tool

ROOT = Path(__file__).parents[2]

#: What a build and the built package need of the tree.
SOURCES = ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "lut4tool")

CHECK = """
import numpy as np
from pathlib import Path
import lut4tool
from lut4tool import formats, native
from lut4tool.formats import NF4, Lookup4Weight
rng = np.random.default_rng(0)
weight = Lookup4Weight(rng.integers(0, 256, 500, dtype=np.uint8), rng.random(16, np.float32), NF4, 25, 40, 64)
assert np.array_equal(native.decode_elements(weight, 64, 1000), formats.decode_elements(weight, 64, 1000))
print(Path(lut4tool.__file__).parent)
print(native.describe())
"""


def build_wheel(folder: Path, **environment: str) -> Path:
    """Build a wheel from a copy of the tree, in this environment's build tools, and return it."""
    tree = folder / "tree"
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            tree.mkdir(exist_ok=True)
            shutil.copy(source, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(tree)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def described(wheel: Path, folder: Path) -> str:
    """Unpack the wheel, check its decode there, and return what native.describe() says."""
    site = folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    # -S and -P keep this checkout, and hooks of an editable install of it, out of sight.
    packages = os.pathsep.join([str(site), *(path for path in sys.path if path.endswith("site-packages"))])
    command = [sys.executable, "-S", "-P", "-c", CHECK]
    environment = {**os.environ, "PYTHONPATH": packages}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    where, what = done.stdout.splitlines()
    assert Path(where) == site / "lut4tool"
    return what


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_pure_and_works(tmp_path):
    pytest.importorskip("scikit_build_core", reason="the dev extra is not installed")
    wheel = build_wheel(tmp_path, CC="/bin/false", CXX="/bin/false")
    assert wheel.name == f"lut4tool-{lut4tool.__version__}-py3-none-any.whl"
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".so", ".pyd"))]
    assert described(wheel, tmp_path) == "numpy"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_with_a_compiler_the_wheel_has_the_native_module(tmp_path):
    pytest.importorskip("scikit_build_core", reason="the dev extra is not installed")
    wheel = build_wheel(tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.startswith("lut4tool/native/_native.") and name.endswith(".so")]
    assert ("lut4tool/native/blas_shim.so" in names) == (sys.platform == "linux")
    assert not [name for name in names if name.endswith((".cpp", ".h", ".c"))]
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "models/"))]
    assert described(wheel, tmp_path).startswith("native (")


def test_the_project_file_says_what_it_must():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "MIT"
    assert project["requires-python"] == ">=3.11"
    assert project["scripts"]["lut4tool"] == "lut4tool.cli:main"
    assert {"cpu", "cuda12", "cuda13", "dev"} <= set(project["optional-dependencies"])
    upper = [line for line in project["dependencies"] if "<" in line or "==" in line]
    assert not upper
