# `make repro` and `make test` do all the set-up themselves. Anything interrupted is finished by running it again.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
BIN := .venv/bin
QUANTIZERS := envs/quantizers/.venv
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export MLFLOW_DISABLE_TELEMETRY := true
export DVC_NO_ANALYTICS := true

.PHONY: bench bench-peers sweep verify torture full-disk fuzz help setup setup-quantizers params repro test test-fast smoke report ui plan compare lint clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

# A stamp is written last, so that a set-up which was interrupted starts again; pip skips what is already there.
.venv/.ready: pyproject.toml constraints.txt
	command -v $(PYTHON) > /dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or set PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	KERNELS_DIR=artifacts/kernels python -c "from pipeline.engine import native; print('kernels:', native.refusal() or 'compiled')"
	touch $@

$(QUANTIZERS)/.ready: envs/quantizers/requirements.lock
	command -v python3.11 > /dev/null || { echo "error: auto-gptq needs Python 3.11; install it or set backend: llmcompressor (experiments: -S quantize=llmcompressor)" >&2; exit 1; }
	python3.11 -m venv $(QUANTIZERS)
	$(QUANTIZERS)/bin/pip install --quiet --requirement envs/quantizers/requirements.lock
	touch $@

setup: .venv/.ready ## the main environment, .venv

setup-quantizers: $(QUANTIZERS)/.ready ## the environment of the two archived libraries

params: setup ## compile conf/ into params.yaml
	python -m pipeline.compile

repro: setup ## the answer for the committed experiment: environments, all stages, the report
	@! python -m pipeline.compile --needs-quantizers || $(MAKE) --no-print-directory setup-quantizers
	@python -m pipeline.compile --unlock
	dvc repro || { code=$$?; python -m pipeline.compile --restore; exit $$code; }
	@python -m pipeline.compile --verdict

# two at a time, each on one core: most tests wait for imports, and threads that share a core wait for each other
TESTS := OMP_NUM_THREADS=1 pytest --numprocesses 2 --no-loadscope-reorder
test: setup ## every test that this machine can run; what is skipped is listed with its reason
	@$(MAKE) --no-print-directory setup-quantizers || echo "tests marked quantizers will be skipped"
	$(TESTS)

test-fast: setup ## the tests that take seconds
	$(TESTS) -m "not slow and not quantizers and not servers and not gpu"

smoke: setup ## the whole graph on a tiny random model, in artifacts/smoke
	python -m pipeline.scratch artifacts/smoke experiment=smoke
	@cd artifacts/smoke && python -m pipeline.compile --verdict

report: setup ## write reports/ again from the results that are there
	@python -m pipeline.compile --unlock
	dvc repro --single-item report
	@python -m pipeline.compile --verdict

ui: setup ## MLflow on http://127.0.0.1:5000
	mlflow ui --host 127.0.0.1 --backend-store-uri "$$(python -m pipeline.compile --tracking-uri)"

plan: setup ## what an experiment needs: make plan EXPERIMENT=llama3_8b
	@python -m pipeline.compile --plan $(if $(EXPERIMENT),experiment=$(EXPERIMENT))

compare: setup ## these results against another commit's, exit 1 on a regression: make compare BASE=main
	@test -n "$(BASE)" || { echo "error: BASE is not set; make compare BASE=main" >&2; exit 2; }
	@python -m pipeline.compare --base "$(BASE)"

# jobs share this machine's cores: one after the other; the workspace's own results are points as well
GRIDS := 'quantize.gptq.group_size=16,32' 'quantize.awq.group_size=16,32' 'quantize.gptq.bits=3,8' \
	'quantize.gptq.true_sequential=false quantize.gptq.backend=auto_gptq,llmcompressor' \
	'quantize.awq.backend=llmcompressor'
sweep: setup ## quality against size over settings, into the report: make sweep [GRID='quantize.gptq.bits=3,4']
	failed=0; for grid in $(if $(GRID),'$(GRID)',$(GRIDS)); do \
		python -m pipeline.sweep --multirun $$grid \
			'sweep.stages=[quantize@gptq,evaluate@gptq,quantize@awq,evaluate@awq]' || failed=1; done; \
	python -m pipeline.tradeoff; $(MAKE) --no-print-directory report; exit $$failed

verify: setup ## an experiment twice in clean folders, compared: make verify [EXPERIMENT=smoke]
	python -m pipeline.verify $(if $(EXPERIMENT),experiment=$(EXPERIMENT))

torture: setup ## the smoke graph killed KILLS times at random moments, into reports/torture.json
	python -m tests.torture --kills $(or $(KILLS),50)

full-disk: smoke ## every stage of the smoke graph on a disk that is full from any of its writes on
	python -m tests.full_disk

fuzz: setup ## damaged checkpoints by the thousand through the readers, into reports/fuzz.json
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	python -m tests.fuzz_checkpoints --executions $(or $(EXECUTIONS),200000)

# torchvision and its like are not used, and of another build than torch they end every import of transformers
bench-peers: ## llama.cpp and vLLM in environments of their own (4 GB), for `make bench`
	for engine in llamacpp vllm; do \
		$(PYTHON) -m venv envs/$$engine/.venv; \
		envs/$$engine/.venv/bin/pip install --quiet --requirement envs/$$engine/requirements.txt; done
	envs/vllm/.venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec

bench: setup ## this engine beside transformers (llama.cpp, vLLM) on the default artifacts, into reports/bench/ (quiet machine, minutes)
	python -m bench.decoding

lint: setup ## ruff, mypy, and params.yaml against conf/
	ruff check .
	ruff format --check .
	mypy
	python -m pipeline.compile --check

clean: ## remove results and caches (not the environments, not reports/)
	rm -rf artifacts multirun outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis .dvc/cache .dvc/tmp
	find . -name __pycache__ -not -path './.venv/*' -not -path './envs/*/.venv/*' -prune -exec rm -rf {} +
