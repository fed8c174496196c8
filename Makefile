# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What is imported is compiled then, once; most of what is installed never is. Some images set the variable: each
# process would compile torch anew, which takes longer than to import it.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := -m pip --disable-pip-version-check --quiet --no-input install --no-compile
CONSTRAINTS := tools/constraints.txt

SGLANG := .venv-sglang
SITE := .site/html
AGENTS := .venv-agents
ENVIRONMENTS := .venv-environments
MORE_AGENTS := .venv-agents-more
CODING_AGENTS := .agents-cli
export NEED_AGENTS := $(AGENTS)/bin/python

.PHONY: run collected browser agents agents-more environments ray sglang test test-environments test-runs test-sglang test-gpu test-slurm test-hosts test-ray faults faults-quick figures nightly
.PHONY: check lint types site docs setup clean

run: $(STAMP)  ## train the GSM8K job; learns within minutes on a CPU
	$(BIN)/python -m areal_async run workflows/gsm8k.py $(ARGS)

# Three files at a time, for a third of each one's time is a wait; each whole in one process, the longest ones first
# (tests/conftest.py). ARGS="-n 0 ..." undoes it.
test: $(STAMP) browser agents  ## every test that runs without a GPU and without SGLang, but for those of `test-runs`
	$(BIN)/python -m pytest -m "not sglang and not slurm and not ray and not hosts and not whole_runs and not environments and not nightly and not gpu" -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

collected: $(STAMP)  ## the tests compiled, once: each process of `make test` would do it for itself
	$(BIN)/python -m pytest --collect-only -qq > $(VENV)/.collected || { cat $(VENV)/.collected; false; }

browser:  ## what the report of a run is looked at with; Debian's, where there is none
	$(PYTHON) tools/setup_browser.py

agents: $(AGENTS)/.installed  ## the agent frameworks that are tried at the endpoint, in an environment of their own

environments: $(ENVIRONMENTS)/.installed  ## libraries whose environments are trained, in an environment of their own over the project's

test-environments: environments  ## environments of other libraries, in runs and by themselves
	$(ENVIRONMENTS)/bin/python -m pytest -m "environments and not nightly" -n 0 tests/environments $(ARGS)

agents-more: $(MORE_AGENTS)/.installed $(CODING_AGENTS)/.installed  ## those that are tried at night, and coding agents by npm

test-runs: $(STAMP) agents  ## whole runs: what users do, end to end, each workflow, a run that is operated, killed or damaged
	$(BIN)/python -m pytest -m "whole_runs and not nightly" -n 3 --dist loadfile --no-loadscope-reorder tests/e2e $(ARGS)

ray: $(VENV)/.ray  ## Ray beside the rest, for runs of its clusters

sglang:  ## an environment in which the real SGLang runs on a CPU
	$(PYTHON) tools/setup_sglang.py $(SGLANG)

test-sglang: $(STAMP) agents sglang  ## the contract with the servers, of the real SGLang; builds its environment first
	NEED_SGLANG=$(SGLANG)/bin/python $(BIN)/python -m pytest -m "sglang and not nightly" tests/sglang $(ARGS)

test-gpu: $(STAMP)  ## what needs GPUs, as far as this machine has them; says what it lacks for the rest
	$(BIN)/python -m pytest -m gpu -n 0 -s tests/gpu $(ARGS)

test-hosts: $(STAMP)  ## the trainer's ranks on several hosts made of namespaces, whose links are cut and which are killed; needs root
	NEED_HOSTS=1 $(BIN)/python -m pytest -m "hosts and not nightly" -n 0 tests/hosts $(ARGS)

test-slurm: $(STAMP)  ## runs as jobs of the real Slurm, on three hosts made of namespaces; installs Debian's packages, needs root
	$(PYTHON) tools/setup_slurm.py
	NEED_SLURM=1 $(BIN)/python -m pytest tests/slurm $(ARGS)

test-ray: $(STAMP) ray  ## a run in a real Ray of three hosts made of namespaces, of which some are killed; needs root
	NEED_RAY=1 $(BIN)/python -m pytest -n 0 tests/ray tests/unit/launch/test_ray.py $(ARGS)

