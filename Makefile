# One virtual environment in .venv; every target sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin
TORCH_INDEX ?=

.PHONY: setup serve test check lint bench bench-attention bench-load pictures
setup: .venv/.ready

# TORCH_INDEX: PyTorch's own index of CPU wheels, which are far smaller than the usual ones; its install page names it.
.venv/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11 or later: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(BIN)/pip install "torch==2.11.*" "torchaudio==2.11.*" --index-url $(TORCH_INDEX))

.venv/.ready: pyproject.toml | .venv/bin/pip
	$(BIN)/pip install -e ".[dev]"
	touch .venv/.serves $@

# A server and its clients need a fraction of that.
.venv/.serves: pyproject.toml | .venv/bin/pip
	$(BIN)/pip install -e ".[microphone]"
	touch $@

serve: .venv/.serves
	$(BIN)/mocha-asr serve

# A file's tests stay in one process: they share its servers. In their own order: else files of few tests come last,
# and some of these take longest.
test: setup
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

bench: setup
	$(BIN)/python tests/benchmarks/stream_latency.py

bench-load: setup
	$(BIN)/mocha-asr bench --serve --search

bench-attention: setup
	$(BIN)/python tests/benchmarks/attention_speed.py

# The pictures of the page in docs, with the bundled model.
pictures: setup
	$(BIN)/python tests/benchmarks/page_pictures.py
