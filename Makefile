# Every target works alone on a fresh clone: what needs the environment makes it first.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCHMARKS := $(wildcard benchmarks/*.py)
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install demo docs test test-slow test-matrix lint format bench clean distclean

help:
	@echo 'make install    make $(VENV) with the versions of constraints.txt (some 5.5 GB; PYTHON=... names a Python >= 3.12)'
	@echo 'make demo       train a small GPT four ways on two CPU ranks (ARGS=--quick: one minute)'
	@echo 'make test       the test suite on CPU ranks (ARGS="tests/schedules -x": a part of it)'
	@echo 'make test-slow  the tests that take minutes each'
	@echo 'make test-matrix  the core tests with every release of megatron-core, an environment each (MEGATRON_MAIN=PATH)'
	@echo 'make lint       ruff, mypy, import-linter and bash -n'
	@echo 'make format     let ruff mend what it can'
	@echo 'make docs       docs/ as a site in site/ (ARGS=--dirty: what has changed)'
	@echo 'make bench      the benchmarks in their quick form'
	@echo 'make clean      remove caches and runs/demo; make distclean also removes $(VENV) and .venvs'

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt
	@python="$$(bash scripts/find-python.sh)" || exit 1; \
	if ! [ -x $(BIN)/python ]; then echo "Making $(VENV) with $$python"; "$$python" -m venv $(VENV); fi
	@echo 'Installing into $(VENV), which takes some minutes the first time'
	@$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev,data,docs]' \
		| sed '/already satisfied/d'
	@touch $@

demo: $(STAMP)
	$(BIN)/megatron-async demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

# Some 5.5 GB for each release and Python. MEGATRON_MAIN names Megatron-LM's main branch (a git
# repository or a folder); CHECKOUTS="0.18.2=PATH 0.19.2=PATH main=PATH" checkouts whose own
# pretrain_gpt.py is run as well.
test-matrix:
	@python="$$(bash scripts/find-python.sh)" || exit 1; \
	"$$python" scripts/test_matrix.py $(if $(MEGATRON_MAIN),--megatron-main $(MEGATRON_MAIN)) \
		$(if $(CHECKOUTS),--checkout $(CHECKOUTS)) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@for script in .ci/run scripts/*.sh examples/*.sh examples/*/*.sh; do \
		if [ -e "$$script" ]; then bash -n "$$script" || exit 1; fi; done

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Fails where a link leads nowhere.
docs: $(STAMP)
	$(BIN)/mkdocs build --strict $(ARGS)

bench: $(STAMP)
	@for benchmark in $(BENCHMARKS); do \
		echo "== $$benchmark --quick"; $(BIN)/python "$$benchmark" --quick $(ARGS) || exit 1; done

clean:
	rm -rf runs/demo build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './.venvs/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .venvs
