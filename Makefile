# A fresh machine needs `make serve` and `make test` only. Each makes the environment first.
PYTHON ?= python3
BIN := .venv/bin
CPP := $(wildcard */native/src/*.cpp */native/src/*.h engine/model/native/src/*.cpp engine/model/native/src/*.h)

.PHONY: install environments serve test check format test-core test-parts test-services test-ray test-chaos test-long fuzz clean

install: .venv/.installed

# All that tests need. With --jobs they are made side by side.
environments: .venv/.installed .venv-core/.installed .venv-clients/.installed

# torch comes first, so that no later package pulls in another build of it.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[serve,dev]'
	@touch $@

serve: install
	$(BIN)/baton serve

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(CPP)

# Three parts at a time: services mostly wait, and parts that only compute give way to them (`nice`).
# The output of each part is printed when it ends.
test: install .venv-core/.installed
	$(MAKE) --jobs 3 --keep-going --output-sync=target test-services test-parts test-core test-ray test-chaos

test-services: install .venv-clients/.installed
	$(BIN)/python -m pytest -m 'not long and not ray' tests/e2e

test-ray: install
	$(BIN)/python -m pytest -m 'ray and not long' tests/e2e

test-chaos: install
	$(BIN)/python -m pytest tests/chaos

test-parts: install
	nice $(BIN)/python -m pytest tests --ignore tests/unit --ignore tests/e2e --ignore tests/chaos

# The unit tests in an environment without torch and Ray: the core needs neither.
test-core: .venv-core/.installed
	nice .venv-core/bin/python -m pytest -q tests/unit

# The longest tests: GPU code interpreted on a CPU, networks that are cut, some benchmarks.
test-long: install
	$(BIN)/python -m pytest -m long tests

# Searches longer than the tests do: hostile bytes from peers, and examples of properties.
fuzz: install
	$(BIN)/python -m pytest --hypothesis-profile search tests/props tests/unit tests/fuzz/test_listeners.py
	$(BIN)/python -m tests.fuzz.decoders -runs=200000
	$(BIN)/python -m tests.fuzz.grammars --runs 20000

# Not beside the other one: both write the package's metadata into this folder.
.venv-core/.installed: pyproject.toml constraints.txt | .venv/.installed
	$(PYTHON) -m venv .venv-core
	.venv-core/bin/pip install --quiet -c constraints.txt -e '.[bench,test]'
	@touch $@

# Public clients, which need other versions of packages. Without npm its client is left out.
.venv-clients/.installed: tests/e2e/clients/constraints.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet -r tests/e2e/clients/constraints.txt
	-npm install --silent --no-audit --no-fund --prefix .venv-clients openai@7.57.0
	@touch $@

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

proto: install
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. router/gateway/inference/inference.proto

clean:
	rm -rf .venv .venv-core .venv-clients
