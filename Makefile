# make demo | test | test-all | test-extended | test-gpu-emulated | first-contact-emulated | test-triton | check | docs | format | bench | bench-rivals | zoo | dist | setup | clean. Each sets up what it needs; `setup` does only that.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready

# One worker for each core, so one thread in each.
PYTEST_ARGUMENTS ?= --numprocesses auto
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: help setup demo check dist docs format test test-all test-extended test-gpu-emulated first-contact-emulated test-triton bench bench-rivals zoo clean

help:
	@sed -n 1p Makefile

setup: $(READY)

# torch goes in first and alone, so that no other requirement chooses its version or build.
$(READY): pyproject.toml constraints.txt setup.py $(wildcard headrace/*/csrc/* headrace/*/*/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "headrace needs Python 3.11 or later; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
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

# The site, in build/site. A link that leads nowhere is an error, and so is anything that would come from the network.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# `test`: what is likeliest to notice a mistake, in minutes. `test-extended`: the rest. `test-all`: both, in about an hour on two cores.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGUMENTS) -m "not extended"

test-all: test test-extended

test-extended: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGUMENTS) -m extended

# The tests that need an accelerator, on the emulated one, which is strict about alignment here. A session of its own.
test-gpu-emulated: $(READY)
	HEADRACE_TEST_ACCELERATOR=emu OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGUMENTS) tests/gpu

# Every first measurement on an accelerator, tried on the emulated one with tiny models. Some minutes; its times mean nothing.
first-contact-emulated: $(READY)
	DEVICE=emu SIZE=tiny SECONDS_LEFT=7200 PATIENCE=4 OMP_NUM_THREADS=1 PYTHON=$(BIN)/python \
		benchmarks/gpu/first_contact.sh build/first_contact_emulated

# The kernel for accelerators, in Triton's interpreter. Triton is in a folder of its own: 700 MB that no other test needs.
test-triton: $(READY)
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target build/triton --constraint constraints.txt triton
	PYTHONPATH=build/triton OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/packed/test_device.py

# A Llama with random weights learns to write Python, in device memory for a quarter of its weights. Its first losses
# are compared, to the last bit, with those of the same model trained without headrace.
demo: $(READY)
	@rm -rf build/demo
	$(BIN)/headrace train \
		--text "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
		--include '*.py' --exclude 'site-packages/*' 'dist-packages/*' 'test/*' \
		--device-memory 25% --compare-plain 5 \
		--sequence-length 128 --steps 60 --warmup-steps 10 --learning-rate 1e-3 --output build/demo

# All but the rivals. One that misses a bar does not keep the rest from running.
bench: $(READY)
	@failed=; for benchmark in $$(grep -l '__main__' benchmarks/*.py | grep -v /rivals.py); do \
		echo "== $$benchmark"; PYTHONPATH=. $(BIN)/python "$$benchmark" || failed="$$failed $$benchmark"; \
	done; if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

# headrace beside accelerate, transformers, FSDP2, DeepSpeed and torchao, in an environment with the last two beside ours.
bench-rivals: $(READY)
	$(BIN)/python -m venv build/rivals
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
		> "$$(build/rivals/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	build/rivals/bin/python -m pip install --quiet einops hjson msgpack ninja py-cpuinfo pydantic setuptools wheel
	DS_BUILD_OPS=0 build/rivals/bin/python -m pip install --quiet --no-build-isolation --no-deps deepspeed==0.19.8
	TORCH_EXTENSIONS_DIR="$(CURDIR)/build/rivals/extensions" PATH="$(CURDIR)/build/rivals/bin:$$PATH" PYTHONPATH=. build/rivals/bin/python benchmarks/rivals.py --write

# Every architecture of transformers and of diffusers, in three places: hours. Writes docs/models.md and its sibling.
zoo: $(READY)
	@mkdir -p build
	@rm -f build/zoo.jsonl build/zoo_diffusers.jsonl
	$(BIN)/python -m tests.zoo --results build/zoo.jsonl
	$(BIN)/python -m tests.zoo --results build/zoo.jsonl --write docs/models.md
	$(BIN)/python -m tests.zoo --of diffusers --results build/zoo_diffusers.jsonl
	$(BIN)/python -m tests.zoo --of diffusers --results build/zoo_diffusers.jsonl \
		--write docs/models_diffusers.md

# What is released, in dist/; docs/releasing.md has the steps around it.
dist: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[release]'
	PATH="$(abspath $(BIN)):$$PATH" .ci/dist

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
