# Commands for users and developers. Every target sets up its dependencies. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

FRAMEWORK ?= pytorch
ENGINE ?= docker
HOSTS ?= 2
PROCS_PER_HOST ?= 2
IMAGE ?= $(FRAMEWORK)
WORKERS ?= 5
DOCS_PORT ?= 8000
IMAGE_CONTENTS := $(addprefix tests/integration/test_,images.py structure.py dropped.py devel.py)
TESTS_WITH_DOCKER := tests/integration tests/conformance tests/faults
WITHOUT_DOCKER := tests $(TESTS_WITH_DOCKER:%=--ignore %)

BIN := .venv/bin
SHOAL := $(BIN)/shoal
# Tests call make too, which would look for the jobs of this one.
PYTEST := env -u MAKEFLAGS -u MAKELEVEL $(BIN)/pytest -n $(WORKERS) --dist loadgroup
ifeq ($(filter $(ENGINE),docker none),)
$(error ENGINE=$(ENGINE): choose docker or none)
endif
SCRIPT := $(if $(findstring tensorflow,$(IMAGE)),train_tensorflow.py,train.py)

# Some machines set it. Without bytecode, each start of our commands compiles them again, and pytest compiles all tests.
unexport PYTHONDONTWRITEBYTECODE
# One for all checkouts: mypy compares digests. The first run takes half a minute of a core.
export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/shoal-tests/mypy

.PHONY: all-tests bench check-and-test-without-docker help setup setup-all doctor engine known-image image images train test test-fast test-integration conformance faults sagemaker soak tested-images today cluster-demo check fix docs docs-serve reference wheels render lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with the command shoal
	@scripts/setup.sh

setup-all: setup ## add torch, our other packages and the tests to .venv: for jobs without Docker, and developers
	@scripts/setup.sh all

doctor: setup ## check this machine for builds and jobs, and print fixes
	@$(SHOAL) doctor

engine: # start Docker if it does not answer (as root, install it if it is missing)
	@scripts/engine.sh

# The name is checked before Docker is set up for it.
known-image: setup
	@scripts/engine.sh check || $(SHOAL) list $(IMAGE) >/dev/null

image: known-image engine ## build one image: FRAMEWORK=pytorch|pytorch-latest|pytorch-cpu|tensorflow|…, or IMAGE=<tag>
	@$(SHOAL) build $(IMAGE)

images: setup engine ## build all images of buildspec.yml
	@$(SHOAL) build --all

# The soak builds and tests the others.
tested-images: setup engine #: build one image of each kind, as the tests need it
	@$(SHOAL) build $$($(BIN)/python -m tests.tested_images)

train: known-image $(if $(filter none,$(ENGINE)),setup-all) ## train the digits example on HOSTS=2 x PROCS_PER_HOST=2; ENGINE=none: without Docker
ifeq ($(ENGINE)$(findstring tensorflow,$(IMAGE)),nonetensorflow)
	$(error ENGINE=none: .venv has PyTorch only. Fix: leave ENGINE out, or set FRAMEWORK=pytorch)
endif
ifneq ($(ENGINE),none)
	@scripts/engine.sh
endif
	@$(SHOAL) run $(IMAGE) examples/digits/$(SCRIPT) --build --engine $(ENGINE) --hosts $(HOSTS) --procs-per-host $(PROCS_PER_HOST)

PARTS := fast integration conformance faults soak sagemaker
# One run of pytest for all tests, so that waiting tests and computing tests run at the same time.
ifdef PART
ifeq ($(filter $(PART),$(PARTS)),)
$(error PART=$(PART): choose one of: $(PARTS))
endif
test: $(or $(filter test-$(PART),test-fast test-integration),$(PART))
else ifdef CHANGED
test: check ## run all checks and tests; CHANGED=1 or PART=fast|integration|…: some of them
	@files=$$($(BIN)/python scripts/affected.py $(CHANGED)) || exit; \
	if [ -z "$$files" ]; then echo "no test depends on what has changed"; exit; fi; \
	if grep -qE '^tests/(integration|conformance|faults)/' <<<"$$files"; then $(MAKE) --no-print-directory tested-images || exit; fi; \
	$(PYTEST) $$files
