# make demo      trains a small model on simulated devices (or on your GPUs)
# make test      Python tests          make test-cpp   C++ tests (SANITIZE=thread|address)
# make lint      formatting, lint, types
# make wheel     dist/roundpipe-*.whl
# TORCH: the pip requirement for torch.  PYTHON: who makes the environment.  VENV: where.
TORCH ?= torch
PYTHON ?= python3
VENV ?= .venv
SANITIZE ?=
JOBS ?= $(shell nproc)

BIN := $(VENV)/bin
CPP_BUILD := build/cpp$(if $(SANITIZE),-$(SANITIZE))
CPP_SOURCES := $(shell find csrc tests/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cu')
BUILD_INPUTS := setup.py pyproject.toml $(shell find csrc -type f)

.PHONY: demo test test-cpp lint format wheel clean
.DELETE_ON_ERROR:

# The environment, made once: torch and what building takes.
$(VENV)/.torch:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "setuptools>=77" wheel ninja "$(TORCH)"
	touch $@

# The project itself, editable, with the tools; again when a source of the libraries changes.
$(VENV)/.built: $(VENV)/.torch $(BUILD_INPUTS)
	MAX_JOBS=$(JOBS) $(BIN)/pip install -q --no-build-isolation -e ".[dev,hf]"
	touch $@

demo: $(VENV)/.built
	$(BIN)/python examples/finetune.py

test: $(VENV)/.built
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist loadfile tests

test-cpp:
	cmake -S tests/cpp -B $(CPP_BUILD) -G Ninja -DROUNDPIPE_SANITIZE=$(SANITIZE)
	cmake --build $(CPP_BUILD) -j $(JOBS)
	ctest --test-dir $(CPP_BUILD) --output-on-failure -j $(JOBS)

lint: $(VENV)/.built
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)
	$(BIN)/mypy

format: $(VENV)/.built
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP_SOURCES)

wheel: $(VENV)/.torch
	rm -rf build/lib.* build/bdist.*
	MAX_JOBS=$(JOBS) $(BIN)/pip wheel -q --no-build-isolation --no-deps -w dist .

clean:
	rm -rf build dist roundpipe/*.so *.egg-info
