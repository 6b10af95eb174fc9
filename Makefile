# Every verb makes .venv by itself. A machine without a GPU can take the small torch from its own index:
#     make demo PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'

PYTHON ?= python3
PIP_ARGS ?=
# Which hours make simulate lives through, of one rank and of several each; and of peer memory, so many runs of 10 hours.
FIRST ?= 10000
SEEDS ?= 3000
PEER_SEEDS ?= 100

BIN := .venv/bin
AZURITE := build/azurite/node_modules/.bin/azurite-blob
# pip shows what it downloads: torch alone takes minutes.
PIP_INSTALL := -m pip --disable-pip-version-check install $(PIP_ARGS)
PIP := $(BIN)/python $(PIP_INSTALL)

.PHONY: help demo test test-quick test-benchmarks test-places test-frameworks test-frameworks-quick lint types check bench simulate torture docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     train a small model through a chain of tiers, kill it, restore it"
	@echo "make test     run all tests (about 9 minutes on two cores)"
	@echo "make test-quick  run a part of the tests (under two minutes): a save, a restore, damage, the documents"
	@echo "make test-benchmarks  run the tests of the benchmarks (4 minutes)"
	@echo "make test-places  kill servers of S3, Google, Azure and GlusterFS, which npm and apt install (6 minutes; root)"
	@echo "make test-frameworks  run tierfall inside training frameworks, in .venv-frameworks (15 minutes)"
	@echo "make test-frameworks-quick  a part of these: each framework is killed and resumes exactly (3 minutes)"
	@echo "make check    lint, types and tests"
	@echo "make bench    run the benchmarks, beside other checkpointing systems"
	@echo "make simulate live through weeks of training on a virtual clock (long)"
	@echo "make torture  kill and break saves until something gives (long)"
	@echo "make docs     build the documents with the reference of every public name into site/"
	@echo "make clean    remove .venv, .venv-frameworks and caches"

demo: .venv/.installed
	$(BIN)/tierfall demo

# Hundreds of tests start a Python of their own: without bytecode on disk, each would compile the package anew.
test: .venv/.installed-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations 10

# What a change breaks first. No kills, no several ranks, no servers, no demo: those are in make test alone.
QUICK := tests/core/types tests/core/format tests/core/image tests/core/compression tests/tiers/test_stored.py \
    tests/tiers/test_host.py tests/test_config.py tests/test_first_file.py \
    tests/contract/test_loads.py tests/test_damaged_copies.py tests/test_layering.py tests/test_public_names.py \
    tests/test_docs_map.py tests/test_docs_which_tiers.py tests/test_docs_when_wrong.py

test-quick: .venv/.installed-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(QUICK)

test-benchmarks: .venv/.installed-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist loadfile -m 'benchmarks and not torture' \
	    tests/test_benchmarks*.py

# The servers of S3 and Google Cloud Storage are Python packages. What cannot be installed, or started, is left out: its
# tests are skipped, and the last lines say why.
test-places: .venv/.installed-dev
	-test -x $(AZURITE) || npm install --silent --no-fund --prefix build/azurite azurite@3.35.0
	-command -v glusterfsd || { apt-get update -qq && apt-get install -qq -y --no-install-recommends glusterfs-client; }
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m '' tests/test_places.py \
	    tests/backends/test_object_store_conformance.py

# In an environment of its own: what the frameworks need changes nothing there. Hub access is not needed.
FRAMEWORKS := HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE= .venv-frameworks/bin/python -m pytest -n 2 --dist loadfile \
    --durations 10 tests/integrations/frameworks

test-frameworks: .venv-frameworks/.installed
	$(FRAMEWORKS)

# The tests that are marked quick: each framework is killed and resumes exactly, and what needs one process.
test-frameworks-quick: .venv-frameworks/.installed
	$(FRAMEWORKS) -m quick

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed-dev
	$(BIN)/python -m mypy

check: lint types test

bench: .venv/.installed-bench
	$(BIN)/python -m benchmarks

simulate: .venv/.installed-dev
	$(BIN)/python -m tests.simulation --first $(FIRST) --seeds $(SEEDS)
	$(BIN)/python -m tests.simulation --peers --nodes 16 --first $(FIRST) --seeds $(PEER_SEEDS) --hours 10 --copies 1 2

torture: .venv/.installed-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m torture

# The pages link to each other as they stand in the repository: all of them are built from one copy.
docs: .venv/.installed-docs
	rm -rf build/docs && mkdir -p build/docs
	cp -r *.md docs examples build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:
	rm -rf .venv .venv-frameworks .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site tierfall.egg-info

# For make docs alone: the tests need none of it.
.venv/.installed-docs: .venv/.installed requirements-docs.txt
	$(PIP) -r requirements-docs.txt
	@touch $@

.venv/.made:
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] <= (3, 13); \
	    sys.exit(None if ok else "tierfall needs Python 3.11 to 3.13; this is " + sys.version.split()[0] + \
	    ": say which with make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	@touch $@

# For a user: the package and what it needs, the demo's picture too, at the versions that were tested.
.venv/.installed: .venv/.made pyproject.toml requirements-dev.txt
	$(PIP) -c requirements-dev.txt -e '.[plot]'
	@touch $@

# For a developer: the tools as well. setuptools is one of them, so the build needs no environment of its own.
.venv/.installed-dev: .venv/.made pyproject.toml requirements-dev.txt
	$(PIP) -r requirements-dev.txt
	$(PIP) --no-build-isolation -e .
	@touch $@ .venv/.installed

# torch and the tools come from .venv by its path; what .venv-frameworks has itself is found before them.
.venv-frameworks/.installed: .venv/.installed-dev requirements-frameworks.txt requirements-megatron.txt
	$(BIN)/python -m venv .venv-frameworks
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > "$$(.venv-frameworks/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	.venv-frameworks/bin/python $(PIP_INSTALL) -r requirements-frameworks.txt
	.venv-frameworks/bin/python $(PIP_INSTALL) --no-build-isolation --no-deps -e .
	@touch $@

# For the benchmarks: what tierfall is compared with. Exactly the listed packages, so that none changes torch or the tests.
.venv/.installed-bench: .venv/.installed-dev requirements-bench.txt
	$(PIP) --no-deps -r requirements-bench.txt
	@touch $@
