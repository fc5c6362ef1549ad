# `make demo` and `make test` do all the set-up that they need; the second time they are quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AXOLOTL_VENV := .venv-axolotl
DEEPSPEED := .venv-deepspeed
PYTEST := $(BIN)/python -m pytest -m "not slow and not gpu"

.PHONY: demo test unit lint lint-and-unit format venvs venv venv-axolotl venv-deepspeed bench clean help

help:
	@echo "make demo   the main job on this machine: real vLLM, real TRL GRPO, proofs on screen"
	@echo "make test   everything that CI runs"
	@echo "make unit   tests that need no server"
	@echo "make lint   formatter, linter, type checker"
	@echo "make bench  the standalone sync throughput test, tiny preset"

demo: venv
	$(BIN)/loraflow demo

test: venv  # pip sets up the other environments while tests run that need this one alone
	@status=0; \
	$(MAKE) --no-print-directory --jobs=2 --keep-going lint-and-unit venv-axolotl venv-deepspeed || status=1; \
	$(PYTEST) tests/server tests/integration --durations=25 --durations-min=10 || status=1; \
	exit $$status

lint-and-unit: venv
	@status=0; \
	$(MAKE) --no-print-directory lint || status=1; \
	$(MAKE) --no-print-directory unit || status=1; \
	exit $$status

unit: venv  # one process: some look at what is left in shared memory, which is the whole machine's
	$(PYTEST) tests/unit tests/attacks

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: venv
	$(BIN)/loraflow bench --preset tiny

venvs:  # side by side: pip keeps one core busy
	@$(MAKE) --no-print-directory --jobs=2 venv venv-axolotl venv-deepspeed

venv: $(VENV)/.ready
venv-axolotl: $(AXOLOTL_VENV)/.ready
venv-deepspeed: $(DEEPSPEED)/.ready

$(VENV)/.ready: pyproject.toml scripts/setup_venv.py
	$(PYTHON) scripts/setup_venv.py $(VENV)
	@touch $@

$(AXOLOTL_VENV)/.ready: pyproject.toml scripts/setup_venv.py
	$(PYTHON) scripts/setup_venv.py --axolotl $(AXOLOTL_VENV)
	@touch $@

# DeepSpeed apart from the rest: where it is installed, transformers and accelerate import it everywhere.
$(DEEPSPEED)/.ready: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(DEEPSPEED) \
		deepspeed==0.19.8 hjson msgpack py-cpuinfo
	@touch $@

clean:
	rm -rf $(VENV) $(AXOLOTL_VENV) $(DEEPSPEED) outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis
