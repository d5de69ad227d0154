# `make`       sets everything up and runs the default experiment; the last line printed is the page's path.
# `make test`  sets everything up and runs the tests.
# Nothing is installed outside this folder. EXPERIMENT=config/full.yaml runs another experiment.

PYTHON ?= python3.11
EXPERIMENT ?= config/default.yaml
BIN := .venv/bin
ENVIRONMENT := .venv/.environment-is-ready
TRAINER := .venv/.trainer-is-built
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: all environment build test lint clean

all: environment build
	snakemake --cores all --config experiment=$(EXPERIMENT)
	@echo "$(CURDIR)/reports/$(basename $(notdir $(EXPERIMENT)))/index.html"

environment: $(ENVIRONMENT)

$(ENVIRONMENT): requirements/base.txt requirements/rivals.txt scripts/install_rivals.sh
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11, or say PYTHON=..." >&2; exit 2; }
	@command -v g++ >/dev/null || { echo "g++ is missing: install a C++17 compiler (Debian: apt-get install g++)" >&2; exit 2; }
	@command -v flock >/dev/null || { echo "flock is missing: install util-linux" >&2; exit 2; }
	@for tool in unshare nsenter; do command -v $$tool >/dev/null \
	  || echo "$$tool is missing (package util-linux): runs on several nodes will be unthrottled local ranks" >&2; done
	@[ -x $(BIN)/pip ] || $(PYTHON) -m venv .venv \
	  || { echo "no venv: install Python's venv module (Debian: apt-get install python3.11-venv)" >&2; exit 2; }
	$(BIN)/pip install --disable-pip-version-check -r requirements/base.txt
	bash scripts/install_rivals.sh
	@touch $@

# Incremental: pip's editable install runs CMake in build/, which compiles what changed. Locked: tests and people may meet.
build: $(TRAINER)

$(TRAINER): $(ENVIRONMENT) CMakeLists.txt pyproject.toml $(shell find dslide/cpp -type f)
	@mkdir -p build
	flock build/.lock $(BIN)/pip install --disable-pip-version-check -q --no-build-isolation --no-deps -e .
	@touch $@

lint: build
	ruff check .
	mypy

test: build lint
	pytest

clean:
	rm -rf build .venv/.trainer-is-built
