# The same targets run locally and in CI. Each one sets up its environment first (fast when it is there).
PYTHON = $$(scripts/setup.sh --python)

.PHONY: setup style check test test-all test-gpu bench

setup:                ## make .venv from exact pins
	scripts/setup.sh

style:                ## format and fix what can be fixed
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

check:                ## lint and types, changing nothing
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test:                 ## what CI runs
	scripts/test.sh

test-all:             ## with the long matrices, which write benchmarks/results; the tree must be committed
	scripts/test.sh -m "not gpu"
	$(PYTHON) -m tests.contracts.depth.matrix
	$(PYTHON) -m tests.contracts.engine.fault_matrix
	$(PYTHON) -m tests.contracts.engine.pd_matrix
	$(PYTHON) -m tests.layouts.matrix
	$(PYTHON) -m benchmarks.export_memory

test-gpu:             ## on a machine with CUDA
	$(PYTHON) -m tests.gpu.record
	$(PYTHON) -m tests.contracts.engine.fault_matrix --processes 4

bench:                ## one JSON per benchmark under benchmarks/
	$(PYTHON) -m benchmarks
