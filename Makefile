# The same verbs for people and for CI. Everything runs in .venv, which the first verb makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SERVER_STAMP := $(VENV)/.installed-server
DEV_STAMP := $(VENV)/.installed-dev

# Without a GPU, PyTorch's CPU builds save gigabytes: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

# A plain path entry: otherwise a folder named hocket beside a script would hide the package.
EDITABLE := --config-settings editable_mode=compat

.PHONY: help demo serve test test-full test-triton lint fmt type bench clean

help: ## what each verb does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

$(STAMP): pyproject.toml
	@echo "setting up $(VENV) (once; a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(BIN)/pip install -q --disable-pip-version-check $(EDITABLE) -e .
	@touch $@

$(SERVER_STAMP): $(STAMP)
	$(BIN)/pip install -q --disable-pip-version-check $(EDITABLE) -e '.[server]'
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/pip install -q --disable-pip-version-check $(EDITABLE) -e '.[dev]'
	@touch $@

demo: $(STAMP) ## generate text with the shipped model on two ranks, then overlap off against on
	$(BIN)/hocket generate --model tiny --data-parallel-size 2 --enable-expert-parallel \
	  --max-tokens 80 --temperature 0.7 \
	  --prompt "And it came to pass" \
	  --prompt "It is a truth universally acknowledged, that" \
	  --prompt "The lady was" \
	  --prompt "In the beginning"
	$(BIN)/hocket bench overlap --model tiny --repeats 3

serve: $(SERVER_STAMP) ## serve the shipped model on two ranks, at http://127.0.0.1:8000
	$(BIN)/hocket serve tiny --data-parallel-size 2 --enable-expert-parallel --enable-dbo --dbo-prefill-token-threshold 2

test: $(DEV_STAMP) ## run the tests (quick selection)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not full and not alone" -n 2 --ignore tests/gloo
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not full and not alone" -n 2 --dist loadfile tests/gloo
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not full and alone"

test-full: $(DEV_STAMP) ## run everything, the whole grid included (hours)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 20000

test-triton: $(DEV_STAMP) ## run the Triton kernels' tests in Triton's interpreter (needs triton)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/interpreted

lint: $(DEV_STAMP) ## ruff: style and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: $(DEV_STAMP) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(DEV_STAMP) ## mypy
	$(BIN)/mypy

bench: $(STAMP) ## throughput of the shipped model on two ranks
	$(BIN)/hocket bench throughput --model tiny --data-parallel-size 2 --enable-expert-parallel

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
