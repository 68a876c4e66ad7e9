# The two commands are `make demo` and `make test`; each sets up what it needs in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo docs package chromium nginx test test-system test-numbers test-flower test-chaos test-all check lint bench bench-peers growth lock clean

# Installed once, and again when the project's files or the pinned versions change.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "mixfl needs Python 3.11 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing into .venv (a minute or two, once)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev]'
	touch $@

# What the tests need beyond that: Flower, PyTorch, Hugging Face's models, ONNX, Ray, which are large.
.venv/complete: .venv/ready
	@echo "Installing Flower, PyTorch, transformers, ONNX and Ray for the tests (minutes, once)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev,flower,huggingface,wandb,onnx,ray,slurm]'
	touch $@

.venv/docs: .venv/complete
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev,docs]'
	touch $@

demo: .venv/ready
	$(BIN)/mixfl compare smile --preset demo --algorithms fedavg,pt,1wgt,2wgt,oracle \
		--out runs/demo --resume

# The site, in build/site. Runs the tutorials, unless the tests have (build/tutorials); not with
# `make docs DRAFT=1`.
docs: .venv/docs
	DRAFT=$(DRAFT) NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open build/site/index.html"

# Wheel and sdist, tried in a clean environment; PYTHONS="python3.12 python3.13" records them.
package: .venv/ready
	$(BIN)/python -m benchmarks.package $(PYTHONS)

# For the tests of the report's page, which are skipped without it.
chromium:
	@which chromium chromium-browser google-chrome 2> /dev/null | grep -q . || \
	if [ "$$(id -u)" = 0 ] && which apt-get > /dev/null; then \
		apt-get update -qq; apt-get install -y -qq chromium || echo "Chromium can't be installed"; \
	else \
		echo "For the page's tests install Chromium (Debian: sudo apt-get install chromium)"; \
	fi

# For the tests of the proxy's configuration, which are skipped without it.
nginx:
	@PATH="$$PATH:/usr/sbin" which nginx > /dev/null || \
	if [ "$$(id -u)" = 0 ] && which apt-get > /dev/null; then \
		apt-get update -qq; apt-get install -y -qq nginx-light || echo "nginx can't be installed"; \
	else \
		echo "For the proxy's tests install nginx (Debian: sudo apt-get install nginx-light)"; \
	fi

# The stages are described in tests/conftest.py. The programs of `make test` are compiled without
# optimizations, which saves more than half of its time; of the other stages, a part has those of users.
PYTEST := $(BIN)/python -m pytest -q --durations=12
WORKERS ?= 2
PARALLEL = -n $(WORKERS) --dist worksteal
OPTIMIZED := MIXFL_TESTS_OPTIMIZED=1

test: .venv/complete
	$(PYTEST) $(PARALLEL) -m 'not slow and not flower and not system and not numbers'

# What kills processes, sweeps, distributes, opens browsers; CI runs it too.
test-system: .venv/complete chromium
	$(PYTEST) $(PARALLEL) -m 'system and not optimized and not slow and not flower'
	$(OPTIMIZED) $(PYTEST) $(PARALLEL) -m 'system and optimized and not slow and not flower'

# The tests of numbers, with XLA's optimizations and more combinations; CI runs it too.
test-numbers: .venv/complete
	$(PYTEST) $(PARALLEL) -m 'numbers and not optimized and not slow and not flower and not system'
	$(OPTIMIZED) $(PYTEST) $(PARALLEL) -m 'optimized and not slow and not flower and not system'

# A SuperLink and three SuperNodes as real processes, one test at a time: they share the cores.
test-flower: .venv/complete nginx
	$(OPTIMIZED) $(PYTEST) -m 'flower and not slow'

# The same with everything killed, the SuperLink away and nodes that attack: a quarter of an hour.
test-chaos: .venv/complete
	$(OPTIMIZED) $(PYTEST) tests/deploy/test_chaos.py tests/deploy/test_secure_flower.py -m slow

test-all: .venv/complete chromium nginx
	$(OPTIMIZED) $(PYTEST) $(PARALLEL) -m 'not flower'
	$(OPTIMIZED) $(PYTEST) -m flower

lint: .venv/complete
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test test-system test-numbers

# Installs the peers in .bench, each in an environment of its own; what can't be is left out.
bench: .venv/complete
	$(BIN)/python -m benchmarks.rounds
	$(BIN)/python -m benchmarks.zoo
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.choices
	$(BIN)/python -m benchmarks.trials

bench-peers: .venv/ready
	$(BIN)/python -m benchmarks.peers.install

growth: .venv/ready
	$(BIN)/python -m benchmarks.growth

# Pin what is installed now: after changing the dependencies, in a fresh .venv.
lock: .venv/docs
	$(BIN)/python -m pip freeze --exclude-editable | sed "s/+cpu$$//" > constraints.txt
	touch .venv/ready .venv/complete .venv/docs

clean:
	rm -rf .venv .bench build runs .pytest_cache .mypy_cache .ruff_cache
