# `make` lists the targets. `make demo` and `make test` work on a fresh machine: they need git, make
# and Python 3.11 or newer with venv; everything else goes into .venv.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install demo test test-long test-compose test-faults fuzz lint lint-types lint-rules audit proto bench site clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed-run  ## install murmur into .venv: environments, learner, reports
	@$(BIN)/murmur --version
	@echo "next: source $(BIN)/activate; murmur --install-completion; murmur check"

demo: $(VENV)/.installed-run  ## train four UAVs here, report and picture: about five minutes on two cores
	@$(BIN)/murmur train terrain-demo
	@$(BIN)/murmur report --checkpoint latest --episodes 100
	@$(BIN)/murmur render --checkpoint latest
	@echo
	@echo "Open the page and the picture named above in a browser. What to try next:"
	@echo "  source $(BIN)/activate"
	@echo "  murmur config terrain-demo --explain     what can be changed"
	@echo "  murmur train spread                      another environment, the same command"
	@echo "  murmur train terrain-reference           the published mission, 20 minutes"

test: lint  ## lint, types, import rules and all tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-long: $(VENV)/.installed-dev  ## the tests too long for `make test` (SAVE=1 keeps the result)
	@$(BIN)/python -m pytest -m long -n 2 --dist loadfile --no-loadscope-reorder $(if $(SAVE),--save-result)

site: $(VENV)/.installed-dev  ## the documents as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test-compose: $(VENV)/.installed-dev  ## build the images, start docker-compose.yml, break it (minutes)
	@$(BIN)/python -m pytest -m containers tests/containers

test-faults: $(VENV)/.installed-dev  ## every fault of docs/faults.md, 280 random kills (40 minutes)
	@$(BIN)/murmur bench faults $(if $(SAVE),--save)
	@$(BIN)/murmur bench kills $(if $(SAVE),--save)
	@$(BIN)/murmur bench kills_ranks $(if $(SAVE),--save)

fuzz: $(VENV)/.installed-dev  ## a million cases of each fuzz target (Linux; two hours)
	@$(BIN)/python -m tests.fuzz --cases 1000000

lint: $(VENV)/.installed-dev  ## ruff, mypy, the import rules, names and prose
	@$(MAKE) --no-print-directory -j 2 lint-types lint-rules

lint-types:
	@$(BIN)/mypy

lint-rules:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/python -m tests.prose

audit: $(BIN)/python  ## known vulnerabilities of the pinned dependencies (needs the internet)
	@test -x $(VENV)/audit/bin/pip-audit || { $(BIN)/python -m venv $(VENV)/audit && \
	  $(VENV)/audit/bin/python -m pip --disable-pip-version-check install -q pip-audit==2.10.1; }
	@$(VENV)/audit/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off -r constraints.txt

proto: $(BIN)/python  ## generate shared/rpc from proto/, for protobuf 6.31 and newer
	@test -x $(VENV)/proto/bin/python || { $(BIN)/python -m venv $(VENV)/proto && \
	  $(VENV)/proto/bin/python -m pip --disable-pip-version-check install -q grpcio-tools==1.75.1 protobuf==6.31.1; }
	@$(VENV)/proto/bin/python -m grpc_tools.protoc -I proto --python_out=shared/rpc --pyi_out=shared/rpc proto/rollout.proto
	@echo "written: shared/rpc"

bench: $(VENV)/.installed-run  ## all benchmarks, rough (murmur bench --all for careful ones)
	@$(BIN)/murmur bench --all --quick

clean:  ## remove caches and .venv; runs/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the virtual environment -----------------------------------------------------------------

$(BIN)/python:
	@python=; for candidate in python3 python3.13 python3.12 python3.11; do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python=$$candidate; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "error: no Python 3.11 or newer found; install one (Debian, Ubuntu: apt install python3.12 python3.12-venv)" >&2; exit 2; fi; \
	if ! $$python -c 'import venv, ensurepip' 2>/dev/null; then \
	  version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  echo "error: $$python lacks venv or ensurepip; Debian, Ubuntu: apt install python$$version-venv" >&2; exit 2; fi; \
	echo "making $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV)

$(VENV)/.installed-run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing murmur and its dependencies into $(VENV) (PyTorch is most of it; a minute or two) ..."
	@$(PIP) -e '.[env,images,learner,report]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing murmur and its development tools into $(VENV) (PyTorch is most of it; a minute or two) ..."
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed-run
