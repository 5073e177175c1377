# The front door. `make demo` and `make test` do all their set-up themselves, on a machine
# that has only Python (3.11 or newer) and make. PYTHON chooses the interpreter; each version
# has virtual environments of its own.

PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv-$(VERSION)
# Of the tests: more than cores, because some tests wait.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() * 3 // 2)')
# zarr-python 2.18.7, the draft's only other implementation, cannot share an environment.
OLD_VENV := .venv-$(VERSION)-zarr2.18
# zarrita.js is one of the readers that are tested; without npm its tests are skipped.
ZARRITA := 0.7.5
ZARRITA_DIR := .node-zarrita
# Azurite is the Azure server of the tests; without npm these are skipped, too.
AZURITE := 3.35.0
AZURITE_DIR := .node-azurite
NPM := npm install --silent --no-audit --no-fund --no-package-lock --fetch-retries=1
# Tests start hundreds of interpreters, each of which would compile the package otherwise.
export PYTHONDONTWRITEBYTECODE =
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-thorough test-oldest test-downstream dist docs coverage mutate fuzz lint format bench clean

demo: $(VENV)/.demo
	$(VENV)/bin/python examples/demo.py

test: $(VENV)/.test $(OLD_VENV)/.done $(ZARRITA_DIR)/.done-$(ZARRITA) $(AZURITE_DIR)/.done-$(AZURITE)
	ZARR_SHARDSTORE_ZARR218=$(CURDIR)/$(OLD_VENV)/bin/python \
	ZARR_SHARDSTORE_NODE_MODULES=$(CURDIR)/$(ZARRITA_DIR)/node_modules \
	ZARR_SHARDSTORE_AZURITE=$(CURDIR)/$(AZURITE_DIR)/node_modules/azurite/dist/src/blob/main.js \
	$(VENV)/bin/python -m pytest -n $(WORKERS) $(ARGS)

# All examples, kills and combinations; ROUNDS=5 draws five times as many examples.
ROUNDS := 1
test-thorough:
	ZARR_SHARDSTORE_ROUNDS=$(ROUNDS) $(MAKE) --no-print-directory test

# The oldest versions of what the package needs, on the oldest Python.
test-oldest: .venv-oldest/.done
	.venv-oldest/bin/python -m pytest -n $(WORKERS) -p no:cacheprovider tests/unit $(ARGS)

# Wheel and sdist, with a README that renders and a small wheel, each installed into an empty environment and used there.
# The wheel is 40,000 lines of Python with their docstrings, and nothing else: 623 kB.
MAX_WHEEL := 623000
dist: $(VENV)/bin/python
	@rm -rf dist .venv-dist
	$(VENV)/bin/python $(PIP) build twine
	$(VENV)/bin/python -m build --outdir dist >/dev/null
	$(VENV)/bin/python -m twine check --strict dist/*
	@$(VENV)/bin/python -c "import glob, os, sys; (wheel,) = glob.glob('dist/*.whl'); n = os.path.getsize(wheel); print(f'{wheel}: {n:,} bytes'); sys.exit('the wheel is larger than $(MAX_WHEEL) bytes' if n > $(MAX_WHEEL) else 0)"
	@for file in dist/*; do \
		rm -rf .venv-dist && $(PYTHON) -m venv .venv-dist && \
		.venv-dist/bin/python $(PIP) "$$file[cli]" && \
		(cd .venv-dist && bin/zarr-shardstore --version && bin/python -c \
		"import zarr, fsspec; from zarr_shardstore import ShardingStore as S; zarr.create_array(S('v.zarr', 2), shape=(4,), chunks=(1,), dtype='u1')[:] = 1; assert zarr.open('shard::v.zarr', mode='r')[3] == 1" && \
		bin/zarr-shardstore fsck v.zarr) || exit 1; \
	done

# The site, without a network: of the pages, the docstrings and the help of the commands.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

# The pure floors, by their own tests: branches that no test takes, and mutants that none notices.
# All mutants take hours: MUTANTS='zarr_shardstore.format.keys.*' chooses some.
coverage: $(VENV)/.test
	ZARR_SHARDSTORE_ROUNDS=1 $(VENV)/bin/python -m pytest -q @tests/pure_floors.txt --cov

MUTANTS :=
mutate: $(VENV)/.test
	$(VENV)/bin/python $(PIP) mutmut
	ZARR_SHARDSTORE_ROUNDS=1 $(VENV)/bin/mutmut run --max-children 2 $(MUTANTS)
	$(VENV)/bin/mutmut results

# Tests of xarray, dask, anndata and zarr-python, with their stores and with ShardingStore; zarr's
# also after an import alone.
SUITES := all
test-downstream:
	$(PYTHON) -m tests.downstream $(SUITES)

# Fuzzing of all parsers for so many minutes; failures are stored in fuzz-failures/. atheris guides
# it by coverage where it can be installed; otherwise mutations are drawn at random.
MINUTES := 10
fuzz: $(VENV)/.test
	-$(VENV)/bin/python $(PIP) -e '.[fuzz]'
	$(VENV)/bin/python -m tests.fuzz --minutes $(MINUTES) --failures fuzz-failures $(ARGS)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Writes docs/explanation/benchmarks.md and its plots anew; half an hour of a quiet machine.
bench: $(VENV)/.test
	$(VENV)/bin/python benchmarks/page.py $(ARGS)

clean:
	rm -rf site dist .venv-* $(ZARRITA_DIR) $(AZURITE_DIR) demo-output mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "setting up $(VENV): the package and what its examples need"
	$(VENV)/bin/python $(PIP) -e '.[examples]'
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	@echo "setting up $(VENV): the package and what its tests need, about a minute"
	$(VENV)/bin/python $(PIP) -e '.[examples,test]'
	touch $@

# Its own tests are imported when it reads storage transformers, hence pytest.
$(OLD_VENV)/.done:
	@echo "setting up $(OLD_VENV): zarr-python 2.18.7"
	$(PYTHON) -m venv $(OLD_VENV)
	$(OLD_VENV)/bin/python $(PIP) 'zarr==2.18.7' 'numcodecs[msgpack]<0.16' pytest
	touch $@

$(ZARRITA_DIR)/.done-$(ZARRITA):
	@rm -rf $(ZARRITA_DIR); mkdir $(ZARRITA_DIR)
	@if $(NPM) --prefix $(ZARRITA_DIR) zarrita@$(ZARRITA) 2>/dev/null; then touch $@; \
	else rm -rf $(ZARRITA_DIR)/*; echo "zarrita.js was not installed: its tests are skipped"; fi

$(AZURITE_DIR)/.done-$(AZURITE):
	@rm -rf $(AZURITE_DIR); mkdir $(AZURITE_DIR)
	@if $(NPM) --prefix $(AZURITE_DIR) azurite@$(AZURITE) 2>/dev/null; then touch $@; \
	else rm -rf $(AZURITE_DIR)/*; echo "Azurite was not installed: its tests are skipped"; fi

$(VENV)/.docs: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python $(PIP) -e '.[docs]'
	touch $@

.venv-oldest/.done: pyproject.toml tests/oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python $(PIP) -e '.[cli,cloud]' -r tests/oldest.txt
	touch $@
