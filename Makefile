# make setup | test | demo | lint | bench: each sets up what it needs in .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
EXTRAS := $(if $(filter Darwin,$(shell uname -s)),dev,cpu,dev)
NATIVE := pyproject.toml CMakeLists.txt $(wildcard lut4tool/native/*.c lut4tool/native/*.cpp lut4tool/native/*.h)

# make test-all: the slow tests too; make soak: what takes an hour, its figures into docs/reliability.md.
.PHONY: setup test test-all soak demo lint bench clean

setup: $(STAMP)

# Editable: Python runs from this tree, and the compiled module is built into lut4tool/native. An old one goes first:
# setup goes on where nothing can be compiled, and must not seem to have built it.
$(STAMP): $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "scikit-build-core>=0.11" "nanobind>=3.1" "cmake>=3.26" "ninja>=1.11"
	@echo "Installing MLX, onnx and the rest, and building the native part: a few minutes the first time."
	rm -f lut4tool/native/_native*.so
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[$(EXTRAS)]"
	$(BIN)/python -c "from lut4tool import native; print('lut4tool decodes with', native.describe())"
	touch $@

# Two workers, so one BLAS thread each.
test test-all: export OPENBLAS_NUM_THREADS ?= 1

test: setup
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: setup
	$(BIN)/python -m pytest -n 2

soak: setup
	$(BIN)/python benchmarks/soak.py

demo: setup
	$(BIN)/lut4tool demo
	$(BIN)/python models/real_case.py

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/blas.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/kernels_cpu.py --quick

clean:
	rm -rf $(VENV) build dist lut4tool/native/*.so
