# `make demo` and `make test` need only Python 3.11+ with venv. They create .venv once.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
VLLM := .venv-vllm
ROUTERS := .venv-routers
TRANSFORMERS := .venv-transformers
OLDER := 0.29 0.30 0.31
SOURCES := kvflow handshake tests docker docs/examples
TEXTS := $(SOURCES) docs *.md Makefile pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help demo chat test test-full lint docs wheel bench simulate chaos fuzz soak compose-demo test-compose test-exhaustive test-fence clean
.SILENT:

help:
	echo 'make demo    run prefill and decode in two processes, and compare every token with one process'
	echo 'make chat    chat with a small real model that one vLLM prefills and another decodes (three minutes); creates .venv-vllm once (2 GB)'
	echo 'make test    run lint, then the tests that are quick and one of each slow topic (five minutes)'
	echo 'make test-full   run every test, and print the branch coverage (about fifteen minutes)'
	echo 'make lint    check style, types, import layers, spelling and texts'
	echo 'make docs    write the reference pages from docstrings'
	echo 'make wheel   build the wheel and the sdist into dist/'
	echo 'make bench   run every benchmark'
	echo 'make simulate   run 20,000 scenarios on virtual time, with faults (an hour); SEEDS=N sets the number'
	echo 'make fuzz    send a million invalid messages and 40,000 invalid inputs to real workers (ten minutes or more); FRAMES=N, LIES=N'
	echo 'make soak    pull 100,000 times while processes are killed and restarted (ten minutes or more); PULLS=N, TRANSPORT=tcp; or watch memory, OFFERS=N'
	echo 'make planted   plant each bug of a list, and tell which test finds it (half an hour or more); BUGS="C06 W08" chooses some'
	echo 'make chaos   kill, pause and cut off real processes for three minutes; MINUTES=N, SEED=N'
	echo 'make compose-demo   run the demo in containers, over TCP and shared memory; needs Docker and Compose'
	echo 'make test-compose   test the demo in containers, and kill one of them'
	echo 'make bench-vllm   compare time to first token and CPU with NixlConnector of vLLM (half an hour)'
	echo 'make test-vllm   test with a real vLLM on the CPU (some minutes); creates .venv-vllm, -routers and -transformers once (3 GB)'
	echo 'make test-vllm-full   the same with every model, layout, block size and release of vLLM (most of an hour)'
	echo 'make test-ray   test with Ray Serve LLM on two nodes of this host (five minutes); creates .venv-ray once (3 GB)'
	echo 'make test-python   run units, contract and the wheel with another Python: PYTHON_TOO=python3.12 (eight minutes)'
	echo 'make test-exhaustive   test 100,000 generated pairs of caches, and all pairs of parallelism and layout (most of an hour)'
	echo 'make test-fence   read 100,000 times while blocks are reused, and check every byte (half an hour)'
	echo 'make test-gpu   test over the memory of a GPU: test-gpu-facts, test-gpu-reads, test-gpu-contract (eight minutes each at most)'
	echo 'make clean   remove build outputs and results; keep .venv and .venv-*'

# Install torch first and alone, so that pip chooses the pinned build before it sees packages that need torch.
$(INSTALLED): pyproject.toml constraints.txt
	echo 'installing into .venv (once; a few minutes)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -qq --disable-pip-version-check --upgrade 'pip>=25.1'  # the first with --group
	$(BIN)/pip install -qq --disable-pip-version-check --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[demo,proxy]' --group dev
	touch $@

# vLLM gets a separate environment, because it pins versions that kvflow leaves open. vLLM and kvflow come last and
# without their dependencies, so that pip installs no other torch and no second NIXL.
define install-vllm
	echo 'installing vLLM into $(@D) (once; a few minutes)'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -qq --disable-pip-version-check --upgrade 'pip>=25.1'
	$(@D)/bin/pip install -qq --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(@D)/bin/pip install -qq --disable-pip-version-check --requirement tests/vllm/requirements.txt structlog --group test --group coverage
	$(@D)/bin/pip install -qq --disable-pip-version-check --no-deps --requirement $< --editable .
	touch $@
endef

$(VLLM)/.installed: tests/vllm/packages.txt tests/vllm/requirements.txt pyproject.toml
	$(install-vllm)

# Each older release of vLLM has a separate environment.
$(VLLM)-%/.installed: tests/vllm/packages-%.txt tests/vllm/requirements.txt pyproject.toml
	$(install-vllm)

# Routers need no vLLM, and their pins must not affect it.
$(ROUTERS)/.installed: tests/vllm/requirements-routers.txt
	echo 'installing routers into $(ROUTERS) (once)'
	$(PYTHON) -m venv $(ROUTERS)
	$(ROUTERS)/bin/pip install -qq --disable-pip-version-check --requirement tests/vllm/requirements-routers.txt
	touch $@

