# Each target works as the first command on a fresh clone: it makes a virtualenv, installs, compiles and runs.
# Stamps in the virtualenv keep the second run fast; a change of a compiled module or of the build recompiles.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Tests start thousands of processes, and each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LINTERS := $(VENV)/.linters
RELAY := benches/_relay.pyx
CYTHON := $(wildcard $(foreach suffix,pyx pxi pxd,fastlock/*.$(suffix) fastlock/*/*.$(suffix))) $(RELAY)
CORE := setup.py fastlock/_build.py $(shell $(PYTHON) fastlock/_build.py) $(RELAY)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build test test-long matrix bench bench-smoke lint debug servers clean

help:
	@echo "make test         compile, find servers, run the tests          ARGS=\"-k handover\" goes to pytest"
	@echo "make test-long    those that take long: mistakes planted in the code are found, whole runs of the benchmarks"
	@echo "make matrix       some of the tests on each Python found, with old and new redis-py and hiredis"
	@echo "make bench        compile, run the quick benchmarks            ARGS=\"--check\" goes to fastlock bench instead"
	@echo "make bench-smoke  every benchmark once, to see that it runs"
	@echo "make lint         ruff, mypy --strict, cython-lint, stubtest"
	@echo "make debug        the tests on a core with assertions and bounds checks; the next target compiles anew"
	@echo "make build        compile the core in place"
	@echo "make clean        remove all that was made"
	@echo "Choose an interpreter by PYTHON=python3.12, another virtualenv by VENV=.venv312."

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer, please: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# The compiled modules are left out here: the rule of `.core-*` compiles them, once, with its output shown.
$(INSTALLED): $(VENV)/pyvenv.cfg pyproject.toml
	FASTLOCK_NO_EXTENSIONS=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test,bench,embedded]"
	@touch $@

$(LINTERS): $(INSTALLED)
	FASTLOCK_NO_EXTENSIONS=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[lint]"
	@touch $@

# The shared objects in the source tree are of one build mode, so there is one stamp at most: that of this mode.
$(VENV)/.core-release $(VENV)/.core-debug: $(INSTALLED) $(CORE)
	@rm -f $(VENV)/.core-*
	$(if $(findstring debug,$@),FASTLOCK_DEBUG=1) $(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

build: $(VENV)/.core-release

servers:
	@version=$$(redis-server --version 2>/dev/null | sed 's/.*v=\([0-9.]*\).*/\1/'); \
	if [ "$${version%%.*}" -ge 7 ] 2>/dev/null; then echo "servers: redis-server $$version and those installed by pip"; \
	else echo "servers: those installed by pip only, redis-server 7 or newer is missing: sudo apt-get install redis-server"; fi

# A process has one implementation, so the tests run in several pytest sessions: an implementation and folders of tests/. As many run at
# once as keep two cores busy, as tests wait half of the time; more of them wait for each other. Those that take longest begin. Those in
# pure Python run only the tests that depend on the implementation, each on one of its servers, as both implementations send the same
# commands.
JOBS := 6
SESSIONS := \
	cython/locks cython/kinds python/fastpath+fencing+helpers+integrations+interrupts cython/faults \
	python/benches+cli+core+locks+models+project+protocol cython/transport cython/embedded+fencing+integrations+interrupts cython/benches+core+models \
	cython/fastpath+protocol python/kinds cython/cli+helpers+project python/embedded+faults+transport
# Tests of the tests, and whole runs of the benchmarks: those that are marked as long. A file of a folder is named as models@test_some.py.
LONG := \
	cython/models@test_round_trip_rules.py cython/benches+core+fastpath cython/models@test_round_trips.py cython/models@test_handover_model.py \
	cython/protocol python/protocol cython/interrupts+kinds+locks+project python/interrupts+kinds+locks
ONLY_IMPL :=
python/%: ONLY_IMPL := --only-impl --one-server-each
TESTED := $(VENV)/.tested

test: build
debug: $(VENV)/.core-debug
debug: export PYTHONFAULTHANDLER := 1
test debug: servers
	@rm -f $(TESTED)
	@echo "$(words $(SESSIONS)) sessions, $(JOBS) at once; the output of each is shown when it has ended"
	@$(MAKE) --no-print-directory --jobs=$(JOBS) --keep-going --output-sync=target $(SESSIONS)
	@[ -e $(TESTED) ] || { echo "no test was run"; exit 5; }

test-long:
	@$(MAKE) --no-print-directory test SESSIONS="$(LONG)" ARGS="--long $(ARGS)"

# pytest exits with 5 where ARGS leave a session nothing to do.
.PHONY: $(SESSIONS)
$(SESSIONS):
	@FASTLOCK_IMPL=$(@D) $(BIN)/python -m pytest $(addprefix tests/,$(subst @,/,$(subst +, ,$(@F)))) $(ONLY_IMPL) $(ARGS); \
	case $$? in 0) touch $(TESTED);; 5) ;; *) exit 1;; esac

# The matrix runs in copies of the tree, with virtualenvs of its own.
matrix:
	$(PYTHON) -m tests.matrix $(ARGS)

bench: build
	$(BIN)/fastlock bench $(or $(ARGS),--quick)

bench-smoke: build
	$(BIN)/fastlock bench --quick --rounds 1
	$(BIN)/fastlock bench family --quick --rounds 1 --seconds 0.05 --processes 2 --leases 500 --lease 0.9
	$(BIN)/fastlock flash-sale --stock 50 --processes 2 --threads 2
	FASTLOCK_IMPL=cython $(BIN)/python -m pytest benches --benchmark-disable
	FASTLOCK_IMPL=python $(BIN)/python -m pytest benches --benchmark-disable

lint: build $(LINTERS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict fastlock benches tests/typed.py
	PATH="$(abspath $(BIN)):$$PATH" cython-lint $(CYTHON)
	$(BIN)/python -m mypy.stubtest fastlock._core

clean:
	rm -rf $(VENV) build dist fastlock.egg-info fastlock/*.so fastlock/*/*.so benches/*.so
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache .benchmarks
	find fastlock tests benches -name __pycache__ -prune -exec rm -rf {} +
