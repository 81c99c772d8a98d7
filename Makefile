# Each target makes its own virtual environment, .venv, if there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TASK ?= images

.PHONY: demo test lint format bench results clean

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/cdeq demo --task $(TASK)

# Under xdist each worker computes on one thread: two would fight over the same cores.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python bench/solvers.py --json results/bench/solvers.json
	$(BIN)/python bench/steps.py --json results/bench/steps.json

# The figures that the README shows, from fresh runs.
results: $(READY)
	mkdir -p results/tiny
	for task in images text graph; do \
	  rm -rf runs/demo-$$task && $(BIN)/cdeq demo --task $$task && \
	  cp runs/demo-$$task/results.json results/tiny/demo-$$task.json && \
	  cp runs/demo-$$task/*-$$task.png results/tiny/demo-$$task.png || exit 1; \
	done
	$(BIN)/python -m cdeq.experiments.readme README.md

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
