"""The arrows between the package's parts, read from its imports: each points one way, and heavy modules stay lazy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lut4tool"
MODULES = sorted(PACKAGE.rglob("*.py"))

#: For each part (a folder or a module), the parts of the package that it may import. `errors` is open to all.
ARROWS: dict[str, set[str]] = {
    "__init__": set(),
    "__main__": {"cli"},
    "errors": set(),
    "formats": set(),
    "storage": {"native"},  # a map that is watched
    "encode": {"formats"},
    "options": set(),
    "tables": {"storage"},  # sizes as text
    "native": {"formats"},
    "measure": {"runtime"},  # time and peak memory of a process
    "engines": {"formats", "native", "storage", "kernels", "runtime"},  # what makes one product, peers too
    "bench": {"formats", "native", "storage", "recognize", "runtime", "engines"},  # times of one product
    "recognize": {"formats", "storage", "native"},
    "rewrite": {"recognize", "formats", "storage", "native"},
    "kernels": {"formats", "native"},
    "runtime": {"kernels", "formats", "native", "storage"},
    "produce": {"formats", "encode", "storage", "rewrite"},
    "demo": {
        "formats",
        "encode",
        "measure",
        "storage",
        "recognize",
        "rewrite",
        "runtime",
        "produce",
        "kernels",
        "native",
    },
    "cli": {
        "formats",
        "storage",
        "recognize",
        "rewrite",
        "runtime",
        "produce",
        "kernels",
        "native",
        "demo",
        "bench",
        "tables",
        "options",
        "encode",
        "__init__",
    },
}

#: Parts that must work, and be quick to import, without MLX.
WITHOUT_MLX = {"__init__", "errors", "formats", "encode", "storage", "native", "recognize", "rewrite", "produce"}

#: What `lut4tool --help` must not pay for.
HEAVY = ("numpy", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "mlx", "ml_dtypes", "onnx_graphsurgeon")


def part_of(module: Path) -> str:
    """The part that a file belongs to: its folder in the package, or its own name at the top."""
    relative = module.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(module: Path, top_level: bool = False) -> list[tuple[str, int]]:
    """Absolute names that a file imports, with their lines; `top_level` leaves out those inside functions."""
    tree = ast.parse(module.read_text())
    lazy = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(node):
            lazy.update(id(inner) for inner in ast.walk(node))
    names = []
    for node in ast.walk(tree):
        if top_level and id(node) in lazy:
            continue
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: imports are written absolutely"
            names += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return names


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_mlx(name: str) -> bool:
    return name == "mlx" or name.startswith("mlx.")


def test_there_are_modules_and_each_part_has_its_arrows():
    assert len(MODULES) > 5
    assert {part_of(module) for module in MODULES} <= set(ARROWS)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_arrows_point_one_way(module):
    part = part_of(module)
    for name, line in imports(module):
        if not name.startswith("lut4tool."):
            continue
        target = name.split(".")[1]
        target = target if target in ARROWS else "__init__"
        assert target in ARROWS[part] | {part, "errors"}, f"{module}:{line}: {part} must not import {target}"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_only_the_backend_and_kernels_import_mlx(module):
    allowed = module == PACKAGE / "runtime" / "backend.py" or part_of(module) == "kernels"
    found = [line for name, line in imports(module) if imports_mlx(name)]
    assert allowed or not found, f"{module}:{found}: take mx from lut4tool.runtime.backend"


def test_the_runtime_never_runs_a_model_in_the_reference_evaluator():
    for module in (PACKAGE / "runtime").rglob("*.py"):
        assert not [line for name, line in imports(module) if name.startswith("onnx.reference")], module


@pytest.mark.parametrize("name", ["__init__.py", "cli.py", "errors.py"])
def test_heavy_modules_are_imported_inside_commands(name):
    names = [found for found, _ in imports(PACKAGE / name, top_level=True)]
    assert not [found for found in names if found.split(".")[0] in HEAVY]


def loaded_by(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter holds after the statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_importing_the_command_line_loads_nothing_heavy():
    assert not loaded_by("import lut4tool.cli") & set(HEAVY)


@pytest.mark.parametrize("part", sorted(WITHOUT_MLX))
def test_a_part_that_needs_no_mlx_does_not_load_it(part):
    module = "lut4tool" if part == "__init__" else f"lut4tool.{part}"
    assert "mlx" not in loaded_by(f"import {module}")


def test_the_imports_are_read_right(tmp_path):
    # The reader itself: lazy and type-only imports are told from those that run.
    module = tmp_path / "module.py"
    module.write_text(
        "import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\ndef f():\n    import mlx.core as mx\n"
    )
    assert [name for name, _ in imports(module)] == ["a.b", "c.d", "e", "mlx.core"]
    assert [name for name, _ in imports(module, top_level=True)] == ["a.b", "c.d"]
