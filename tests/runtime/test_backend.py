"""How MLX is made ready: the BLAS it is bound to, its switches, its devices, and the words where it is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lut4tool.runtime import backend, blas
from lut4tool.runtime.backend import BackendError, mx
from lut4tool.runtime.blas import SHIM

ROOT = Path(__file__).parents[2]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only MLX's Linux build is given a BLAS")

REPORT = """
import json, os
from lut4tool.runtime import backend
serves = backend.blas()
print(json.dumps({"name": serves.name, "reason": serves.reason, "numpy": serves.dense_products_through_numpy,
                  "threads": serves.threads, "environment": dict(os.environ)}))
"""

#: Switches that the machine or a test around this one may have set.
SWITCHES = ("LUT4TOOL_BLAS", "MLX_ENABLE_TF32", "MLX_DISABLE_COMPILE", "OMP_WAIT_POLICY")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, in an environment without our switches except those given."""
    clean = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def report(before: str = "", **environment: str) -> dict:
    """What the backend says in a fresh interpreter, after the code `before`."""
    done = python(before + REPORT, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def openblas() -> str:
    """The file of scipy-openblas32, which the `cpu` extra installs."""
    folder = Path(pytest.importorskip("scipy_openblas32", reason="the cpu extra is not installed").get_lib_dir())
    if not SHIM.exists():
        pytest.skip("the package was built without the BLAS shim")
    return str(next(folder.glob("libscipy_openblas*.so")))


@LINUX
def test_openblas_is_loaded_and_named():
    openblas()
    says = report()
    assert "OpenBLAS" in says["name"]
    assert says["threads"] >= 1
    assert not says["numpy"]


@LINUX
@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="reads the bindings that glibc's loader logs")
@pytest.mark.parametrize(("asked", "binds_to"), [("", "blas_shim.so"), ("none", "libblas")])
def test_mlx_is_bound_to_the_blas(tmp_path, asked, binds_to):
    openblas()
    log = tmp_path / "bindings"
    code = "from lut4tool.runtime.backend import mx; mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))"
    done = python(code, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(log), LUT4TOOL_BLAS=asked)
    assert done.returncode == 0, done.stderr
    lines = [line for file in tmp_path.iterdir() for line in file.read_text(errors="replace").splitlines()]
    bound = {
        name: line.split(" to ")[1].split(" ")[0]
        for line in lines
        for name in ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
        if f"symbol `{name}'" in line and "libmlx" in line.split(" to ")[0]
    }
    assert set(bound) == {"cblas_sgemm", "cblas_dgemm", "cblas_cgemm"}
    assert all(binds_to in target for target in bound.values()), bound
    served = [line for line in lines if "symbol `scipy_cblas_sgemm'" in line]
    assert all("libscipy_openblas" in line.split(" to ")[1] for line in served)
    assert bool(served) == (not asked)


