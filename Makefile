# make demo | test | check | format | bench | setup | clean. Each sets up what it needs; `make setup` alone does only that.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready

# One worker for each core, so one thread in each.
PYTEST_ARGUMENTS ?= --numprocesses auto
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: help setup demo check format test bench clean

help:
	@sed -n 1p Makefile

setup: $(READY)

# torch goes in first and alone, so that no other requirement chooses its version or build.
$(READY): pyproject.toml constraints.txt setup.py $(wildcard millrace/optim/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "millrace needs Python 3.11 or later; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGUMENTS)

# A Llama with random weights learns to write Python, in device memory for a quarter of its weights. Its first losses
# are compared, to the last bit, with those of the same model trained without millrace.
demo: $(READY)
	@rm -rf build/demo
	$(BIN)/millrace train \
		--text "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
		--include '*.py' --exclude 'site-packages/*' 'dist-packages/*' 'test/*' \
		--device-memory 25% --compare-plain 5 \
		--sequence-length 128 --steps 60 --warmup-steps 10 --learning-rate 1e-3 --output build/demo

bench: $(READY)
	@for benchmark in $$(grep -l '__main__' benchmarks/*.py); do \
		echo "== $$benchmark"; PYTHONPATH=. $(BIN)/python "$$benchmark" || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
