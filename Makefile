# Every target sets up what it needs in .venv, through plain pip; nothing but Python 3.11+, git and make is expected.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check -c constraints.txt
PACKAGING := pyproject.toml constraints.txt
export OMP_NUM_THREADS ?= 1
# Set in many container images: all the processes that tests start would then compile ppctl and its tests anew.
unexport PYTHONDONTWRITEBYTECODE
JOBS ?= 2

.PHONY: train docs test test-all soak test-peers test-jobset test-slurm check bench bench-plan bench-ckpt golden fix test-gpu clean

# Paths in a log are those of the checkout, not of the machine.
logged = export PPCTL_SOAK_LOG=$$PWD/$$log-faults.log; \
  { $(PY) -m pytest $(1) 2>&1; echo $$? >$$log.code; } | sed -u "s|$$PWD/||g; s|\"/[^\"]*/lib/python|\"lib/python|g" | tee -a $$log.log; code=$$(cat $$log.code); rm $$log.code; exit $$code

train: .venv/ready-core      ## train the quickstart: 2 ranks x 2 chunks on real text, about 4 minutes
	$(PY) -m ppctl train +recipe=quickstart

test: .venv/ready-test       ## every test file, two at a time (JOBS=1: one); large grids as a seeded sample
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not whole and not soak and not gpu and not slurm"

test-slurm: .venv/ready-test ## runs behind a real SLURM on this machine; skipped with a reason where it cannot start
	$(PY) -m pytest -m "slurm" -rs -n 4 --dist loadfile --durations 10 tests/slurm

# Three at a time, because tests of restarts mostly wait; so the others may take longer.
test-all: .venv/ready-test   ## what takes long, more of each grid, and SLURM: at most an hour on two quiet cores; dated logs under benchmarks/
	log=benchmarks/test-all-$$(date +%F); $(call logged,-n 3 --timeout 300 --dist loadfile --no-loadscope-reorder \
	  -m "not soak and not gpu" --durations 30)

soak: .venv/ready-test       ## faults and full grids: make soak SHARD=1/4, at most an hour a call; again until it is finished
	@test -n "$(SHARD)" || { echo "say which part: make soak SHARD=1/4"; exit 2; }
	log=benchmarks/soak-$$(date +%F)-$(subst /,-of-,$(SHARD)); $(call logged,-m "soak" --shard $(SHARD) -vv)

test-peers: .venv/ready-test ## Megatron's own unit tests from a checkout, with ppctl in place of its functions: make test-peers MEGATRON=DIR
	@test -d "$(MEGATRON)/tests/unit_tests" || { echo "say where Megatron-LM is checked out: make test-peers MEGATRON=DIR"; exit 2; }
	@$(PIP) --quiet pytest-mock einops
	log=benchmarks/megatron-unit-tests-$$(date +%F).log; $(PY) tests/peers/run_megatron.py $(MEGATRON) >$$log; code=$$?; cat $$log; exit $$code

test-jobset: .venv/ready-test ## Kubernetes' objects against the CRD of a checkout of JobSet, with its CEL rules: make test-jobset JOBSET=DIR
	@test -d "$(JOBSET)/config/components/crd" || { echo "say where JobSet is checked out: make test-jobset JOBSET=DIR"; exit 2; }
	@$(PIP) --quiet cel-python
	PPCTL_JOBSET=$(JOBSET) $(PY) -m pytest -k crd tests/unit/launch/test_kubernetes_objects.py

# Without network: make test-gpu WHEELS=DIR PYTHON=python3, with packages from `tests/gpu/first_run.sh wheels DIR` and PYTHON's own torch.
test-gpu: $(if $(WHEELS),,.venv/ready-test) ## what needs a CUDA device: kernels, ranks that share it, the tests. WHEELS=DIR: no network
	log=runs/test-gpu; tests/gpu/first_run.sh part kernels ranks newer rest two --out $$log --page $$log.md \
	  $(if $(WHEELS),--wheels $(WHEELS) --python $(PYTHON),--python $(PY)); code=$$?; \
	  cat $$log/*.log; exit $$code

docs: .venv/ready-docs       ## the site, build/site/index.html: guides, keys, errors, names, decisions; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(PY) -m mkdocs build --strict
	@echo "open build/site/index.html, or with a search: $(PY) -m http.server --directory build/site"

check: .venv/ready-dev       ## format, lint, types, import contracts
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	.venv/bin/lint-imports

fix: .venv/ready-dev         ## let ruff format and mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: .venv/ready-core      ## the engine against its peers, the launcher against bare processes
	$(PY) benchmarks/startup.py
	$(PY) benchmarks/engine.py

bench-plan: .venv/ready-core ## plans against recorded memory, published throughput and bubbles, Hydra's speed, this CPU, and rehearsals: about 15 minutes
	$(PY) benchmarks/plan_accuracy.py
	$(PY) benchmarks/calibrate.py
	$(PY) benchmarks/plan_speed.py
	$(PY) benchmarks/plan_on_cpu.py
	$(PY) benchmarks/rehearsal.py

bench-ckpt: .venv/ready-core ## saves and loads beside torch's distributed checkpoints, a bare copy and dd, on this disk; at most four minutes
	$(PY) benchmarks/checkpoint.py

golden: .venv/ready-test     ## write the frozen outputs anew; read the diff before you commit it
	PPCTL_GOLDEN=write $(PY) -m pytest -m "not whole and not soak and not gpu" tests/golden tests/unit tests/torch/test_frozen_run.py tests/dist/cli/test_doctor.py tests/dist/cli/test_rehearse_command.py

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "ppctl needs Python 3.11 or newer; say which: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "$(PYTHON) could not make .venv; if its venv module is missing (Debian): apt install python3-venv"; exit 2; }

# An interrupted setup may have left a .venv without pip. Fetching torch takes minutes: on a terminal pip shows how far.
.venv/ready-core: .venv/bin/python $(PACKAGING)
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip --upgrade >/dev/null 2>&1 || \
	  { echo ".venv is broken: its Python has no pip. To set it up anew: make clean $(MAKECMDGOALS)"; exit 2; }
	@quiet=--quiet; $(PY) -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' || { \
	  echo "Setting up .venv. pip will fetch torch and about 20 small packages: about 250 MB with torch's CPU build,"; \
	  echo "about 3 GB with its CUDA build (pip's default on Linux; docs/install.md says how to take the other)."; \
	  if [ -t 1 ]; then quiet=; fi; }; \
	  $(PIP) --quiet setuptools wheel && $(PIP) $$quiet --no-build-isolation -e .
	@touch $@

.venv/ready-test: .venv/ready-core
	@echo "Fetching what the tests need (pytest, hypothesis, transformers, megatron-core, tensorboard, wandb): about 95 MB."
	@$(PIP) --quiet --no-build-isolation -e ".[test]"
	@touch $@

.venv/ready-dev: .venv/ready-core
	@echo "Fetching what the checks need (ruff, mypy, import-linter): about 40 MB."
	@$(PIP) --quiet --no-build-isolation -e ".[dev]"
	@touch $@

.venv/ready-docs: .venv/ready-core
	@echo "Fetching what the site needs (mkdocs-material, mkdocstrings): about 20 MB."
	@$(PIP) --quiet --no-build-isolation -e ".[docs]"
	@touch $@
