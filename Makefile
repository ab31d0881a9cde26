# One command per task. `make` lists them.
VENV   ?= .venv
PYTHON ?= python3
NPROC  ?= 2
ARGS   ?=
MINUTES ?= 3
PINS   ?= constraints.txt
# CPU=1 takes torch from PyTorch's own index of CPU wheels, without CUDA's 4.5 GB. TORCH_INDEX names another index.
CPU    ?=
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH_INDEX ?= $(if $(CPU),$(CPU_INDEX))
BIN    := $(VENV)/bin
export PYTHONUNBUFFERED = 1
# pip takes a few minutes the first time; uv, if installed, half a minute. (uv does not install the requirements of an
# editable build: `editables` is named here.)
ifneq ($(shell uv --version 2> /dev/null),)
KNOWS_GROUPS = @true
PIP = uv pip install --compile-bytecode --python $(BIN)/python -c $(PINS)
else
KNOWS_GROUPS = $(BIN)/pip install --quiet --disable-pip-version-check 'pip>=25.1'
PIP = $(BIN)/pip install --disable-pip-version-check -c $(PINS)
endif
INSTALL = $(PIP) editables

.PHONY: help image train quick test test-all test-core test-docker test-slurm test-kubernetes again lint format bench recovery soak picture architecture docs clean
help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(VENV)/.train ## train on the digits with DDP on NPROC processes (2); ARGS="model=convnet" adds overrides; CPU=1: CPU wheels
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node=$(NPROC) -m train $(ARGS)

FAILED = .pytest_cache/failed
LANES  = test-kubernetes test-docker test-slurm
test: $(VENV)/.test ## test as CI does, in a quarter of an hour; ARGS="tests/promises/test_plan.py -k bijection" runs a part
ifeq ($(ARGS),)
	rm -rf $(FAILED)
	code=0; $(MAKE) test-core || code=$$?; $(MAKE) --keep-going --jobs=3 \
	  $(filter --output-sync=target,$(.FEATURES:%=--%=target)) --no-print-directory $(LANES) && exit $$code
else
	$(BIN)/python -m pytest -rs $(ARGS)
endif

test-all: $(VENV)/.test ## every test: all matrices, faults and substrates; Kubernetes is built
	$(BIN)/python -m mypy --platform darwin --cache-dir .mypy_cache/darwin
	$(MAKE) test TIER=

quick: lint ## two minutes: lint, all tests that start no process, and a dozen runs
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "unit or quick"

# The lanes run side by side after the core: most of their time is waiting. Without a Docker engine or root, tests are skipped
# with a reason. Tests marked `nightly` are for test-all.
TIER   = and not nightly
PYTEST = $(BIN)/python -m pytest -rs --durations=40 --failures=$(FAILED)/$@.jsonl
test-core: $(VENV)/.test
	$(PYTEST) -n 4 --dist worksteal -m "not docker and not slurm and not kubernetes and not kubeconfig $(TIER)"
test-docker: $(VENV)/.test
	$(PYTEST) -m "(docker or kubeconfig) $(TIER)" tests/substrates
test-slurm: $(VENV)/.test
	$(PYTEST) -m "slurm $(TIER)" tests/substrates
test-kubernetes: $(VENV)/.test
	$(PYTEST) -n 2 --dist worksteal -m "kubernetes $(TIER)" tests/substrates

again: # repeat what failed once, alone
	$(BIN)/python .ci/again.py $(FAILED) test-core $(LANES)

lint: $(VENV)/.test ## ruff, mypy --strict on train/, shellcheck, hadolint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy
	git ls-files '*.sh' '*.sbatch' .ci/run | xargs $(BIN)/shellcheck
	$(BIN)/hadolint docker/Dockerfile docker/wheel.Dockerfile

format: $(VENV)/.test ## format the sources with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

MAX_GB ?= 2.5
image: ## build the image muster:cpu with PyTorch's CPU wheels, and refuse one of more than MAX_GB=2.5
	docker build -f docker/Dockerfile --target cpu --build-arg TORCH_INDEX=$(or $(TORCH_INDEX),$(CPU_INDEX)) -t muster:cpu .
	docker image inspect --format '{{.Size}}' muster:cpu | \
	  awk '{ printf "muster:cpu has %.2f GB, at most $(MAX_GB)\n", $$1 / 1e9; exit $$1 > $(MAX_GB) * 1e9 }'

bench: $(VENV)/.test ## compare the kit with a hand-written DDP loop, as ratios
	$(BIN)/python -m bench.loop $(ARGS)

recovery: $(VENV)/.test ## measure seconds from a killed worker, node or store to the next step
	$(BIN)/python -m bench.recovery $(ARGS)

soak: $(VENV)/.test ## inject random faults for MINUTES (3), then check that nothing was lost
	$(BIN)/python -m bench.soak --minutes $(MINUTES) $(ARGS)

picture: $(VENV)/.train ## make README's picture of a report anew, with Chromium
	$(BIN)/python -m docs.picture $(ARGS)

architecture: $(VENV)/.test ## draw the imports between packages into the docs, and the graphs of all pages for the site
	$(BIN)/python -m docs.architecture
	$(BIN)/python -m docs.drawn

docs: $(VENV)/.train ## build the pages of docs/ as a site, in site/
	$(KNOWS_GROUPS)
	$(INSTALL) --quiet -e . --group docs
	$(BIN)/mkdocs build --strict --site-dir site

clean: ## remove the environment and caches; keep runs/
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

# Installed once, and again when pyproject.toml or constraints.txt change.
$(VENV)/.venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "muster needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# Without their requirements, which that index may have in other versions than the pinned ones.
$(VENV)/.torch: $(VENV)/.venv $(PINS)
	$(if $(TORCH_INDEX),$(PIP) --no-deps --index-url $(TORCH_INDEX) torch torchvision)
	touch $@

$(VENV)/.train: $(VENV)/.torch pyproject.toml $(PINS)
	$(INSTALL) -e .
	touch $@

$(VENV)/.test: $(VENV)/.train
	$(KNOWS_GROUPS)
	$(INSTALL) --quiet -e . --group test
	touch $@
