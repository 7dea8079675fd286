# One virtual environment in .venv; every target sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: setup serve test check lint bench bench-attention bench-load pictures
setup: .venv/.ready

# Without an NVIDIA GPU the CPU wheels of the same versions are far smaller; they are taken where their index answers.
.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	@if ! command -v nvidia-smi >/dev/null && ! $(BIN)/python -c "import torch, torchaudio" 2>/dev/null \
	   && curl -fsSI --max-time 5 $(CPU_INDEX)/torch/ >/dev/null 2>&1; then \
	   $(BIN)/pip install "torch==2.11.*" "torchaudio==2.11.*" --index-url $(CPU_INDEX); fi
	$(BIN)/pip install -e ".[dev]"
	touch $@

serve: setup
	$(BIN)/mocha-asr serve

test: setup
	$(BIN)/pytest

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
