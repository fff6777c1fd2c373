# Two commands for a newcomer: `make run` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
BIN := .venv/bin
RUN_ARGS ?=
TEST_ARGS ?=
# More processes than cores: most of the time tests wait for servers, timers and disks. Spark and Apache's servers do less.
PYTEST = $(BIN)/python -m pytest --dist loadgroup --no-loadscope-reorder
MOST = -n 5 --tier test
REST = -n 3 --tier rest
# Many images set it. Each server that a test starts would compile all its modules again: 0.4 s of CPU each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install java run run-large test test-fast test-rest test-all test-long lint check bench docs dist clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

install: .venv/.installed  ## make .venv and install the project with everything its tests need

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

# pytest compiles test modules when it collects them. Otherwise each process of the first run would do that: 35 s of CPU.
.venv/.compiled: .venv/.installed
	@echo "compiling the tests"
	@$(BIN)/python -m pytest --collect-only -qq > .venv/compiled.txt || { tail -20 .venv/compiled.txt; exit 1; }
	@touch $@

java:  # checked before anything is installed or sent, not when Spark starts at last
	@"$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | grep -qE 'version "(1[7-9]|[2-9][0-9])' || \
		{ echo "Java 17 or newer is needed for Spark: install it, or set JAVA_HOME" >&2; exit 1; }

run: java install  ## start a cluster, send TPC-H orders, archive them with Spark, check, report
	$(BIN)/python examples/first_run.py $(RUN_ARGS)

run-large: java install  ## the same with 18 million change events and a look at memory (RUN_ARGS='--scale 0.1' for less)
	$(BIN)/python examples/large_run.py $(RUN_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

check: lint  ## lint, format, strict types, import directions
	$(BIN)/python -m pytest -q tests/test_architecture.py

# Each of these runs the tests of the one before it, too; tests/tiers.py decides which tests those are.
test-fast: .venv/.compiled  ## tests without JVM, Spark and browser: at most 2 minutes on 2 cores
	$(PYTEST) -n 4 --tier fast $(TEST_ARGS)

test: java .venv/.compiled lint  ## tests of every room, one of each kind of foreign program: at most 8 minutes on 2 cores
	$(PYTEST) $(MOST) $(TEST_ARGS)

# A selection (TEST_ARGS="-k ...") may match no test of one half: exit code 5 of pytest.
test-all: java .venv/.compiled lint  ## all tests, in at most 30 minutes on 2 cores
	@failed=0; empty=0; for half in "$(MOST)" "$(REST)"; do \
	  $(PYTEST) $$half $(TEST_ARGS); code=$$?; \
	  if [ $$code = 5 ]; then empty=$$((empty + 1)); echo "no test is selected by: $$half"; \
	  elif [ $$code != 0 ]; then failed=1; fi; \
	done; [ $$failed = 0 ] && [ $$empty != 2 ]

test-rest: .venv/.compiled  ## the tests of test-all that test leaves out
	$(PYTEST) $(REST) $(TEST_ARGS)

# Those that ask whether this is the long form, or how many rounds there are to be.
LONG_FORMS = tests/client/test_scenarios.py tests/faults/test_hostile_requests.py \
	$$(grep -rlE "long_form|LONG\b|COMETMQ_(SIM|CRASH|KILL|ARCHIVE|FAILOVER)_" tests --include="test_*.py")

test-long: .venv/.compiled  ## the long forms of the tests that have one, more than half an hour
	COMETMQ_LONG=1 COMETMQ_SIM_SEEDS=20000 COMETMQ_CRASH_IMAGES=20000 COMETMQ_KILL_CYCLES=60 COMETMQ_ARCHIVE_KILLS=6 COMETMQ_FAILOVER_RUNS=20 \
	$(PYTEST) -n 3 --hostile-frames 2000000 $(LONG_FORMS) $(TEST_ARGS)

bench: install  ## the side-by-side measurements (see docs/performance.md)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

docs: install  ## build the reference site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open build/site/index.html; its search needs a server: $(BIN)/mkdocs serve"

dist: install  ## build sdist, wheel and bill of materials into dist/
	$(BIN)/python make_dist.py

clean:  ## remove what was installed and built
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
