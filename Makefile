# kvlab: two commands are enough, `make lab` and `make test`; `make help` lists all.
# Everything is installed in .venv with the exact versions of constraints.txt. A stamp in .venv marks a finished set-up, so that
# the second run starts at once; an interrupted one leaves no stamp and is simply done again.

PYTHON ?= python3
# Empty: the torch of constraints.txt from the usual index. Else what pip should install instead, for example
#   make lab TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= $(shell cat .venv/torch.txt 2>/dev/null)
PORT ?= 8866
# More options for JupyterLab, Voila, `kvlab demo` or pytest, for example  make test ARGS="tests/test_house.py -x"
ARGS ?=

ifneq ($(and $(wildcard .venv/torch.txt),$(filter-out clean help,$(or $(MAKECMDGOALS),help))),)
ifneq ($(strip $(TORCH)),$(strip $(shell cat .venv/torch.txt)))
$(error .venv holds another build of torch than TORCH asks for. Run `make clean` first, then this again)
endif
endif

BIN := .venv/bin
SOURCES := pyproject.toml constraints.txt
# JupyterLab refuses to run as root, as people are in containers, unless told.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# JupyterLab and Voila find this project's settings and page template in etc/jupyter.
export JUPYTER_PATH := $(CURDIR)/etc/jupyter$(if $(JUPYTER_PATH),:$(JUPYTER_PATH))
export JUPYTER_CONFIG_PATH := $(CURDIR)/etc/jupyter$(if $(JUPYTER_CONFIG_PATH),:$(JUPYTER_CONFIG_PATH))

.DEFAULT_GOAL := help
.PHONY: help lab dashboards demo fetch test soak check format notebooks docs clean chromium

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# JupyterLab opens before the model is there: the notebook shows a recorded run at once and fetches the model meanwhile.
lab: .venv/lab.stamp  ## set up and open JupyterLab on the notebooks
	@echo "Opening JupyterLab; ctrl-C here ends it."
	$(BIN)/jupyter lab --ServerApp.root_dir=notebooks --ServerApp.answer_yes=True $(AS_ROOT) \
	  --LabApp.default_url=/lab/tree/01_four_situations.ipynb --log-level=WARN $(ARGS)

# Voila would take the next free port without a word that anybody reads.
dashboards: .venv/lab.stamp  ## set up and open the dashboards with Voila on this machine's port 8866 (PORT=...)
	@[ "$(PORT)" -ge 1024 ] 2>/dev/null && [ "$(PORT)" -le 65535 ] \
	  || { echo "PORT is '$(PORT)': give a number from 1024 to 65535."; exit 1; }
	@$(BIN)/python -c 'import socket, sys; s = socket.socket(); sys.exit(s.connect_ex(("127.0.0.1", int(sys.argv[1]))) == 0)' $(PORT) \
	  || { echo "Port $(PORT) is in use by another program. Choose another one: make dashboards PORT=$$(($(PORT) + 1))"; exit 1; }
	@echo "Opening the dashboards at http://127.0.0.1:$(PORT); ctrl-C here ends them."
	$(BIN)/voila notebooks/dashboards --port=$(PORT) $(ARGS)

demo: .venv/lab.stamp  ## the four situations of the article on the real model, in this terminal
	$(BIN)/kvlab demo $(ARGS)

fetch: .venv/lab.stamp  ## download and verify the embedded model now, for a room without a network later
	$(BIN)/kvlab fetch $(ARGS)

test: .venv/dev.stamp chromium  ## set up and run the tests
	HF_HUB_OFFLINE=1 $(BIN)/pytest $(ARGS)

soak: .venv/dev.stamp chromium  ## the long tests
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m soak $(ARGS)

check: .venv/dev.stamp  ## ruff with all its rules, its formatter, and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev.stamp  ## let ruff format the code and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

notebooks: .venv/dev.stamp  ## make every .ipynb anew from the percent-format .py beside it
	$(BIN)/jupytext --to ipynb $$(git ls-files 'notebooks/*.py')

docs: .venv/dev.stamp chromium  ## make docs/01_four_situations.md anew, with pictures of a live run
	HF_HUB_OFFLINE=1 $(BIN)/python docs/render.py

clean:  ## remove the environment and all caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis screenshots

chromium:
	@for name in "$$CHROMIUM" chromium chromium-browser google-chrome; do command -v "$$name" >/dev/null && exit 0; done; \
	echo "Chromium is not here, and the browser tests will fail without it. On Debian or Ubuntu: apt-get install chromium."; \
	echo "Elsewhere install Chromium or Chrome, and name it in the variable CHROMIUM if it is not on PATH."

# Without --no-compile pip compiles every file that it installs, 14,000 of them and half of the whole set-up's time; a session
# imports a quarter, and Python keeps what it compiled on the first import (unless told not to by this variable).
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c .venv/constraints.txt
export PYTHONDONTWRITEBYTECODE :=

# torch comes first and alone, so that its build can be chosen; what follows then finds it there.
.venv/base.stamp: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "kvlab needs Python 3.11 or newer, '$(PYTHON)' is not. Name another one: make lab PYTHON=python3.12"; exit 1; }
	@echo "Setting up .venv, once. 1 of 3: the environment."
	$(PYTHON) -m venv .venv
	@echo "2 of 3: torch."
	@if [ -n "$(TORCH)" ]; then grep -v '^torch==' constraints.txt; else cat constraints.txt; fi >.venv/constraints.txt
	$(PIP_INSTALL) $(or $(TORCH),torch)
	@echo "$(TORCH)" >.venv/torch.txt
	@touch $@

.venv/lab.stamp: .venv/base.stamp
	@echo "3 of 3: kvlab, transformers and JupyterLab."
	$(PIP_INSTALL) -e '.[lab]'
	@touch $@

.venv/dev.stamp: .venv/lab.stamp
	@echo "What the tests and checks need."
	$(PIP_INSTALL) -e '.[test,check]'
	@touch $@
