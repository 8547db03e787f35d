# Everything a person or CI runs. `make demo`, `up`, `test` and `lint` do their own set-up.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

BIN := .venv/bin
BUF := node_modules/.bin/buf
MODEL := models/SmolLM2-135M-Instruct
TINY_MODEL := models/tiny-llama
SINGLE_HEAD_MODEL := models/tiny-llama-mqa
DEEP_MODEL := models/tiny-llama-deep
MANY_HEADS_MODEL := models/tiny-llama-mha
TINY_ADAPTERS := models/tiny-llama-adapters
HYBRID_MODELS := $(addprefix models/tiny-,deepseek-v2 deepseek-v3 deepseek-wide gemma3 gpt-oss lfm2 llama4 mamba2 mamba2-groups qwen3-next qwen3-next-deep)
VISION_MODELS := $(addprefix models/tiny-,llava qwen2-vl)
TORCHVISION := build/torchvision
BASELINE := protos/baseline.binpb
PYTEST := $(BIN)/python -m pytest

# `headrace demo` reads it from the environment, where neither make nor a shell expands it again.
ifdef PROMPT
override PROMPT := $(value PROMPT)
export PROMPT
endif

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' \
		| while IFS=$$'\t' read -r name text; do printf '  make %-16s %s\n' "$$name" "$$text"; done

.PHONY: runtime setup model protos demo up
runtime: # what running needs
	@scripts/setup.sh runtime

setup: ## prepare everything: .venv, Debian packages, stubs, linters, Node tools
	@scripts/setup.sh dev

protos: runtime ## generate libs/headrace from protos/ (set-up does it as well)

model: runtime $(MODEL)/config.json ## prepare SmolLM2-135M-Instruct

$(MODEL)/config.json: | runtime
	@$(BIN)/python scripts/prepare_model.py

$(TINY_MODEL)/config.json: | runtime
	@$(BIN)/python scripts/make_tiny_model.py

$(SINGLE_HEAD_MODEL)/config.json: | runtime
	@$(BIN)/python scripts/make_tiny_model.py --kv-heads 1 --target $(SINGLE_HEAD_MODEL)

$(DEEP_MODEL)/config.json: | runtime
	@$(BIN)/python scripts/make_tiny_model.py --layers 12 --target $(DEEP_MODEL)

$(MANY_HEADS_MODEL)/config.json: | runtime
	@$(BIN)/python scripts/make_tiny_model.py --heads 12 --kv-heads 12 --target $(MANY_HEADS_MODEL)

$(TINY_ADAPTERS)/poet/adapter_config.json: | runtime
	@$(BIN)/python scripts/make_tiny_adapter.py

# One run makes all that are missing.
$(addsuffix /config.json,$(HYBRID_MODELS)) &: | runtime
	@$(BIN)/python scripts/make_tiny_hybrids.py

$(addsuffix /config.json,$(VISION_MODELS)) &: | runtime
	@$(BIN)/python scripts/make_tiny_vision.py

# Image models need it, and the index may have none for processors.
$(TORCHVISION)/torchvision: | runtime
	@$(BIN)/python scripts/make_torchvision.py

demo: runtime $(MODEL)/config.json ## ask one question through four processes (PROMPT="..." overrides it)
	@$(BIN)/headrace demo $(ARGS)

up: runtime $(MODEL)/config.json ## start the four services on loopback until Ctrl-C (ARGS="--model OWNER/NAME --decode 2")
	@$(BIN)/headrace up $(ARGS)

REQUESTS ?= $(if $(RDMA),200,10000)
.PHONY: test test-fast test-vllm test-deployments test-all test-clients chaos soak test-gpu test-kube test-rdma test-rdma-vllm
.PHONY: test-install test-upgrade test-quickstart lint docs format type
# Two runs: vLLM forks its engine, which must happen before anything in the process has used gRPC.
test: VLLM_TESTS := vllm and core
test: test-fast test-vllm ## what each change must pass: units, components, the core of whole deployments and of vLLM

FAST_TESTS := not vllm and not kube and (core or not deployment)
test-fast: setup $(MODEL)/config.json $(TINY_MODEL)/config.json ## the part of make test without vLLM
	@rm -f build/flaky.md
	@$(PYTEST) -m '$(FAST_TESTS)' --numprocesses 4 --dist worksteal --second-run $(ARGS)

DEPLOYMENT_TESTS := not vllm and not kube and not core
test-deployments: setup $(MODEL)/config.json $(TINY_MODEL)/config.json ## whole deployments that make test leaves out, attacks and small benches too
	@$(PYTEST) tests/suite tests/security -m '$(DEPLOYMENT_TESTS)' --numprocesses 4 --dist worksteal --second-run $(ARGS)

test-all: setup ## everything that make test leaves out, but for hours of load, with a table at the end (ARGS="--from test-kube", "--only docs")
	@$(BIN)/python scripts/test_all.py $(ARGS)

