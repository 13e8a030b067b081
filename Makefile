# A fresh machine needs `make serve` and `make test` only. Each makes the environment first.
PYTHON ?= python3
BIN := .venv/bin
# Two thirds of what a normal process gets. `nice` alone gives a tenth: hours beside a busy program.
NICE := nice -n 2
# Python compiles what it imports, once; pip would compile 18,000 files, for over a minute.
INSTALL := pip install --quiet --no-compile
export PYTHONDONTWRITEBYTECODE :=
CPP := $(wildcard engine/native/src/*/*.cpp engine/native/src/*/*.h)

.PHONY: install develop environments serve test check format test-core test-models test-parts test-services test-api test-ray test-chaos test-busy test-long fuzz clean

# What serving needs.
install: .venv/.compiled

# What checks, tests and benchmarks need too.
develop: install .venv/.developed

# All that tests need. With --jobs they are made side by side.
environments: develop .venv-core/.installed .venv-clients/.installed

# torch comes first, so that no later package pulls in another build of it.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/$(INSTALL) -c constraints.txt torch
	$(BIN)/$(INSTALL) -c constraints.txt -e '.[serve]'
	@touch $@

# After .compiled, which imports: an import must not meet a package that is half installed.
.venv/.developed: .venv/.installed | .venv/.compiled
	$(BIN)/$(INSTALL) -c constraints.txt -e '.[serve,dev]'
	$(BIN)/python -c 'import hypothesis, openai, pytest'
	@touch $@

# Not by the first start, nor by each of several processes that start together.
.venv/.compiled: .venv/.installed
	$(BIN)/python -m engine.native.build & \
	$(BIN)/python -c 'import deploy.commands.serve, deploy.ray.launcher, deploy.services.gateway, deploy.services.worker, engine.model.runner' && \
	wait $$!
	@touch $@

serve: install
	$(BIN)/baton serve

check: .venv/.developed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/yamllint --strict deploy
	$(BIN)/hadolint deploy/container/Dockerfile
	$(BIN)/clang-format --dry-run --Werror $(CPP)

# Four parts at a time, the longest first: services mostly wait, and parts that only compute give
# way to them (`NICE`). The output of each part is printed when it ends.
test: develop .venv-core/.installed
	$(MAKE) --jobs 4 --keep-going --output-sync=target test-services test-api test-models test-core test-parts test-ray test-chaos

# Real processes: what a gateway answers, and all else.
API := tests/e2e/compat tests/e2e/gateway

test-api: develop .venv-clients/.installed
	$(BIN)/python -m pytest $(API)

test-services: develop .venv-clients/.installed
	$(BIN)/python -m pytest tests/e2e $(addprefix --ignore ,$(API) tests/e2e/ray)

test-ray: develop
	$(BIN)/python -m pytest tests/e2e/ray

test-chaos: develop
	$(BIN)/python -m pytest tests/chaos

test-models: develop
	$(NICE) $(BIN)/python -m pytest tests/model

test-parts: develop
	$(NICE) $(BIN)/python -m pytest tests $(addprefix --ignore tests/,unit e2e chaos model)

# The unit tests in an environment without torch and Ray: the core needs neither.
test-core: .venv-core/.installed
	$(NICE) .venv-core/bin/python -m pytest -q tests/unit

# All tests while another program uses every core, as on a machine that is shared.
test-busy: develop .venv-core/.installed
	$(BIN)/python -m tests.busy $(MAKE) test

# The longest tests: GPU code interpreted or compiled on a CPU, networks that are cut, some benchmarks.
test-long: develop
	$(BIN)/python -m pytest -m long tests

# Searches longer than the tests do: hostile bytes from peers, and examples of properties.
fuzz: develop
	$(BIN)/python -m pytest --hypothesis-profile search tests/props tests/unit tests/fuzz/test_listeners.py
	$(BIN)/python -m tests.fuzz.decoders -runs=200000
	$(BIN)/python -m tests.fuzz.grammars --runs 20000

# Not beside .venv/.developed: both write the package's metadata into this folder.
.venv-core/.installed: .venv-core/.libraries | .venv/.developed
	.venv-core/bin/$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# All that '.[bench,otel,test]' needs. This may run beside .venv/.installed.
.venv-core/.libraries: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-core
	$(PYTHON) -c "$$LIST_NEEDS" bench otel test > .venv-core/needs.txt
	.venv-core/bin/$(INSTALL) -c constraints.txt -r .venv-core/needs.txt
	@touch $@

define LIST_NEEDS
import sys, tomllib
project = tomllib.load(open('pyproject.toml', 'rb'))['project']
needs = [project['optional-dependencies'][extra] for extra in sys.argv[1:]]
print(*project['dependencies'], *sum(needs, []), sep='\n')
endef
export LIST_NEEDS

# Public clients, which need other versions of packages. Without npm its client is left out.
.venv-clients/.installed: tests/e2e/clients/constraints.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/$(INSTALL) -r tests/e2e/clients/constraints.txt
	-npm install --silent --no-audit --no-fund --prefix .venv-clients openai@7.57.0
	@touch $@

format: develop
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

proto: develop
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. router/gateway/inference/inference.proto

clean:
	rm -rf .venv .venv-core .venv-clients
