# Each target does its own set-up: a virtual environment in .venv with everything it needs, made once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCHREC := $(VENV)/.torchrec

.PHONY: fuzz demo demo-kafka test lint types imports docs bench bench-pause bench-cluster bench-control chaos torchrec manifests ops-tools e2e-ops clean

demo: $(STAMP)
	$(BIN)/flexd demo $(DEMO)

demo-kafka: $(STAMP)
	$(BIN)/python tools/demo_kafka.py $(DEMO)

# Most tests wait for other processes, so two files run at a time; whole jobs have the machine for themselves.
# JOBS=0 runs everything one after another; TESTS names some.
JOBS ?= 2
ALONE := tests/e2e/chaos tests/tools tests/cli/test_terminal.py \
	$(addprefix tests/e2e/test_,$(addsuffix .py,demo_runs high_availability live_job newcomer ops orderly_end scale_out tap_job))
test: $(STAMP)
ifdef TESTS
	$(BIN)/python -m pytest $(TESTS)
else
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ALONE:%=--ignore=%); most=$$?; \
	$(BIN)/python -m pytest $(ALONE) && exit $$most
endif

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

bench: $(STAMP)
	$(BIN)/python tools/bench_sketch.py --quick

bench-control: $(STAMP)
	$(BIN)/python tools/bench_control.py $(BENCH)

# Faults at random in a live job, invariants checked after each; the same seed gives the same faults.
SEED ?= 1
MINUTES ?= 5
chaos: $(STAMP)
	PYTHONPATH=.:tools $(BIN)/python -m tests.e2e.chaos.soak --seed $(SEED) --minutes $(MINUTES) $(CHAOS)

bench-pause: $(STAMP)
	$(BIN)/python tools/bench_pause.py $(BENCH)

# Root, ip, tc and setpriv needed; says so and ends well without. BENCH: its arguments, such as --quick.
bench-cluster: $(TORCHREC)
	$(BIN)/python tools/bench_cluster.py $(BENCH)

torchrec: $(TORCHREC)

# helm, kubectl, prometheus, promtool and a headless chromium into .ops-tools, once. Tests that need one skip without it.
ops-tools: $(STAMP)
	$(BIN)/python tools/install_ops_tools.py

# The chart's README, and the plain Kubernetes manifests that are written from the chart.
manifests: $(STAMP) ops-tools
	$(BIN)/python tools/gen_chart_readme.py
	$(BIN)/python tools/gen_manifests.py

# A real Prometheus scrapes a real daemon fed by a real broker while ranks train; rules, dashboards, chart and manifests.
e2e-ops: $(STAMP) ops-tools
	$(BIN)/python -m pytest -rs tests/e2e/test_ops.py tests/deploy

# atheris is installed here and not by the dev extra: only this target needs it, and it has no wheel for every Python.
FUZZ_SECONDS ?= 60
fuzz: $(STAMP)
	$(BIN)/python -c "import atheris" 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check "atheris>=2.3"
	$(BIN)/python tools/fuzz.py decode --seconds $(FUZZ_SECONDS)
	$(BIN)/python tools/fuzz.py snapshot --seconds $(FUZZ_SECONDS)

# setuptools is named because the package itself is built without isolation: a build environment of its own would
# ignore the constraints and fetch another torch.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $(STAMP)

# The peer of comparisons and the types of flexd.torchrec. Without its dependencies: they would bring another torch, and
# CUDA. fbgemm-gpu-cpu is the build whose fused kernels run on a CPU. Tests that need it skip without it.
$(TORCHREC): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		numpy tensordict torchmetrics==1.0.3 tqdm pyre-extensions
	touch $(TORCHREC)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build *.egg-info
