# Every verb a developer needs. Each sets up what it lacks on a machine that has nothing but Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
FLAGS ?=

# Tests start hundreds of Python processes: each starts sooner if compiled modules are kept.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help test test-systems test-live test-page test-dst test-without test-hosts gpu-check coverage demo fmt lint types contracts check reproduce fuzz soak bench-peers bench-sim attacks soak-live clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sloop needs Python 3.11 or newer\nhelp: make PYTHON=/path/to/python3.11 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

# Live tests run one after another.
PYTEST := $(BIN)/pytest -n 2 --dist loadgroup

test: $(READY) ## the platform, without what the other test targets have
	$(PYTEST) -m "not needs_hosts and not server and not browser" --ignore=tests/sloop_systems --ignore=tests/dst $(FLAGS)

test-systems: $(READY) ## publications, and the suite of every system under all names; `test` has one of each scale policy
	SLOOP_SUITE=all $(PYTEST) -m "not needs_hosts" tests/systems/test_suite.py tests/sloop_systems $(FLAGS)

test-live: $(READY) ## servers with real processes and sockets
	$(PYTEST) -m "server and not needs_hosts" $(FLAGS)

test-page: $(READY) ## the page in Chromium, before servers; skipped without one (apt-get install chromium, or CHROMIUM=)
	$(PYTEST) -m browser tests/page $(FLAGS)

test-dst: $(READY) ## random schedules of faults, simulated agents, deaths of the deciding process
	$(PYTEST) tests/dst $(FLAGS)

WITHOUT ?= ipa paldia
QUICK := -n 2 -m "not live and not needs_hosts and not needs_gpu" --hypothesis-profile=few
# What reads files, applications, documents and registries is what could miss a publication.
MAY_MISS := tests/app tests/cli tests/docs tests/report tests/testing tests/test_contracts.py tests/test_plugins.py tests/test_tidy.py

test-without: $(READY) ## quick tests with no publication, then without each of WITHOUT, one after the other (`each`: all nine)
	$(BIN)/python -m tests.without all -- $(QUICK) $(MAY_MISS) tests/core tests/policies tests/sim tests/solvers tests/systems $(FLAGS)
	$(BIN)/python -m tests.without $(WITHOUT) -- $(QUICK) $(MAY_MISS) tests/systems/planning tests/sloop_systems/comparison \
		tests/sloop_systems/test_recorded.py -k "not serves_as_recorded" $(FLAGS)

test-hosts: $(READY) ## several hosts out of namespaces, and Ray on them; needs root, skipped without
	$(PYTEST) -m needs_hosts $(FLAGS)

gpu-check: $(READY) ## replicas and profiles on an NVIDIA GPU, with tables; without one it says why and does nothing
	$(BIN)/pytest -m needs_gpu -rs tests/gpu
	$(BIN)/python -m benchmarks.gpu $(FLAGS)

PURE := tests/app tests/core tests/policies tests/runlog tests/solvers tests/systems tests/workload

# test_snapshot plays whole simulations, which take minutes when they are traced and reach no other branches.
coverage: $(READY) ## branches of the floors without I/O that their own tests reach; fails below the limit
	rm -rf out/coverage && mkdir -p out/coverage && $(BIN)/coverage run -m pytest -p no:cacheprovider -n 2 --dist worksteal \
		--hypothesis-profile=few --ignore=tests/systems/test_snapshot.py $(PURE)
	$(BIN)/coverage combine --quiet && $(BIN)/coverage report --skip-covered

demo: $(READY) ## about two minutes: a real model under a bursty trace, live and simulated, one HTML report
	$(BIN)/sloop demo $(FLAGS)

fmt: $(READY) ## format the code and mend what can be mended
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lint: $(READY) ## style, without changing a file
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY) ## mypy, strict, tests included
	$(BIN)/mypy

contracts: $(READY) ## the house: which floor may import which
	$(BIN)/lint-imports

check: lint types contracts test test-systems test-live test-page test-dst test-hosts test-without ## everything but coverage that continuous integration runs

reproduce: $(READY) ## the published experiments, beside what we measure
	$(BIN)/sloop reproduce all $(FLAGS)

fuzz: $(READY) ## a minute of random worlds under all checkers, then new examples for every property test
	$(BIN)/python -m tests.dst.fuzz $(FLAGS)
	$(PYTEST) -m "hypothesis and not live" --hypothesis-profile=random

SEED ?= 0
MINUTES ?= 1

soak: $(READY) ## random faults against the core on all CPU cores, every invariant checked; SEED=N MINUTES=M
	$(BIN)/python -m tests.dst.soak --seed $(SEED) --minutes $(MINUTES) $(FLAGS)

bench-sim: $(READY) ## requests simulated per second, beside SimPy, salabim and a bare heap loop
	$(BIN)/python -m benchmarks.sim_speed $(FLAGS)

bench-peers: $(READY) ## beside mosec, LitServe, BentoML, Ray Serve, Triton and MLServer, each in .peers/; see FLAGS=--help
	$(BIN)/python -m benchmarks.peers $(FLAGS)

attacks: $(READY) ## what attacks on the ports do to authorised traffic and memory; 20 minutes, see FLAGS=--help
	$(BIN)/python -m benchmarks.attacks $(FLAGS)

soak-live: $(READY) ## an hour of mixed requests: are memory, descriptors, processes and log flat? FLAGS="--seconds 600"
	$(BIN)/python -m benchmarks.soak $(FLAGS)

clean: ## forget the environment and every cache
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist out
