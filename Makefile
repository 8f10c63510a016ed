# The two commands are `make sync` and `make test`; both install what they need
# into .venv from requirements.lock.txt.
SHELL := bash
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements.lock.txt
# Of contents, not times, which git sets to those of the checkout.
KEY := $(shell { pwd; cat $(LOCK) setup.cfg pyproject.toml tools/install.sh; } \
  | cksum | tr ' ' -)
STAMP := $(VENV)/.installed-$(KEY)

.PHONY: sync test test-long lint tpu-report lock upgrade check-lock build-files proto clean

sync: $(STAMP)
	$(BIN)/laneweave-sync --kernel_backend=interpret $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-long: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "long or not long" --timeout=3600 \
	  --hypothesis-profile=long $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports setup.cfg
	$(BIN)/shellcheck tools/*.sh .ci/run
	$(BIN)/python -m laneweave.tools.check_build
	$(BIN)/pyright --project $(VENV)/typing/laneweave --pythonpath $(BIN)/python

# Kernels as the TPU compiler sees them; no TPU is needed.
tpu-report: $(STAMP)
	$(BIN)/python -m laneweave.tools.tpu_report $(ARGS)

$(STAMP):
	@bash tools/install.sh $(VENV) $(LOCK)
	@touch $@

# Adds and drops what setup.cfg does; only `upgrade` moves other versions.
lock: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/lock.sh $(LOCK)

upgrade: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/lock.sh $(LOCK) --upgrade

check-lock: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/lock.sh --check $(LOCK)

build-files: $(STAMP)
	$(BIN)/python -m laneweave.tools.check_build --fix

proto: $(STAMP)
	PYTHON=$(BIN)/python bash tools/generate_proto.sh

clean:
	rm -rf $(VENV) *.egg-info