faults: $(STAMP)  ## every fault of the matrix against real runs; under an hour on two cores
	$(BIN)/python -m tools.faults $(ARGS)

faults-quick: $(STAMP)  ## a selection of the faults, one seed each; under 8 minutes on two cores
	$(BIN)/python -m tools.faults --quick $(ARGS)

figures: $(STAMP)  ## the ratios that have a peer, measured small, with the peers' versions
	$(BIN)/python -m tools.figures $(ARGS)

nightly: $(STAMP) ray agents agents-more environments sglang  ## the longer proofs: each test on both event loops, every fault and what is beside its row, millions of inputs and of steps of the protocol
	$(MAKE) test ARGS=--both-loops
	NEED_MORE_AGENTS=$(MORE_AGENTS)/bin/python NEED_CODING_AGENTS=$(CODING_AGENTS)/node_modules/.bin \
		$(BIN)/python -m pytest -m nightly tests/e2e tests/unit
	$(ENVIRONMENTS)/bin/python -m pytest -m "environments and nightly" -n 0 tests/environments
	NEED_SGLANG=$(SGLANG)/bin/python $(BIN)/python -m pytest -m "sglang and nightly" tests/sglang
	NEED_HOSTS=1 $(BIN)/python -m pytest -m "hosts and nightly" -n 0 tests/hosts
	$(MAKE) faults
	$(BIN)/python -m tools.fuzz --inputs 1000000
	$(BIN)/python -m tools.hostile --inputs 1000000 --processes 2
	$(BIN)/python -m tools.explore_protocol --steps 2000000
	$(BIN)/python -m tools.trace_layouts --model 72B --row-tokens 16384 --ranks 64 1024
	$(PYTHON) tools/setup_slurm.py
	$(BIN)/python -m tools.compare_backends

check: lint types site  ## format, lint, types, documents

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

site: $(STAMP)  ## the documents as one site; any warning is an error, a dead link too
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet -c tools/docs -d .site/doctrees . $(SITE)

docs: site  ## build the site, and serve it at http://127.0.0.1:8000
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(SITE) 8000

setup: $(STAMP)

# torch first and alone: with it in place no other package brings another build.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -c $(CONSTRAINTS) torch
	$(BIN)/python $(INSTALL) -c $(CONSTRAINTS) -e ".[dev]"
	@touch $@

# Each version is named: nothing has to be looked for, and one of them asks for older libraries than it needs.
$(AGENTS)/.installed: tools/agents.txt
	$(PYTHON) -m venv --clear $(AGENTS)
	$(AGENTS)/bin/python $(INSTALL) --no-deps -r tools/agents.txt
	@touch $@

# What it has itself goes before what the project has.
$(ENVIRONMENTS)/.installed: tools/environments.txt $(STAMP)
	$(PYTHON) -m venv --clear $(ENVIRONMENTS)
	$(ENVIRONMENTS)/bin/python $(INSTALL) --no-deps -r tools/environments.txt
	$(ENVIRONMENTS)/bin/python tools/over_project.py $(BIN)/python
	@touch $@

$(MORE_AGENTS)/.installed: tools/agents_more.txt
	$(PYTHON) -m venv --clear $(MORE_AGENTS)
	$(MORE_AGENTS)/bin/python $(INSTALL) --no-deps -r tools/agents_more.txt
	@touch $@

$(CODING_AGENTS)/.installed: tools/agents_cli.txt
	rm -rf $(CODING_AGENTS) && mkdir $(CODING_AGENTS)
	npm install --prefix $(CODING_AGENTS) --no-audit --no-fund --silent $$(grep -v "^\#" tools/agents_cli.txt)
	@touch $@

$(VENV)/.ray: $(STAMP)
	$(BIN)/python $(INSTALL) -c $(CONSTRAINTS) -e ".[ray]"
	@touch $@

clean:
	rm -rf $(VENV) $(SGLANG) $(AGENTS) $(MORE_AGENTS) $(CODING_AGENTS) $(ENVIRONMENTS) .site build *.egg-info
