# `make demo`, `make test`, `make test-all`, `make check`, `make docs`, `make bench` work from a clean clone: each first makes .venv, which needs only
# Python 3.11 and a network. Everything that they make is in the clone; `make clean` removes it.
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-wheel check check-and-install docs lint types packages azurite bench clean venv

help:
	@echo "make demo    speech data from S3 through the cache into training, and checkpoints back: the whole way"
	@echo "make test    all checks and all tests but those marked slow"
	@echo "make test-all   and those too: whole jobs with Ray, machines of namespaces, most kills and faults"
	@echo "make test-wheel   build the wheel; test it on every Python 3.11 to 3.14 that there is, and with the oldest and newest libraries"
	@echo "make check   only the quick checks: ruff, mypy, import-linter, the documentation site"
	@echo "make docs    the documentation site, in site/"
	@echo "make bench   all benchmarks; results in benchmarks/results"
	@echo "make clean   remove everything that the others made"

venv:
	@tools/bootstrap.sh

demo: venv
	@.venv/bin/python examples/speech/demo.py --directory .demo $(ARGS)

# Without --quiet: MkDocs counts only the warnings that it prints, so --strict would have no effect.
docs: venv
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

# Next to each other: mypy and MkDocs use one core each.
check: venv
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target types docs lint

lint: venv
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports

types: venv
	.venv/bin/mypy

test: check-and-install
	@tools/test.sh -m "not slow" $(ARGS)

test-all: check-and-install
	@tools/test.sh $(ARGS)

# Downloads next to the installation, and next to the checks.
check-and-install:
	@$(MAKE) --no-print-directory --jobs=2 venv packages
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target types docs azurite lint

packages:
	@tools/test-packages.sh

azurite: venv
	@tools/azurite.sh || echo "test: there is no Azurite" >&2

test-wheel: venv
	@.venv/bin/python tools/check_wheel.py $(ARGS)

bench: venv
	.venv/bin/python -m benchmarks $(ARGS)

clean:
	rm -rf .venv .deps .demo build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