# vLLM pins another release of transformers than docs/examples/transformers.
$(TRANSFORMERS)/.installed: tests/vllm/requirements-transformers.txt pyproject.toml constraints.txt
	echo 'installing transformers into $(TRANSFORMERS) (once)'
	$(PYTHON) -m venv $(TRANSFORMERS)
	$(TRANSFORMERS)/bin/pip install -qq --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(TRANSFORMERS)/bin/pip install -qq --disable-pip-version-check --constraint constraints.txt --requirement $< --editable .
	touch $@

.venv-ray/.installed: tests/vllm/packages-0.29.txt tests/vllm/requirements.txt tests/ray/packages.txt pyproject.toml
	$(install-vllm)
	rm $@
	$(@D)/bin/pip install -qq --disable-pip-version-check --constraint tests/vllm/requirements.txt --requirement tests/ray/packages.txt
	touch $@

demo: $(INSTALLED)
	$(BIN)/kvflow demo

chat: $(VLLM)/.installed
	$(VLLM)/bin/python docs/examples/chat/chat.py

# pytest runs last, so that the output ends with its summary. Four processes keep two cores busy, because tests wait half
# of the time. Idle processes take work from the others, because a few tests take as long as a thousand others.
# Python may write bytecode, even where the environment forbids it: otherwise each process compiles all tests again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --quiet --numprocesses 4 --dist worksteal

# CI runs each test once: `make test COVERED=1` counts the lines that it runs, and `make test-full REST=1` adds the others.
test: lint
	$(PYTEST) -m 'not slow' $(if $(COVERED),--cov --cov-report= --cov-fail-under=0,--hypothesis-profile quick)

# `.venv/bin/coverage report` names the lines that no test runs.
test-full: $(INSTALLED)
	$(PYTEST) --cov --cov-report= $(if $(REST),-m slow --cov-append)

# A second release of Python, as vLLM's images have. Its torch is another build, which brings 3 GB of CUDA along.
PYTHON_TOO ?= python3.12
.venv-python/.installed: pyproject.toml constraints.txt
	echo 'installing into .venv-python (once; a few minutes)'
	$(PYTHON_TOO) -m venv $(@D)
	$(@D)/bin/pip install -qq --disable-pip-version-check --upgrade 'pip>=25.1'
	$(@D)/bin/pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[demo,proxy]' --group dev
	touch $@

test-python: .venv-python/.installed
	$(subst $(BIN),.venv-python/bin,$(PYTEST)) -m 'not slow' tests/unit tests/contract tests/architecture/test_wheel.py

lint: $(INSTALLED)
	$(BIN)/ruff check --quiet $(SOURCES)
	$(BIN)/ruff format --quiet --check $(SOURCES)
	$(BIN)/mypy --no-error-summary
	$(BIN)/mypy --no-error-summary docs/examples/reader
	report=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$report"; exit 1; }
	$(BIN)/codespell $(TEXTS)
	$(BIN)/python -m tests.docs.text_check

# Pages and tables that are generated from docstrings. Tests fail if they are out of date.
docs: $(INSTALLED)
	for page in api_page reference_tables running; do $(BIN)/python -m tests.docs.$$page || exit 1; done

# The wheel is built from the sdist, as an index would have it. Nothing is downloaded.
DIST := dist
wheel: $(INSTALLED)
	rm -rf $(DIST)/kvflow-*
	$(BIN)/python -P -m hatchling build --target sdist --directory $(DIST) >/dev/null
	$(BIN)/python -P -m pip wheel -qq --no-index --no-deps --no-build-isolation --wheel-dir $(DIST) $(DIST)/kvflow-*.tar.gz
	ls $(DIST)/kvflow-*

bench: $(INSTALLED)
	for script in tests/benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done
	$(BIN)/python -m tests.benchmarks.hot_path
	for name in descriptors layouts pull fence loop idle; do echo "== kvflow bench $$name"; $(BIN)/kvflow bench $$name || exit 1; done

simulate: $(INSTALLED)
	$(BIN)/python -m tests.simulation --seeds $${SEEDS:-20000} --first $${FIRST:-0}

.PHONY: planted
planted: $(INSTALLED)
	$(BIN)/python -m tests.planted $(BUGS)

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz --seed $${SEED:-0} --frames $${FRAMES:-1000000} --lies $${LIES:-10000} \
		--tcp-frames $${FRAMES:-1000000} --tcp-answers $${LIES:-10000}

soak: $(INSTALLED)
	$(BIN)/python -m tests.world soak --pulls $${PULLS:-100000} --seed $${SEED:-0} --transport $${TRANSPORT:-auto} --offers $${OFFERS:-0}

chaos: $(INSTALLED)
	$(BIN)/python -m tests.world chaos --minutes $${MINUTES:-3} $${SEED:+--seed $$SEED}

# Only the image kvflow:local remains.
compose-demo:
	docker/demo.sh