VLLM_TESTS := vllm
test-vllm: setup $(MODEL)/config.json $(TINY_MODEL)/config.json $(SINGLE_HEAD_MODEL)/config.json $(DEEP_MODEL)/config.json $(MANY_HEADS_MODEL)/config.json $(TINY_ADAPTERS)/poet/adapter_config.json $(addsuffix /config.json,$(HYBRID_MODELS)) $(addsuffix /config.json,$(VISION_MODELS)) $(TORCHVISION)/torchvision ## the tests with vLLM, the long ones too
	@$(PYTEST) -m '$(VLLM_TESTS)' --second-run $(ARGS)

test-clients: setup $(MODEL)/config.json $(TINY_MODEL)/config.json ## chat clients in C++, Go, Java, Node and Rust, libraries, load generators and coding agents: as root it installs Debian packages (CLIENTS="cpp go")
	@scripts/install_client_tools.sh
	@$(BIN)/python scripts/build_clients.py --install $(CLIENTS)
	@$(PYTEST) tests/clients --second-run $(ARGS)

chaos: setup ## 10,000 requests while services with mutual TLS die, freeze and restart (SEED=... replays, REQUESTS=..., ARGS="--credentials tokens"; RDMA=1: 200 over RDMA verbs)
	@$(BIN)/python $(if $(RDMA),scripts/rdma_vm.py --only chaos,-m tests.chaos) --requests $(REQUESTS) $(if $(SEED),--seed $(SEED)) $(ARGS)

test-gpu: ## services, engines and the KV data plane on a CUDA device, then a bench and a record (GPU_PYTHON: an interpreter that has the packages; BENCH="--model ...")
	@GPU_PYTHON='$(GPU_PYTHON)' BENCH='$(BENCH)' scripts/test_gpu.sh $(ARGS)

test-kube: setup ## the Helm chart and the planner on a real Kubernetes API server, which the first run builds (5 minutes)
	@scripts/build_kube_apiserver.sh
	@$(PYTEST) -m kube --second-run $(ARGS)

test-rdma: setup ## the KV data plane on real RDMA verbs, in small virtual machines (ARGS="--only two": two hosts)
	@$(BIN)/python scripts/rdma_vm.py $(ARGS)

test-rdma-vllm: setup $(TINY_MODEL)/config.json ## vLLM's KV on real RDMA verbs, between two virtual machines (a quarter of an hour)
	@$(BIN)/python scripts/rdma_vm.py --only vllm

test-install: setup ## the wheel in new environments of Python 3.11 to 3.13 from pip's index (ARGS="--versions lowest python3.12")
	@PYTHONPATH=scripts $(BIN)/python -m tests.suite.installed $(ARGS)

test-upgrade: setup ## a rolling upgrade from the previous release under load (HEADRACE_PREVIOUS_COMMIT=... names another)
	@$(PYTEST) tests/suite/test_upgrade.py --second-run $(ARGS)

test-quickstart: setup ## the commands of docs/quickstart-gpu.md on two hosts, which are network namespaces
	@$(BIN)/python -m tests.suite.quickstart_gpu

soak: setup ## half an hour of mixed load: no process may grow (ARGS="--seconds 300")
	@$(BIN)/python -m tests.chaos.soak $(ARGS)

lint: setup ## format, style, types, import directions, protos, requirements, prose
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BUF) lint protos
	$(BUF) format --diff --exit-code protos
	$(BUF) breaking protos --against $(BASELINE)
	$(BIN)/python scripts/lock_requirements.py --check
	$(BIN)/python scripts/check_prose.py

docs: setup ## build the documentation site into build/docs/site
	@$(BIN)/python scripts/build_docs.py

format: setup ## rewrite the code and the protos in the project's format
	$(BIN)/ruff check --fix-only --exit-zero .
	$(BIN)/ruff format .
	$(BUF) format --write protos

type: setup ## types only
	$(BIN)/mypy

.PHONY: lock protos-baseline dist images test-images clean
lock: setup ## rewrite requirements/ from pyproject.toml and what is installed in .venv
	@$(BIN)/python scripts/lock_requirements.py

protos-baseline: setup ## take the protos as they are for the released contract (only when releasing)
	$(BUF) build protos --exclude-source-info --output $(BASELINE)

dist: setup ## build the wheel and the source archive into dist/, from the files that git tracks
	@$(BIN)/python scripts/build_dist.py dist

images: runtime $(MODEL)/config.json ## build the container images and ask them a question (docker, podman or buildah)
	@docker/build.sh
	@docker/try.sh

test-images: setup ## the images of router, registry, planner and simulated workers: sizes, contents, rights, a chat with mutual TLS
	@docker/available.sh || { echo "SKIPPED: images cannot be built here, see above"; exit 0; }; \
	docker/build.sh registry router planner prefill-sim decode-sim worker-sim; \
	PYTHONPATH=scripts $(BIN)/python -m tests.images

clean: ## remove everything that set-up and tests wrote, the models too
	rm -rf .venv .venv-cuda .cache libs/headrace models node_modules tests/clients/node/node_modules build dist
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find libs services scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