else
# The checks take one core for a minute, beside the tests. On a machine without images, builds wait for downloads and the
# disk, and take as long as half of the tests. So the tests without Docker run beside them too.
test: setup-all engine
	@if [ -n "$$(docker image ls -q '*-training')" ]; then \
	    $(MAKE) --no-print-directory -j 2 check all-tests; \
	else \
	    $(MAKE) --no-print-directory -j 2 check-and-test-without-docker tested-images && $(PYTEST) $(TESTS_WITH_DOCKER); \
	fi

all-tests: setup-all tested-images
	@$(PYTEST) tests

check-and-test-without-docker: check
	@$(PYTEST) $(WITHOUT_DOCKER)
endif

# All tools run, and a failure of any is the failure of the target.
RUN_ALL := failed=0; run() { "$$@" || { failed=1; echo "make: failed: $$*" >&2; }; }
check: setup-all ## run ruff, mypy, the docstring and prose rules; check links, and that generated files are fresh
	@$(RUN_ALL); \
	run $(BIN)/ruff check .; \
	run $(BIN)/ruff format --check .; \
	run $(BIN)/mypy; \
	run $(SHOAL) render --check; \
	run $(BIN)/python scripts/reference.py --check; \
	run $(BIN)/python scripts/links.py; \
	run $(BIN)/python scripts/docstrings.py; \
	run $(BIN)/python scripts/prose.py; \
	exit $$failed

fix: setup-all #: repair what `make check` can repair: lint, format, rendered Dockerfiles, generated pages
	@$(RUN_ALL); \
	run $(BIN)/ruff check --fix .; \
	run $(BIN)/ruff format .; \
	run $(SHOAL) render; \
	run $(BIN)/python scripts/reference.py; \
	exit $$failed

test-fast: setup-all #: run the tests that need no Docker, without those that take five seconds or more
	@$(PYTEST) $(WITHOUT_DOCKER) -m "not long"

test-integration: setup-all tested-images #: run the tests with real containers
	@$(PYTEST) tests/integration

conformance: setup-all engine #: run the same jobs through AWS's toolkit and ours, and compare
	@$(SHOAL) build pytorch-training:2.13.0-cpu-py311-debian12 tensorflow
	@SHOAL_CONFORMANCE_AGAIN=1 $(BIN)/pytest tests/conformance

faults: IMAGE := pytorch-training:2.13.0-cpu-py311-debian12
faults: setup-all image #: break things in real containers, and check the results in docs/reliability.md
	@$(PYTEST) tests/faults

cluster-demo: setup-all #: show a Slurm job of 2 nodes on this machine: the queue, the log, the result (as root)
	@$(BIN)/python -m tests.cluster.demo

sagemaker: IMAGE := pytorch-training:2.13.0-cpu-py311-debian12
sagemaker: setup-all image #: install the SageMaker SDKs, record their requests for examples/sagemaker, and run their local mode
	@$(BIN)/python tests/integration/sagemaker_requests.py
	@SHOAL_SAGEMAKER_SDK=1 $(BIN)/pytest tests/toolkit/test_sagemaker_requests.py tests/integration/test_sagemaker_sdks.py --timeout 1800

today: setup-all #: run public scripts, unmodified, from SOURCES=DIRECTORY, in child images: TODAY="--image … --rehearsal-image …"
	@$(BIN)/python benchmarks/today.py --sources $(or $(SOURCES),$(error SOURCES: name the directory of the sources)) $(TODAY)

soak: setup-all images #: run the random tests for hours, and test the contents of all images; SEED=<number> repeats a run
	@SHOAL_SOAK=1 $(if $(SEED),SHOAL_SEED=$(SEED)) $(PYTEST) tests -m soak --timeout 3600
	@SHOAL_SOAK=1 $(PYTEST) $(IMAGE_CONTENTS)

# Not with --quiet: --strict would not see the warnings.
docs: reference .venv-docs/stamp ## write the generated pages, and build the documentation site into build/site
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "open build/site/index.html"

docs-serve: reference .venv-docs/stamp #: serve the documentation site on 127.0.0.1 (DOCS_PORT=8000), and rebuild it after changes
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve --dev-addr 127.0.0.1:$(DOCS_PORT)

reference: setup-all #: write docs/api and docs/reference from the code
	@$(BIN)/python scripts/reference.py

.venv-docs/stamp: requirements/docs.txt
	@$(BIN)/python -m venv .venv-docs
	@scripts/install.sh .venv-docs requirements/docs.txt
	@touch $@

