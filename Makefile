# make run    set everything up and train the quickstart, on a CPU
# make test   set everything up and run the tests
# make faults kill and starve real runs in every way, and a soak: under 20 minutes
# make cluster   the tests of runs over a Ray cluster, whose nodes are made on this machine
# make published   the published runs' whole workflow in small, on a CPU
# make lint, make bench, make setup

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
BENCHES := sandbox kernels
# Two files at a time: a test keeps one core busy, starting vLLM most of all, and needs up to 4 GiB.
PYTEST := python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
RUN := PATH="$(CURDIR)/$(BIN):$$PATH"

.PHONY: setup run test fast faults kills ends cluster lint bench published clean

setup:
	@sh setup.sh "$(PYTHON)" "$(VENV)"

run: setup
	@$(RUN) rlvr run recipes/quickstart.toml

test: setup
	@$(RUN) $(PYTEST)

fast: setup
	@$(RUN) $(PYTEST) -m "not slow"

# The kills and the other ends side by side, a core for each; then the soak. Named one by one: plain pytest does not
# collect them. The kills' table is printed as it grows (-s), what the other ends said once they are through.
faults: setup
	@$(MAKE) --no-print-directory -j 2 kills ends
	@$(RUN) python bench/soak.py --json runs/soak.json --steps 300

kills: setup
	@$(RUN) python -m pytest -s tests/faults/kills.py

ends: setup
	@mkdir -p runs
	@$(RUN) python -m pytest -vv --durations 0 --durations-min 5 tests/faults/ends.py > runs/ends.log 2>&1; \
	code=$$?; cat runs/ends.log; exit $$code

cluster: setup
	@$(RUN) python -c "import ray" 2> /dev/null || { echo "cluster: installing Ray"; $(RUN) pip install -q -e ".[cluster]"; }
	@$(RUN) python -m pytest tests/cluster/connecting.py tests/cluster/grading.py tests/cluster/running.py

lint: setup
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy

bench: setup
	@mkdir -p runs
	@for name in $(BENCHES); do echo "== bench/$$name.py"; $(RUN) python bench/$$name.py --json runs/$$name.json || exit 1; done

published: setup
	@$(RUN) sh recipes/published.sh

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
