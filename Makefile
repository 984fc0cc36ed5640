# `make demo` and `make test` need nothing but Python 3.11+ with venv: they build .venv themselves, once.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
VLLM := .venv-vllm
ROUTERS := .venv-routers
OLDER := 0.29 0.30 0.31
SOURCES := kvflow handshake tests docker
TEXTS := $(SOURCES) docs README.md CHANGELOG.md Makefile pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench simulate chaos fuzz soak compose-demo test-compose test-exhaustive test-fence clean
.SILENT:

help:
	echo 'make demo    prefill in one process, decode in another, compare with one process alone'
	echo 'make test    lint, type checks, architecture contracts, then all tests'
	echo 'make lint    the same without the tests'
	echo 'make bench   every benchmark, one after the other'
	echo 'make simulate   20,000 scenarios of real workers on virtual time, with every fault; SEEDS=N for fewer; an hour'
	echo 'make fuzz    a million mutated messages and 40,000 lies to real workers; FRAMES=N and LIES=N for fewer; ten minutes or more'
	echo 'make soak    100,000 pulls among processes that are killed and restarted; PULLS=N for fewer, TRANSPORT=tcp; ten minutes or more'
	echo 'make chaos   real processes killed, stopped and cut off for three minutes; MINUTES=N, SEED=N'
	echo 'make compose-demo   the demo in containers, over TCP and over shared memory; needs Docker and Compose'
	echo 'make test-compose   the tests of that, with a container that is killed'
	echo 'make bench-vllm   first tokens and CPU beside those of the connector that vLLM has; half an hour'
	echo 'make test-vllm   a real vLLM, prefill and decode, on the CPU; builds .venv-vllm and .venv-routers once (2 GB), then some minutes'
	echo 'make test-vllm-full   the same with every model, layout, block size and release of vLLM, and a table; most of an hour'
	echo 'make test-ray   Ray Serve LLM on two nodes of this host, two replicas of each kind; builds .venv-ray once (3 GB), then five minutes'
	echo 'make test-exhaustive   100,000 generated pairs, and every parallelism and layout to every other; most of an hour'
	echo 'make test-fence   100,000 reads of blocks that are recycled meanwhile, and no wrong byte; a quarter of an hour'
	echo 'make clean   remove what was built and measured; .venv and .venv-* stay'

# torch goes first and alone, so that pip settles on the pinned build before it looks at anything that wants torch.
$(INSTALLED): pyproject.toml constraints.txt
	echo 'installing into .venv (once; a few minutes)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -qq --disable-pip-version-check --upgrade 'pip>=25.1'  # the first with --group
	$(BIN)/pip install -qq --disable-pip-version-check --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[demo,proxy]' --group dev
	touch $@

# An engine's environment is its own: it pins what kvflow leaves open. vLLM and kvflow come last and without their
# dependencies, so that nothing pulls another torch or a second NIXL.
define install-vllm
	echo 'installing vLLM into $(@D) (once; a few minutes)'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -qq --disable-pip-version-check --upgrade 'pip>=25.1'
	$(@D)/bin/pip install -qq --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(@D)/bin/pip install -qq --disable-pip-version-check --requirement tests/vllm/requirements.txt structlog --group test
	$(@D)/bin/pip install -qq --disable-pip-version-check --no-deps --requirement $< --editable .
	touch $@
endef

$(VLLM)/.installed: tests/vllm/packages.txt tests/vllm/requirements.txt pyproject.toml
	$(install-vllm)

# Older releases of vLLM: each has an environment of its own.
$(VLLM)-%/.installed: tests/vllm/packages-%.txt tests/vllm/requirements.txt pyproject.toml
	$(install-vllm)

# Routers need nothing of vLLM, and pin nothing for it.
$(ROUTERS)/.installed: tests/vllm/requirements-routers.txt
	echo 'installing routers into $(ROUTERS) (once)'
	$(PYTHON) -m venv $(ROUTERS)
	$(ROUTERS)/bin/pip install -qq --disable-pip-version-check --requirement tests/vllm/requirements-routers.txt
	touch $@

