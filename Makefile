# `make demo` and `make test` do all the set-up that they need; the second time they are quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AXOLOTL_VENV := .venv-axolotl
DEEPSPEED := .venv-deepspeed

.PHONY: demo test unit lint format venvs venv venv-axolotl venv-deepspeed bench clean help

help:
	@echo "make demo   the main job on this machine: real vLLM, real TRL GRPO, proofs on screen"
	@echo "make test   everything that CI runs"
	@echo "make unit   tests that need no server"
	@echo "make lint   formatter, linter, type checker"
	@echo "make bench  the standalone sync throughput test, tiny preset"

demo: venv
	$(BIN)/loraflow demo

test: venvs
	@$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -m "not slow and not gpu"

unit: venv
	$(BIN)/python -m pytest tests/unit -m "not slow"

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