@LINUX
def test_products_through_the_shim_are_right():
    # Every type and orientation that the shim forwards, with shapes that tell rows from columns.
    openblas()
    code = """
import numpy as np
from lut4tool.runtime.backend import mx, blas
assert "OpenBLAS" in blas().name
rng = np.random.default_rng(0)
for dtype, tolerance in ((np.float32, 1e-5), (np.float64, 1e-13), (np.complex64, 1e-5)):
    imaginary = 1j if dtype == np.complex64 else 0
    draw = lambda *shape: (rng.standard_normal(shape) + imaginary * rng.standard_normal(shape)).astype(dtype)
    for a_t in (False, True):
        for b_t in (False, True):
            a, b = draw(*((70, 33) if a_t else (33, 70))), draw(*((51, 70) if b_t else (70, 51)))
            x, y = (mx.array(v, dtype=getattr(mx, np.dtype(dtype).name)) for v in (a, b))
            with mx.stream(mx.cpu):
                got = np.array((x.T if a_t else x) @ (y.T if b_t else y))
            want = (a.T if a_t else a).astype(np.complex128) @ (b.T if b_t else b).astype(np.complex128)
            assert got.dtype == dtype and abs(got - want).max() < tolerance * 70, (dtype, a_t, b_t)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


@LINUX
def test_blas_none_leaves_mlx_as_shipped_and_sends_products_to_numpy():
    says = report(LUT4TOOL_BLAS="none")
    assert says["name"] == "MLX's own"
    assert says["numpy"]


@LINUX
def test_mlx_that_came_first_sends_products_to_numpy():
    says = report(before="import mlx.core")
    assert "before lut4tool" in says["reason"]
    assert says["numpy"]


@LINUX
def test_a_blas_by_its_path():
    says = report(LUT4TOOL_BLAS=openblas())
    assert says["reason"].startswith("LUT4TOOL_BLAS=")
    assert "OpenBLAS" in says["name"]


@LINUX
@pytest.mark.parametrize(("path", "words"), [("/no/such/lib.so", "cannot open"), ("libm.so.6", "no cblas_sgemm")])
def test_a_blas_that_cannot_serve_is_an_error(path, words):
    done = python("import lut4tool.runtime.backend", LUT4TOOL_BLAS=path)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "BlasError" in last
    assert path in last
    assert words in last


@LINUX
def test_a_prefixed_blas_without_the_shim_is_refused_before_it_is_global(monkeypatch):
    library = openblas()
    monkeypatch.setattr(blas, "SHIM", SHIM.with_name("not_built.so"))
    with pytest.raises(OSError, match=r"needs lut4tool's blas_shim\.so"):
        blas._load(library)


def test_switches_are_set_before_mlx_starts_and_the_users_stay():
    ours = report()["environment"]
    assert ours["MLX_ENABLE_TF32"] == "0"
    assert ours["OMP_WAIT_POLICY"] == "passive"
    if not mx.is_available(mx.Device(mx.gpu)):
        assert ours["MLX_DISABLE_COMPILE"] == "1"
    theirs = report(MLX_ENABLE_TF32="1", OMP_WAIT_POLICY="active", MLX_DISABLE_COMPILE="0")["environment"]
    assert (theirs["MLX_ENABLE_TF32"], theirs["OMP_WAIT_POLICY"], theirs["MLX_DISABLE_COMPILE"]) == ("1", "active", "0")


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx" or name.startswith("mlx."):
            raise {error}
sys.meta_path.insert(0, Block())
from lut4tool.errors import Lut4Error
try:
    import lut4tool.runtime.backend
except Lut4Error as error:
    print(type(error).__name__, error)
"""


def test_without_mlx_the_error_names_the_extras():
    done = python(BLOCK.format(error="ModuleNotFoundError('No module named mlx', name=name)"))
    assert done.stdout.startswith("BackendError running a model needs MLX, which is not installed"), done.stderr
    for extra in ("lut4tool[cpu]", "lut4tool[cuda12]", "lut4tool[cuda13]"):
        assert extra in done.stdout


def test_an_mlx_that_does_not_start_names_the_extras_and_the_cause():
    done = python(BLOCK.format(error="ImportError('libmlx.so: cannot open shared object file')"))
    assert done.stdout.startswith("BackendError MLX is installed but does not start (libmlx.so: cannot"), done.stderr
    assert "lut4tool[cpu]" in done.stdout


def test_the_cpu_is_always_there():
    assert backend.device("cpu") == mx.Device(mx.cpu)
    assert backend.kind(backend.device("cpu")) == "cpu"


def test_auto_is_a_gpu_where_there_is_one():
    expected = mx.gpu if mx.is_available(mx.Device(mx.gpu)) else mx.cpu
    assert backend.device("auto") == backend.device() == mx.Device(expected)


@pytest.mark.parametrize("name", ["metal", "cuda"])
def test_a_device_that_is_not_there_is_refused_in_words(name):
    has = backend.kind(mx.Device(mx.gpu)) if mx.is_available(mx.Device(mx.gpu)) else "cpu"
    if has == name:
        assert backend.kind(backend.device(name)) == name
        return
    with pytest.raises(BackendError, match=f"device '{name}' is not available: this machine has .*{has}"):
        backend.device(name)


def test_an_unknown_device_lists_the_known_ones():
    with pytest.raises(BackendError, match="no device 'tpu'; use auto, metal, cuda, cpu"):
        backend.device("tpu")


def test_describe_says_what_computes():
    facts = backend.describe(backend.device("cpu"))
    assert facts["mlx"] == mx.__version__
    assert facts["device"] == "cpu"
    assert facts["blas"]
    assert facts["native"].startswith(("native", "numpy"))
