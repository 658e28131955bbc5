# Two commands: `make demo` runs the main job on a real model, `make test` the whole test suite.
# Both set up everything they need in .venv, from the files of this project.

PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-oldest bench bench-peers gpu-check eval eval-quick eval-selection eval-blend support-table lint setup clean

setup: .venv/installed

.venv/installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup  ## any other model: make demo ARGS="--model NAME_OR_PATH"
	$(BIN)/python examples/demo.py $(ARGS)

test: setup
	$(BIN)/python examples/small_model.py
	$(BIN)/python -m pytest $(ARGS)

test-oldest: setup  ## the suite on the oldest supported transformers
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
		torch==2.13.0 transformers==5.17.0 --editable ".[dev]"
	$(BIN)/python examples/small_model.py
	.venv-oldest/bin/python -m pytest $(ARGS)

bench: setup  ## speed beside other caches (a quarter of an hour); ARGS=--quick for a glance
	$(BIN)/python examples/benchmark.py $(ARGS)

# Peers need other versions of transformers. One that cannot be installed is reported, not fatal.
.venv-kvpress/installed: PEER := kvpress==0.5.5
.venv-kvboost/installed: PEER := kvboost==0.9.0
.venv-kvpress/installed .venv-kvboost/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
		torch==2.13.0 $(PEER) >$(@D)/install.log 2>&1
	touch $@

bench-peers: setup  ## beside other libraries, each in an environment of its own (half an hour)
	-$(MAKE) .venv-kvpress/installed
	-$(MAKE) .venv-kvboost/installed
	$(BIN)/python examples/benchmark_peers.py $(ARGS)

gpu-check: setup  ## everything on a CUDA GPU, under eight minutes; ARGS=--rehearse for a try on the CPU
	$(BIN)/python examples/gpu_check.py $(ARGS)

eval: setup  ## both caches beside their rivals on every task (hours; run again, it goes on)
	-$(MAKE) .venv-kvpress/installed
	-$(MAKE) .venv-kvboost/installed
	$(BIN)/python examples/evaluate.py $(ARGS)

eval-quick: setup  ## the same way through at tiny sizes, a few minutes
	$(BIN)/python examples/evaluate.py --quick $(ARGS)

eval-selection: setup  ## how near sparse decoding is to dense; ARGS="--quick" for a glance
	$(BIN)/python examples/evaluate_selection.py $(ARGS)

eval-blend: setup  ## how near a blended prompt is to full prefill; ARGS="--quick" for a glance
	$(BIN)/python examples/evaluate_blend.py $(ARGS)

support-table: setup  ## try every family of models and write docs/models.md
	$(BIN)/python examples/support_table.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv .venv-* build *.egg-info demo_output benchmark_output eval_output
