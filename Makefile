# What CI runs is what is here. The first call makes .venv; later calls install again only where a requirement changed.
# On Linux without a GPU, PyTorch's own index of CPU builds (PIP_EXTRA_INDEX_URL) saves several GB of CUDA packages.

PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test coverage fuzz test-cluster test-release test-matrix docs bench pin dist clean

demo: .venv/demo.stamp  ## classify photos and draw where the model looked, without a network
	$(BIN)/python examples/demo.py

test: .venv/dev.stamp  ## lint, types, and every test but those of clusters
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/ruff check --target-version py314 --select E9,F src
	$(MAKE) --jobs 2 types-3.10 types-3.14
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal -m "not cluster and not release"

types-%: .venv/dev.stamp  # of the oldest Python and of the newest
	$(BIN)/mypy --python-version $*

coverage: .venv/dev.stamp  ## the same tests with branch coverage, which takes twice as long
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal --cov --cov-fail-under=98 -m "not cluster and not release"

fuzz: .venv/dev.stamp  ## thousands of damaged files for everything that reads one
	OMP_NUM_THREADS=1 VITLITE_FUZZ=$${VITLITE_FUZZ:-2000} $(BIN)/pytest tests/fuzz

test-cluster: .venv/cluster.stamp  ## several processes, nodes that die: torchrun and Ray
	OMP_NUM_THREADS=1 $(BIN)/pytest -m cluster

test-release: .venv/dev.stamp  ## a program with vitlite and torch as a folder made by PyInstaller: minutes, and 1 GB
	$(INSTALL) pyinstaller
	OMP_NUM_THREADS=1 $(BIN)/pytest -m release

test-matrix:  ## every test with the oldest, the pinned and the newest versions, each in an environment of its own
	$(PYTHON) tests/matrix.py

docs: .venv/docs.stamp  ## generated tables, then the site in site/
	for script in docs/generate_*.py; do $(BIN)/python $$script || exit 1; done
	$(BIN)/python docs/fetch_katex.py
	$(BIN)/mkdocs build

bench: .venv/dev.stamp  ## speed beside the other libraries, written into docs/lab_notes/
	$(BIN)/python benchmarks/libraries.py

pin: .venv/dev.stamp  ## commit and sha256 of checkpoints that have none
	$(BIN)/python examples/maintain/pin.py

dist: .venv/dev.stamp  ## wheel and sdist in dist/, each checked, installed in a fresh environment and used there
	$(INSTALL) twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	set -e; for file in dist/*; do \
	  rm -rf build/fresh; $(PYTHON) -m venv build/fresh; \
	  build/fresh/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt "$$file[images]"; \
	  (cd build && fresh/bin/vitlite classify sample --model vit_nano_4.cifar10 --top 1); \
	done

clean:
	rm -rf .venv site dist build .coverage

.venv/venv.stamp:
	$(PYTHON) -m venv .venv
	touch $@

.venv/demo.stamp: .venv/venv.stamp pyproject.toml constraints.txt
	$(INSTALL) --editable '.[images,plot]'
	touch $@

.venv/dev.stamp: .venv/venv.stamp pyproject.toml constraints.txt tests/peers.txt
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps --requirement tests/peers.txt
	touch $@

.venv/cluster.stamp: .venv/dev.stamp
	$(INSTALL) --editable '.[dev,ray]'
	touch $@

.venv/docs.stamp: .venv/dev.stamp
	$(INSTALL) --editable '.[dev,docs]'
	touch $@
