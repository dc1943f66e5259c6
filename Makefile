# `make run` and `make test` each work alone on a machine with Python 3.11 and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread: networks this small get slower, not faster, with more.
export OMP_NUM_THREADS ?= 1
# Tests start many processes, each of which would compile every file again.
unexport PYTHONDONTWRITEBYTECODE
# As many test processes as cores, from 2 to 4: more wait for the slowest tests.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n < 2 ? 2 : n > 4 ? 4 : n )))

.PHONY: run test test-slow test-all lint types examples check docs dist clean

$(VENV)/.installed: pyproject.toml setup.py constraints.txt penstock/native/kernel.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0" -e ".[plot,tensorboard,dev,offline,ray,tune,pettingzoo,export,hub]"
	touch $@

run: $(VENV)/.installed
	$(BIN)/penstock train ppo --env CartPole-v1 --run.steps 500000 --run.stop rollout/ep_rew_mean 475

test: $(VENV)/.installed
	$(BIN)/pytest -n $(JOBS) --dist worksteal --timeout 100

# What `test` leaves out: tests that kill, mount, fill disks, start Ray or take more than 2 s.
# One process more than cores: they wait for other processes nearly half of the time.
test-slow: $(VENV)/.installed
	$(BIN)/pytest -n $$(( $(JOBS) + 1 )) --dist worksteal -rs -m "slow and not examples"

test-all: $(VENV)/.installed
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "slow or not slow"

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/pyright --pythonpath $(BIN)/python

examples: $(VENV)/.installed
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m examples

check: test test-slow lint types examples

$(VENV)/.docs-installed: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

# The pages as a site in build/site, with the API out of the docstrings; fails on dead links and on requests to other hosts.
docs: $(VENV)/.docs-installed
	$(BIN)/python docs/site/stage.py
	$(BIN)/zensical build --clean
	$(BIN)/python docs/site/stage.py check
	@echo "to look at it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000"

$(VENV)/.dist-installed: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check build twine
	touch $@

# The archives of a release in dist/, checked, in the order of CONTRIBUTING.md; PLATFORM names that of the wheel for a package index.
PLATFORM ?=
dist: $(VENV)/.dist-installed
	rm -rf dist
	$(BIN)/python -m build $(if $(PLATFORM),-C--build-option=--plat-name=$(PLATFORM))
	$(BIN)/twine check --strict dist/*
	$(BIN)/python .ci/check_release.py dist

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
