# `make train` and `make test` set up everything they need in .venv with nothing but Python and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Ranks wait for each other a third of the time: two tests at once fill two cores, and who is done first takes over from the other.
SUITE := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: train test test-all exhaustive test-gpu lint poison reliability bench-check clean

train: $(READY)
	$(BIN)/layerwise train configs/tiny.toml --nproc 2

# Something of every part: what to run before and after a change.
test: $(READY) lint
	$(SUITE)

# What `make test` leaves out: every option with every other, long searches, sabotaged scenes, the quick profile of the whole reliability board.
test-all: $(READY)
	$(SUITE) -m "slow and not exhaustive"

# What that leaves out in turn: most cases of the largest crosses, of meshes and models with everything else.
exhaustive: $(READY)
	$(SUITE) -m exhaustive

# What needs a GPU. CI has none: the Python that has torch for it is the one to run this with.
test-gpu:
	PYTHONPATH=src:. $(PYTHON) -m pytest tests/gpu

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# Both parts of the suite with uninitialised memory full of NaN, in this process and in every rank that tests start.
poison: $(READY)
	LAYERWISE_POISON=1 $(SUITE) -m "not exhaustive"

# Every figure of the reliability board at full count, each with its control.
reliability: $(READY)
	$(BIN)/python -m tests.reliability all

# Speed of two trees, measured in turn on a GPU: fails if NEW is more than 3 % slower. OLD and NEW are folders or git revisions; ARGS="--self" is the control.
NEW ?= .
bench-check:
	$(PYTHON) benchmarks/bench_check.py --old "$(or $(OLD),$(error Name what to compare with: make bench-check OLD=<folder or git revision>))" --new "$(NEW)" $(ARGS)

# torch is asked for by exact version first: any looser request may fetch a CUDA build of several gigabytes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
