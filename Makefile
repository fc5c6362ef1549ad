# `make demo` and `make test` do all the set-up that they need; the second time they are quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AXOLOTL_VENV := .venv-axolotl
DEEPSPEED := .venv-deepspeed
PYTEST := $(BIN)/python -m pytest -m "not slow and not gpu"
TIMES := --durations=25 --durations-min=10
# Of tests/server, those that share no server with others: they keep the shorter lane busy.
OWN_SERVERS := tests/server/test_chaos.py tests/server/test_fleet.py tests/server/test_soak.py

.PHONY: demo test servers trainers unit lint format venvs venv venv-axolotl venv-deepspeed bench clean help

help:
	@echo "make demo   the main job on this machine: real vLLM, real TRL GRPO, proofs on screen"
	@echo "make test   everything that CI runs"
	@echo "make unit   tests that need no server"
	@echo "make lint   formatter, linter, type checker"
	@echo "make bench  the standalone sync throughput test, tiny preset"

demo: venv
	$(BIN)/loraflow demo

test: venv  # two lanes: most of what each does is waiting for a server to start
	@$(MAKE) --no-print-directory --jobs=2 --keep-going servers trainers

servers: venv
	@status=0; \
	$(MAKE) --no-print-directory lint || status=1; \
	$(MAKE) --no-print-directory unit || status=1; \
	$(PYTEST) tests/server $(OWN_SERVERS:%=--ignore=%) $(TIMES) || status=1; \
	exit $$status

trainers: venv venv-axolotl venv-deepspeed  # told at its end, since the other lane tells all the time
	@mkdir -p outputs; status=0; \
	$(PYTEST) tests/integration $(OWN_SERVERS) $(TIMES) > outputs/trainers.log 2>&1 || status=$$?; \
	cat outputs/trainers.log; exit $$status

unit: venv
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
