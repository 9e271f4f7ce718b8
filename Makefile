# `make check` is what a change has to pass; CI runs the same.
PYTHON ?= .venv/bin/python

.PHONY: check format lint types layers test slow docs dist

check: lint types layers test

lint:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m mypy

# import-linter has no __main__; this is its console script.
layers:
	$(PYTHON) -c "import sys; from importlinter.cli import lint_imports_command as run; sys.exit(run())"

test:
	$(PYTHON) -m pytest -n auto

slow:
	HYPOTHESIS_PROFILE=ci $(PYTHON) -m pytest -n auto -m "slow or hypothesis"

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

# Needs the extra `docs`; the site is written to site/.
docs:
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

# Needs the extra `release`; wheel and sdist are written to dist/ and looked into.
dist:
	rm -rf dist
	$(PYTHON) -m build
	$(PYTHON) -m twine check --strict dist/*
	$(PYTHON) .ci/check_dist.py dist
