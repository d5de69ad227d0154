.RECIPEPREFIX := >
BIN := .venv/bin

.PHONY: build
build:
> @mkdir -p build && flock build/.lock $(BIN)/pip install -q --no-build-isolation --no-deps -e .