test-compose: $(INSTALLED)
	KVFLOW_TEST_COMPOSE=1 $(BIN)/python -m pytest --quiet -o faulthandler_timeout=500 tests/compose

# `make test-vllm COVERED=1` also prints which lines of kvflow/integrations/vllm real engines run; it takes a third longer.
# Two processes run the tests, because a request is in one of its two engines, and one core would wait.
.PHONY: test-vllm test-vllm-full test-vllm-servers test-vllm-engines test-ray bench-vllm
VLLM_PYTEST := -m pytest --quiet -o timeout=600 -o faulthandler_timeout=0 tests/vllm
test-vllm: export COVERAGE_RCFILE := tests/vllm/coverage.ini
test-vllm-servers: CHOSEN := servers
test-vllm-engines: CHOSEN := not servers
test-vllm-servers test-vllm-engines: $(VLLM)/.installed $(ROUTERS)/.installed $(TRANSFORMERS)/.installed
	KVFLOW_TEST_VLLM=usual KVFLOW_TEST_VLLM_OUT=out/vllm/$@ $(VLLM)/bin/python $(if $(COVERED),-m coverage run) $(VLLM_PYTEST) -m '$(CHOSEN)'

test-vllm: $(VLLM)/.installed $(ROUTERS)/.installed $(TRANSFORMERS)/.installed
	echo 'two halves run at once; each prints its output when it has ended (a quarter of an hour or more)'
	$(MAKE) --no-print-directory --jobs 2 --output-sync test-vllm-servers test-vllm-engines
	$(if $(COVERED),$(VLLM)/bin/python -m coverage combine --quiet && $(VLLM)/bin/python -m coverage report)

test-vllm-full: $(VLLM)/.installed $(OLDER:%=$(VLLM)-%/.installed) $(ROUTERS)/.installed $(TRANSFORMERS)/.installed
	KVFLOW_TEST_VLLM=full $(VLLM)/bin/python -m pytest --quiet -o timeout=900 -o faulthandler_timeout=0 tests/vllm

test-ray: .venv-ray/.installed
	KVFLOW_TEST_RAY=1 .venv-ray/bin/python -m pytest --quiet -o timeout=1800 -o faulthandler_timeout=0 -W ignore::DeprecationWarning tests/ray

bench-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m tests.benchmarks.beside_vllm --json out/beside-vllm.json

test-exhaustive: $(INSTALLED)
	KVFLOW_TEST_EXHAUSTIVE=$${KVFLOW_TEST_EXHAUSTIVE:-1} $(BIN)/python -m pytest --quiet -o faulthandler_timeout=0 tests/exhaustive

test-fence: $(INSTALLED)
	KVFLOW_TEST_READS=$${KVFLOW_TEST_READS:-100000} $(BIN)/python -m pytest --quiet -o faulthandler_timeout=500 tests/integration/test_fenced_reads.py tests/integration/test_kept.py tests/integration/test_open.py

# What PYTHON lacks comes into a folder, without dependencies: torch and most others are there. Without a network,
# PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER have pip take wheels of a folder. KVFLOW_TEST_MEMORY=DRAM needs no GPU.
GPU := PYTHONPATH=$(CURDIR):$(CURDIR)/.gpu-site:$$PYTHONPATH KVFLOW_TEST_MEMORY=$${KVFLOW_TEST_MEMORY:-VRAM} $(PYTHON)
.gpu-site/.installed: pyproject.toml
	mkdir -p .gpu-site
	for round in 1 2 3 4 5; do \
		$(GPU) -m tests.gpu.requirements .gpu-site >.gpu-site/missing.txt || exit 1; \
		test -s .gpu-site/missing.txt || break; \
		echo "installing into .gpu-site: $$(tr '\n' ' ' <.gpu-site/missing.txt)"; \
		$(PYTHON) -m pip install -qq --disable-pip-version-check --no-compile --no-deps --target .gpu-site \
			--requirement .gpu-site/missing.txt || { echo 'docs/howto/gpus.md, "Test", has the wheels to carry'; exit 1; }; \
	done
	test ! -s .gpu-site/missing.txt
	touch $@

# Each takes less than eight minutes. A torch or a Python that warns fails no test.
GPU_PYTEST := $(GPU) -m pytest --quiet -p no:cacheprovider -W default --timeout 200 --session-timeout 470
.PHONY: test-gpu test-gpu-facts test-gpu-reads test-gpu-contract
test-gpu: test-gpu-facts test-gpu-reads test-gpu-contract

test-gpu-facts: .gpu-site/.installed
	$(GPU) -m tests.gpu.facts

test-gpu-reads: .gpu-site/.installed
	$(GPU_PYTEST) tests/gpu tests/integration/test_tcp_device.py

test-gpu-contract: .gpu-site/.installed
	$(GPU_PYTEST) --numprocesses 8 --dist worksteal tests/contract

clean:
	rm -rf out dist build .coverage* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
