# Each target makes its own virtual environment, .venv, if there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TASK ?= images
# Compiled once for all processes of the tests, and outside the folders of the code.
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test release-test quick lint format docs bench bench-graphs bench-students bench-deploy results web wheel clean

$(READY): pyproject.toml experiments/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt -e '.[dev]' -e ./experiments
	touch $(READY)

demo: $(READY)
	$(BIN)/cdeq demo --task $(TASK)

# Under xdist each worker computes on one thread: two would fight over the same cores. The tests of a file stay together:
# they share what takes long to make. The files that take longest come first, as tests/conftest.py orders them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
test: $(READY)
	$(PYTEST)

# What is looked at before a release: the wheel alone, every kind of model exported and compiled, a whole demo. Some
# minutes.
release-test: $(READY)
	$(PYTEST) -m release

# Without what trains for long or starts processes.
quick: $(READY)
	$(PYTEST) -m "not slow and not release"

# Not the README, whose code has its comments in a column.
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check src experiments tests bench examples web
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format src experiments tests bench examples web

# Strict: a link that leads nowhere, or a page that nothing leads to, is an error.
docs: $(READY)
	$(BIN)/mkdocs build --strict

# All run before any is copied: a copied figure would make the tree, and so the commit, dirty.
bench: $(READY)
	$(BIN)/python bench/solvers.py --json runs/bench/solvers.json
	$(BIN)/python bench/steps.py --json runs/bench/steps.json
	$(BIN)/python bench/image_loading.py --json runs/bench/image_loading.json
	$(BIN)/python bench/rollout_memory.py --json runs/bench/rollout_memory.json
	$(BIN)/python bench/cost.py --json runs/bench/cost.json
	mkdir -p results/bench
	cp runs/bench/*.json runs/bench/*.md results/bench/

# About a quarter of an hour: graphs of ten thousand to a million nodes.
bench-graphs: $(READY)
	$(BIN)/python bench/graph_scale.py scale --json runs/bench/graph_scale.json
	$(BIN)/python bench/graph_scale.py train --json runs/bench/graph_scale_train.json
	$(BIN)/python bench/graph_scale.py parts --json runs/bench/graph_scale_parts.json
	mkdir -p results/bench
	cp runs/bench/graph_scale* results/bench/

# The students of demos and zoo put to use, those of the demos trained first: half an hour.
bench-deploy: $(READY)
	$(BIN)/python bench/deploy.py --json runs/bench/deploy.json
	$(BIN)/python bench/parity.py --json runs/bench/parity.json
	mkdir -p results/bench
	cp runs/bench/deploy.* runs/bench/parity.* results/bench/

# Students with defaults on maps that are not ours, where to spend a given time, certificates: half an hour.
bench-students: $(READY)
	$(BIN)/python bench/strangers.py --json runs/bench/strangers.json
	$(BIN)/python bench/frontier.py --json runs/bench/frontier.json
	$(BIN)/python bench/frontier.py --exported --no-variants --json runs/bench/frontier_exported.json
	$(BIN)/python bench/certificate.py --parts coverage proven slow --students runs/bench/students --json runs/bench/certificate.json
	$(BIN)/python bench/certificate.py --parts solving compaction training --students runs/bench/students --json runs/bench/certificate_times.json
	$(BIN)/python bench/generation.py --json runs/bench/generation.json
	mkdir -p results/bench
	cp runs/bench/strangers.* runs/bench/frontier*.* runs/bench/certificate*.* runs/bench/generation.* results/bench/

# The page to play with, web/dist/index.html; the first time it trains the model of the images demo, for some minutes.
web: $(READY)
	@command -v npm >/dev/null || { echo "make web needs npm, which Debian has as npm and others with Node.js"; exit 1; }
	npm ci --prefix web --ignore-scripts --no-audit --no-fund
	$(BIN)/python web/build.py

# An sdist, and from it a wheel, in dist/.
wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

# The figures that the README shows, from fresh runs; copied when all have run, as above.
results: $(READY)
	for task in images text graph; do \
	  rm -rf runs/demo-$$task && $(BIN)/cdeq demo --task $$task || exit 1; \
	done
	mkdir -p results/tiny/recipes
	for task in images text graph; do \
	  cp runs/demo-$$task/recipes.json results/tiny/recipes/demo-$$task.json && \
	  cp runs/demo-$$task/results.json results/tiny/demo-$$task.json && \
	  cp runs/demo-$$task/*-$$task.png results/tiny/demo-$$task.png || exit 1; \
	done
	$(BIN)/python -m cdeq_experiments.pages.fill README.md docs/*.md

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site web/dist web/node_modules src/*.egg-info