wheels: setup-all ## build wheels and sdists of all packages into dist/ and check them; URL=https://…: the project URL
	@$(BIN)/python scripts/wheels.py $(if $(URL),--url $(URL))

render: setup ## render the Dockerfiles from the templates
	@$(SHOAL) render

lock: setup ## resolve the requirements of all images to lock files with hashes
	@$(SHOAL) lock

# Each benchmark is also a target: `make bench-launch`. `make bench` prints these lines.
#: start         README's first job, from a new clone to the trained model (without .venv)
#: launch        how fast `train` launches, in containers of the image
#: cluster       jobs on 2 to 64 hosts of this machine, and on Slurm: time, memory, open files (as root)
#: images        image sizes, and builds against docker build; QUICK=1: without the matrix, MATRIX=1: only the matrix
#: registry      from a registry to the first step at 200 Mbit/s, sizes, bytes of a release (as root; SOCI=DIRECTORY)
#: everyday      which imports and commands of published scripts the default images lack
#: dataparallel  collectives and a step on the backend smddp against gloo and MPI
#: link          all_reduce between two hosts over 1 Gbit/s, smddp against gloo (needs root)
#: compression  gradient compression at 100 Mbit/s to 10 Gbit/s, and its accuracy (needs root); TENSORFLOW=PYTHON: in TensorFlow
#: large         the accuracy with large global batches, and with little batch normalization
#: serve         examples/serve against a bare application on the same server
#: members       what it costs that ranks accept members of the job only, on two hosts (needs root)
#: fsdp          a step of FSDP2 with torch.compile on the backend smddp, against gloo
#: tensorflow    the tape and collectives in the TensorFlow image, against MultiWorkerMirroredStrategy
#: modelparallel partitions, pipelines, calls, memory and throughput against torch
#: gpu           CUDA tensors on the backend smddp: NCCL, staging, AMP, overlap; exits 2 without a GPU
#: scale         a model of all_reduce, checked on this machine and drawn for 2,048 ranks in docs/scaling.svg
#: faults        how long each fault takes to end, without other load (docs/reliability.md)
#: fork          ranks that are forked after one import, against torchrun
#: end           from the last line of a script to the prompt, `shoal run` against docker run
#: edit          Enter, and an edit under `--watch`, to the prompt, against torchrun
#: resume        restarts, elastic jobs, goodput and saves, against torchrun
#: logs          logging: 1,000,000 lines through `train` against `cat`
#: live          what the live view of `shoal run` costs the job, and the usage for report.html
#: house         lines, modules, imports and docstrings; SINCE=COMMIT counts that commit too
BENCHMARKS := $(shell sed -n 's/^\#: \([a-z]*\) .*/\1/p' Makefile)
.PHONY: $(BENCHMARKS:%=bench-%)

bench: ## run a benchmark: NAME=<name>; without NAME, list them
ifdef NAME
ifeq ($(filter $(NAME),$(BENCHMARKS)),)
	$(error NAME=$(NAME): choose one of: $(BENCHMARKS))
endif
	@$(MAKE) --no-print-directory bench-$(NAME)
else
	@sed -n 's/^#: /  make bench NAME=/p' Makefile
endif

bench-start:
	@python3 benchmarks/start.py

bench-faults: IMAGE := pytorch-training:2.13.0-cpu-py311-debian12
bench-tensorflow: FRAMEWORK = tensorflow
bench-tensorflow: MODULE = tensorflow_image
bench-launch bench-tensorflow bench-images: OPTIONS = --image $(IMAGE)
bench-images: OPTIONS += $(if $(QUICK),--quick) $(if $(MATRIX),--matrix)
bench-compression: OPTIONS = $(if $(TENSORFLOW),--tensorflow $(TENSORFLOW))
bench-registry: OPTIONS = $(if $(SOCI),--soci $(SOCI))
bench-house: OPTIONS = $(if $(SINCE),--since $(SINCE))
bench-launch bench-tensorflow bench-images bench-faults: image
$(patsubst %,bench-%,$(filter-out start,$(BENCHMARKS))): bench-%: setup-all
	@$(BIN)/python benchmarks/$(or $(MODULE),$*).py $(OPTIONS)

clean: ## remove .venv, caches and job directories (for images: docker image rm)
	rm -rf .venv .venv-docs build .cache dist jobs .pytest_cache .mypy_cache .ruff_cache
