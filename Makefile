# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
OUT    ?= demo-output
PY     := $(VENV)/bin/python
JOBS   ?= $(shell $(PYTHON) -c "import os; print(min(4, os.cpu_count() or 1))")

.PHONY: help setup demo test test-quick test-faults plant-faults test-newest lint docs notebooks clean bench-statistics bench-loading bench-training bench-codecs bench-sampling bench-sampling_speedup bench-prediction bench-honesty bench-gpu_feed bench-loaders_in_trainers bench-against bench-sources bench-remote bench-cluster
help:
	@echo "make demo    a real cube becomes a trained model and a map, into $(OUT)/"
	@echo "make test    linters, types, docs and the whole test suite (a quarter of an hour on two cores)"
	@echo "make test-quick   tests of about a second or less, while working (90 seconds)"
	@echo "make test-faults  faults in real processes, and all tests that make test leaves out (an hour)"
	@echo "make plant-faults IN=ml4cube/core/grid.py COUNT=20   which random faults does no quick test catch?"
	@echo "make test-newest  tests that need no torch, on the newest Python of this machine"
	@echo "make notebooks    run the notebooks and keep their outputs (NOTEBOOKS=notebooks/NAME.ipynb: only one)"
	@echo "make setup   only build $(VENV)/"
	@echo "make bench-NAME    measure (statistics, loading, training, prediction, codecs, sampling,"
	@echo "             sampling_speedup, honesty, gpu_feed, sources, remote, cluster), into benchmarks/results/"
	@echo "make bench-against BASE=COMMIT    compare the speed of every stage with that of another commit"
	@echo "make bench-loaders_in_trainers    check our loaders inside other libraries' trainers"

setup: $(VENV)/.ready
$(VENV)/.ready: pyproject.toml scripts/setup_env.py
	$(PYTHON) scripts/setup_env.py $(VENV)

demo: setup
	$(PY) -m ml4cube.demo --out "$(OUT)"

# tests start hundreds of processes, which would each compile the package where containers forbid to
# keep what was compiled
unexport PYTHONDONTWRITEBYTECODE

# each of the tests' processes has a core of its own, no more
test test-quick: export OMP_NUM_THREADS := 1

# whole files to a process, so that what the tests of a file share is made once; in their order, since
# the files of few tests, which the other order would leave for last, take longest
test: setup
	$(MAKE) --no-print-directory --jobs=2 --output-sync lint docs
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-quick: setup
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow and not soak" tests

test-faults: setup
	$(PY) -m pytest tests/faults -m "soak or not soak"
	$(PY) -m pytest tests --ignore=tests/faults -m soak

plant-faults: setup
	$(PY) scripts/plant_faults.py $(IN) --count $(or $(COUNT),20) -- -m "not slow and not soak"

# -P keeps benchmarks/statistics.py from hiding the standard library's module of that name
bench-statistics bench-codecs bench-gpu_feed bench-sampling_speedup bench-honesty \
	bench-sources bench-remote bench-cluster: bench-%: setup
	$(PY) -P benchmarks/$*.py

bench-against: setup
	$(PY) -P benchmarks/against.py --base "$(BASE)"

# the libraries it compares with live in an environment of their own
PEERS := benchmarks/.peers-venv
$(PEERS)/.ready: pyproject.toml benchmarks/peers.py scripts/setup_env.py
	$(PYTHON) benchmarks/peers.py $(PEERS) lightning accelerate pytorch-ignite

bench-training bench-loaders_in_trainers: bench-%: $(PEERS)/.ready
	$(PEERS)/bin/python -P benchmarks/$*.py

LOADERS := benchmarks/.loaders-venv
$(LOADERS)/.ready: pyproject.toml benchmarks/peers.py benchmarks/loaders.py scripts/setup_env.py
	$(PYTHON) benchmarks/loaders.py $(LOADERS)

bench-loading bench-prediction: bench-%: $(LOADERS)/.ready
	$(LOADERS)/bin/python -P benchmarks/$*.py

ANCESTOR := benchmarks/.ancestor-venv
$(ANCESTOR)/.ready: benchmarks/ancestor.py
	$(PYTHON) benchmarks/ancestor.py $(ANCESTOR)

bench-sampling: setup $(ANCESTOR)/.ready
	$(PY) -P benchmarks/sampling.py

# the newest Python of the machine with the newest packages; torch is left out, and what needs it
NEWEST := .newest-venv
NEWEST_TESTS ?= tests/core tests/cube tests/store tests/splits tests/preprocessing tests/sampling \
	tests/loading tests/evaluation tests/test_metrics.py tests/test_plotting.py tests/test_maps.py
$(NEWEST)/.ready: pyproject.toml scripts/setup_env.py scripts/newest_python.py
	$$($(PYTHON) scripts/newest_python.py) scripts/setup_env.py $(NEWEST) --without-torch

test-newest: export OMP_NUM_THREADS := 1
test-newest: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m pytest -n $(JOBS) --dist loadfile $(NEWEST_TESTS)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) scripts/check_docstrings.py

docs: setup
	$(PY) -m sphinx -q -W --keep-going -b html docs docs/_build/html

notebooks: setup
	$(PY) scripts/run_notebooks.py $(NOTEBOOKS)

clean:
	rm -rf $(VENV) $(NEWEST) $(OUT) docs/_build docs/api/generated .mypy_cache .ruff_cache .pytest_cache
