# Short names for the commands of CONTRIBUTING.md. PYTHON=... chooses another interpreter.
PYTHON ?= python
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

# Where `make test-all` keeps an environment per benchmark: their MuJoCo versions exclude each other.
VENVS ?= build/venvs

.PHONY: install test slow test-all test-metaworld test-libero lint bench faults soak remote-soak \
	lock-step fsdp-table

install:  ## the package, editable, with what the tests need
	$(PYTHON) -m pip install -e '.[test]'

test:  ## everything but the slow tests
	$(PYTHON) -m pytest

slow:  ## the tests that take minutes
	$(PYTHON) -m pytest -m "slow and not metaworld and not libero" -n 0 --timeout=1800

# Suites that are tested in an environment of their own.
EXTRAS = metaworld libero

test-all: test slow $(EXTRAS:%=test-%)  ## everything, LIBERO and Meta-World included (about 9 GB)

$(EXTRAS:%=test-%): test-%:  ## one of these suites, with its extra installed for it
	$(PYTHON) -m venv $(VENVS)/$*
	$(VENVS)/$*/bin/python -m pip install --quiet -e ".[test,$*]"
	$(VENVS)/$*/bin/python -m pytest -m $* -n 0 --timeout=1800

KILLS ?= 100
MINUTES ?= 60
FAULTS = PYTHONPATH=tests:tests/loops:tests/faults $(PYTHON) tests/faults

faults:  ## KILLS random kills in a SAC run of two ranks, a fifth as many in a PPO run, and a training
	$(FAULTS)/kill_runs.py --algorithm sac --ranks 2 --kills $(KILLS)
	$(FAULTS)/kill_runs.py --algorithm ppo --ranks 2 --kills $$(( ($(KILLS) + 4) / 5 ))
	$(FAULTS)/kill_training.py --kills $$(( ($(KILLS) + 7) / 8 ))
	STORAGE_KILLS=$(KILLS) $(PYTHON) -m pytest tests/faults/test_storage_kill.py -m "slow or not slow" -n 0 -s --timeout=1800

soak:  ## algo=sac for MINUTES with an actor killed every 20 s
	$(FAULTS)/soak.py --minutes $(MINUTES)

remote-soak:  ## algo=sac for MINUTES with remote actors that are killed, cut off, added
	$(FAULTS)/remote_soak.py --minutes $(MINUTES)

lock-step:  ## a run that was killed and resumed equals an uninterrupted one, PPO and SAC
	$(PYTHON) -m pytest tests/loops/test_lock_step.py -m "slow or not slow" -n 0 --timeout=1800

fsdp-table:  ## differences between 1, 2, 4 and 2x2 ranks and one process, for PPO and SAC
	PYTHONPATH=tests $(PYTHON) tests/test_fsdp.py

lint:  ## style, as .ci/run checks it
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

bench:  ## every measured claim, one file after the other
	@set -e; for file in benchmarks/*.py; do \
		[ -e "$$file" ] || { echo "benchmarks/ holds no .py file yet" >&2; exit 1; }; \
		echo "== $$file"; $(PYTHON) "$$file"; \
	done
