# The commands that people meet. Every target sets up what it needs; `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

FRAMEWORK ?= pytorch
ENGINE ?= docker
HOSTS ?= 2
PROCS_PER_HOST ?= 2
IMAGE ?= $(FRAMEWORK)
WORKERS ?= 3

BIN := .venv/bin
SHOAL := $(BIN)/shoal
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadgroup
ifeq ($(filter $(ENGINE),docker none),)
$(error ENGINE=$(ENGINE): choose docker or none)
endif
CHANNEL := .cache/digits
SCRIPT := $(if $(findstring tensorflow,$(IMAGE)),train_tensorflow.py,train.py)

# Some machines set it. Without bytecode, each start of our commands compiles them again, and pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup doctor engine known-image image images train test test-fast test-integration conformance faults soak check docs render lock bench-faults bench-launch bench-logs bench-dataparallel bench-link bench-scale bench-gpu bench-modelparallel bench-tensorflow bench-images clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with the four packages and what tests need
	@scripts/setup.sh

doctor: setup ## check what builds and jobs need of this machine, and say what to do
	@$(SHOAL) doctor

engine: ## make a Docker Engine answer (installs and starts Debian's as root)
	@scripts/engine.sh

# The name is checked before an engine is set up for it.
known-image: setup
	@scripts/engine.sh check || $(SHOAL) list $(IMAGE) >/dev/null

image: known-image engine ## build one image: FRAMEWORK=pytorch|tensorflow|huggingface, or IMAGE=<tag>
	@$(SHOAL) build $(IMAGE)

images: setup engine ## build all images of buildspec.yml
	@$(SHOAL) build

train: known-image ## train the digits on HOSTS=2 x PROCS_PER_HOST=2; ENGINE=none: without Docker
ifeq ($(ENGINE)$(findstring tensorflow,$(IMAGE)),nonetensorflow)
	$(error ENGINE=none: .venv has PyTorch only, TensorFlow is in its images. Leave ENGINE out, or choose FRAMEWORK=pytorch)
endif
ifneq ($(ENGINE),none)
	@scripts/engine.sh
endif
	@$(BIN)/python examples/digits/prepare.py $(CHANNEL)
	@$(SHOAL) run $(IMAGE) --build --engine $(ENGINE) --source examples/digits --entry-point $(SCRIPT) \
	    --hosts $(HOSTS) --procs-per-host $(PROCS_PER_HOST) --channel training=$(CHANNEL)

# One run of pytest for all tests, so that those that wait run beside those that compute.
ifdef CHANGED
test: check ## everything; CHANGED=1 or CHANGED=<revision>: only what the change can affect
	@files=$$($(BIN)/python scripts/affected.py $(CHANGED)) || exit; \
	if [ -z "$$files" ]; then echo "no test depends on what has changed"; exit; fi; \
	if grep -qE '^tests/(integration|conformance|faults)/' <<<"$$files"; then $(MAKE) --no-print-directory images || exit; fi; \
	$(PYTEST) $$files
else
# The first steps of the images wait for downloads, beside which the checks compute.
test: setup engine ## everything; CHANGED=1 or CHANGED=<revision>: only what the change can affect
	@$(MAKE) --no-print-directory -j 2 check images
	@$(PYTEST) tests
endif

check: setup ## ruff, mypy strict, rendered Dockerfiles and docs/api fresh
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(SHOAL) render --check
	@$(BIN)/python scripts/api_docs.py --check

test-fast: setup ## the tests that need no Docker
	@$(PYTEST) tests --ignore tests/integration --ignore tests/conformance --ignore tests/faults

test-integration: images ## the tests with real containers
	@$(PYTEST) tests/integration

conformance: setup engine ## the same jobs through the stock toolkit and through ours, and what differs
	@$(SHOAL) build pytorch-training:2.13.0-cpu-py311-debian12 tensorflow
	@SHOAL_CONFORMANCE_AGAIN=1 $(BIN)/pytest tests/conformance

faults: IMAGE := pytorch-training:2.13.0-cpu-py311-debian12
faults: image ## what goes wrong in real containers, and that it ends as docs/reliability.md says
	@$(PYTEST) tests/faults

soak: images ## the tests that draw at random, for hours: SEED=<number> repeats a run
	@SHOAL_SOAK=1 $(if $(SEED),SHOAL_SEED=$(SEED)) $(PYTEST) tests -m soak --timeout 3600

bench-faults: IMAGE := pytorch-training:2.13.0-cpu-py311-debian12
bench-faults: image ## how long each fault takes to end, with nothing beside it (docs/reliability.md)
	@$(BIN)/python benchmarks/faults.py

docs: setup ## write docs/api from the library's docstrings
	@$(BIN)/python scripts/api_docs.py

render: setup ## render the Dockerfiles from the templates
	@$(SHOAL) render

lock: setup ## resolve all images' requirements to locked files with hashes
	@$(SHOAL) lock

bench-launch: image ## how fast `train` launches, in containers of the image
	@$(BIN)/python benchmarks/launch.py $(IMAGE)

bench-logs: setup ## what the log costs: 1,000,000 lines through `train` against `cat`
	@$(BIN)/python benchmarks/logs.py

bench-dataparallel: setup ## collectives and a step on the backend smddp against gloo and MPI
	@$(BIN)/python benchmarks/dataparallel.py

bench-link: setup ## all_reduce between two hosts over 1 Gbit/s, on smddp against gloo (root: makes network namespaces)
	@$(BIN)/python benchmarks/link.py

bench-modelparallel: setup ## partitions, pipelines, calls, memory and throughput of model parallelism, against torch's
	@$(BIN)/python benchmarks/modelparallel.py

bench-tensorflow: FRAMEWORK = tensorflow
bench-tensorflow: image ## the tape and collectives in the TensorFlow image, against MultiWorkerMirroredStrategy
	@$(BIN)/python benchmarks/tensorflow_image.py $(IMAGE)

bench-scale: setup ## a model of all_reduce checked on this machine, and docs/scaling.svg: 2,048 ranks as it sees them
	@$(BIN)/python benchmarks/scale.py

bench-gpu: setup ## CUDA tensors on the backend smddp: NCCL, staging, AMP, overlap; exits 2 without a GPU
	@$(BIN)/python benchmarks/gpu.py

bench-images: image ## an image's size, and builds against docker build of a plain Dockerfile; QUICK=1: not the whole matrix, MATRIX=1: it alone
	@$(BIN)/python benchmarks/images.py $(IMAGE) $(if $(QUICK),--quick) $(if $(MATRIX),--matrix)

clean: ## remove .venv, caches and job directories (images stay: docker image rm)
	rm -rf .venv .cache jobs .pytest_cache .mypy_cache .ruff_cache
