# Short names for the commands of CONTRIBUTING.md. PYTHON=... chooses another interpreter.
PYTHON ?= python
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

.PHONY: install test slow lint bench

install:  ## the package, editable, with what the tests need
	$(PYTHON) -m pip install -e '.[test]'

test:  ## everything but the slow tests
	$(PYTHON) -m pytest

slow:  ## the tests that take minutes
	$(PYTHON) -m pytest -m slow --timeout=1800

lint:  ## style, as .ci/run checks it
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

bench:  ## every measured claim, one file after the other
	@set -e; for file in benchmarks/*.py; do \
		[ -e "$$file" ] || { echo "benchmarks/ holds no .py file yet" >&2; exit 1; }; \
		echo "== $$file"; $(PYTHON) "$$file"; \
	done