.venv-ray/.installed: tests/vllm/packages-0.29.txt tests/vllm/requirements.txt tests/ray/packages.txt pyproject.toml
	$(install-vllm)
	rm $@
	$(@D)/bin/pip install -qq --disable-pip-version-check --constraint tests/vllm/requirements.txt --requirement tests/ray/packages.txt
	touch $@

demo: $(INSTALLED)
	$(BIN)/kvflow demo

# pytest is last, so that the output ends with its summary. Three processes keep two cores busy, since half of what tests
# do is to wait; each takes work from the others when it has none left, because a few tests take as long as a thousand.
test: lint
	$(BIN)/python -m pytest --quiet --numprocesses 3 --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check --quiet $(SOURCES)
	$(BIN)/ruff format --quiet --check $(SOURCES)
	$(BIN)/mypy --no-error-summary
	report=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$report"; exit 1; }
	$(BIN)/codespell $(TEXTS)

bench: $(INSTALLED)
	for script in tests/benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done
	$(BIN)/python -m tests.benchmarks.hot_path
	for name in descriptors layouts pull fence loop idle; do echo "== kvflow bench $$name"; $(BIN)/kvflow bench $$name || exit 1; done

simulate: $(INSTALLED)
	$(BIN)/kvflow simulate --seeds $${SEEDS:-20000} --first $${FIRST:-0}

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz --seed $${SEED:-0} --frames $${FRAMES:-1000000} --lies $${LIES:-10000} \
		--tcp-frames $${FRAMES:-1000000} --tcp-answers $${LIES:-10000}

soak: $(INSTALLED)
	$(BIN)/python -m tests.soak --pulls $${PULLS:-100000} --seed $${SEED:-0} --transport $${TRANSPORT:-auto}

chaos: $(INSTALLED)
	$(BIN)/python -m tests.chaos --minutes $${MINUTES:-3} $${SEED:+--seed $$SEED}

# Leaves the image kvflow:local behind, and nothing else.
compose-demo:
	docker/demo.sh

test-compose: $(INSTALLED)
	KVFLOW_TEST_COMPOSE=1 $(BIN)/python -m pytest --quiet -o faulthandler_timeout=500 tests/compose

.PHONY: test-vllm test-vllm-full test-ray bench-vllm
test-vllm: $(VLLM)/.installed $(ROUTERS)/.installed
	KVFLOW_TEST_VLLM=usual $(VLLM)/bin/python -m pytest --quiet -o timeout=600 -o faulthandler_timeout=0 tests/vllm

test-vllm-full: $(VLLM)/.installed $(OLDER:%=$(VLLM)-%/.installed) $(ROUTERS)/.installed
	KVFLOW_TEST_VLLM=full $(VLLM)/bin/python -m pytest --quiet -o timeout=900 -o faulthandler_timeout=0 tests/vllm

test-ray: .venv-ray/.installed
	KVFLOW_TEST_RAY=1 .venv-ray/bin/python -m pytest --quiet -o timeout=1800 -o faulthandler_timeout=0 -W ignore::DeprecationWarning tests/ray

bench-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m tests.benchmarks.beside_vllm --json out/beside-vllm.json

test-exhaustive: $(INSTALLED)
	KVFLOW_TEST_EXHAUSTIVE=$${KVFLOW_TEST_EXHAUSTIVE:-1} $(BIN)/python -m pytest --quiet -o faulthandler_timeout=0 tests/exhaustive

test-fence: $(INSTALLED)
	KVFLOW_TEST_READS=$${KVFLOW_TEST_READS:-100000} $(BIN)/python -m pytest --quiet -o faulthandler_timeout=500 tests/integration/test_fenced_reads.py

clean:
	rm -rf out dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
