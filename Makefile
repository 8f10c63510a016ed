# The two commands are `make sync` and `make test`; both install what they need
# into .venv from requirements.lock.txt.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements.lock.txt
STAMP := $(VENV)/.installed

.PHONY: sync test test-long lint lock check-lock build-files proto clean

sync: $(STAMP)
	$(BIN)/laneweave-sync --kernel_backend=interpret $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-long: $(STAMP)
	LANEWEAVE_HYPOTHESIS=long \
	$(BIN)/python -m pytest -m "long or not long" -n 2 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports --config setup.cfg
	$(BIN)/shellcheck tools/*.sh .ci/run
	$(BIN)/python -m laneweave.tools.check_build
	$(BIN)/pyright --pythonpath $(BIN)/python

$(STAMP): $(LOCK) setup.cfg pyproject.toml
	@python=$$(bash tools/find_python.sh) && \
	  { [ -x $(BIN)/python ] || "$$python" -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --require-hashes -r $(LOCK)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@mkdir -p $(VENV)/typing && ln -sfn ../.. $(VENV)/typing/laneweave
	@touch $@

# Versions move only here.
lock: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/lock.sh $(LOCK) --upgrade

check-lock: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/lock.sh --check $(LOCK)

build-files: $(STAMP)
	$(BIN)/python -m laneweave.tools.check_build --fix

proto: $(STAMP)
	PYTHON=$(BIN)/python bash tools/generate_proto.sh

clean:
	rm -rf $(VENV) *.egg-info
