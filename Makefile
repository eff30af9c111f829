PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test quality style bench bench-gpu cards

$(STAMP): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,demo,peft]'
	touch $@

demo: $(STAMP)
	$(BIN)/hf-efficient demo --output output/demo

test: $(STAMP)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q tests/test_layout.py

style: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/cpu_linear.py
	$(BIN)/python benchmarks/cpu_attention.py
	$(BIN)/python benchmarks/speculation.py
	$(BIN)/python benchmarks/quality.py --missing --output output/quality.json
	$(BIN)/hf-efficient demo --output output/demo
	cp output/demo/report.json benchmarks/results/demo_cpu.json

bench-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/linear.py
	$(BIN)/python benchmarks/speculation_gpu.py

cards: $(STAMP)
	$(BIN)/hf-efficient demo --output output/demo
	cp output/demo/model_card.md model_cards/SmolLM2-135M-Instruct-int4-group-64.md
