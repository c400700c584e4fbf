PYTHON ?= python3
BIN    ?= .venv/bin
DEMO   := $(dir $(BIN)).demo
READY  := $(dir $(BIN)).installed

.PHONY: help demo test test-fresh test-oldest sweep coverage rounding mutants works docs readme experiments bench-distributed bench-microbatch bench-wholebatch bench-cost bench-drift bench-checkpointing bench-memory bench-proof what-fits bench-gpu proved size clean

help: ## One line for each command
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

$(DEMO): settings.ini setup.py pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(READY): $(DEMO)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(DEMO) ## Train on digits: the large batch, MicroBatch, AccumulateStep, and fastai's callback
	@$(BIN)/python benchmarks/demo.py

test: $(READY) ## Every notebook and every test (with SWEEP=1, the sweeps of the night too)
	OMP_NUM_THREADS=1 $(BIN)/nbdev-test --n-workers 2
	FAKEGPU=1 OMP_NUM_THREADS=1 $(BIN)/nbdev-test nbs/memory/offload.ipynb
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

rounding: $(READY) ## Every notebook, as on a processor that rounds otherwise, with tolerances a hundred times smaller
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/rounding.py

mutants: $(READY) ## Which of some small mistakes in the package the tests find (some hours)
	$(BIN)/python benchmarks/mutants.py --save

test-fresh: $(READY) ## The wheel and its first example, in fresh environments of Python 3.11 to 3.13 (downloads 6 GB for each)
	FRESH=1 $(BIN)/python -m pytest -v tests/test_packaging.py -k fresh

OLDEST := .venv-oldest/bin/python

test-oldest: ## Every test with the oldest fastai and PyTorch that we support, in an environment of its own (downloads 5 GB); no notebooks, since nbdev needs a newer fastcore
	test -x $(OLDEST) || $(PYTHON) -m venv .venv-oldest
	$(OLDEST) -m pip install --quiet --disable-pip-version-check -c .github/oldest.txt -e . pytest pytest-xdist hypothesis accelerate build twine 'setuptools>=77'
	OMP_NUM_THREADS=1 $(OLDEST) -m pytest -n 2 --dist loadfile

sweep: $(READY) ## All endings, and all of whatever `make test` draws a sample of (at night)
	SWEEP=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

coverage: $(READY) ## The lines of the package that no test runs, other processes included (at night)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-config=.ci/coverage.ini --cov-report=term-missing:skip-covered

works: $(READY) ## Measure what the pages "What is exact and what is not" and "What we tested" show, with the optional packages
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,integrations]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m row --works-with tests/works_with.json
	for f in works_with tested; do $(BIN)/nbdev-test --save nbs/$$f.ipynb || exit; done
	$(BIN)/nbdev-clean

docs: $(READY) ## The site, in _docs
	$(BIN)/python .ci/docs.py site

readme: $(READY) ## README.md, from nbs/index.ipynb
	$(BIN)/python .ci/docs.py readme

bench-distributed: $(READY) ## What two processes send, and how long it takes them over a slow link
	$(BIN)/python benchmarks/distributed.py

bench-microbatch: $(READY) ## What cutting a batch costs in time and saves in memory
	$(BIN)/python benchmarks/microbatch.py

bench-wholebatch: $(READY) ## What the ways to keep the whole batch cost in time
	$(BIN)/python benchmarks/wholebatch.py

bench-cost: $(READY) ## What the package adds to a loop by hand, and what fewer steps save (fifteen minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/cost.py --save
	$(BIN)/nbdev-test --save nbs/index.ipynb
	$(BIN)/nbdev-clean

bench-drift: $(READY) ## How far half precision takes exact slices from the large batch, in 50 steps
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/drift.py --save
	$(BIN)/nbdev-test --save nbs/works_with.ipynb
	$(BIN)/nbdev-clean

bench-checkpointing: $(READY) ## What recomputing blocks costs in time, for common architectures
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,integrations]'
	$(BIN)/python benchmarks/checkpointing.py

bench-memory: $(READY) ## What each way takes in memory, and how exact it is, on an accelerator or on the simulated one (an hour)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,integrations]'
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/memory.py --save
	for f in tested index howto/out_of_memory memory/checkpointing memory/offload; do $(BIN)/nbdev-test --save nbs/$$f.ipynb || exit; done
	$(BIN)/nbdev-clean

bench-proof: $(READY) ## What the proof before the first step costs (five minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,integrations]'
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/proof.py --save
	$(BIN)/nbdev-test --save nbs/tutorials/how_it_is_proved.ipynb
	$(BIN)/nbdev-clean

what-fits: $(READY) ## What `learn.what_fits()` says for six learners, with each line pasted and run (ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/what_fits.py --save
	$(BIN)/nbdev-test --save nbs/howto/out_of_memory.ipynb
	$(BIN)/nbdev-clean

bench-gpu: $(READY) ## On a machine with a GPU: the tests that wait for one, and what each way takes there (a quarter of an hour)
	$(BIN)/python benchmarks/gpu.py

proved: $(READY) ## What the page "What is proved, what is refused" shows, with the optional packages (an hour)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,integrations]'
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/proved.py --save
	$(BIN)/nbdev-test --save nbs/know/proved.ipynb
	$(BIN)/nbdev-clean

experiments: $(READY) ## What the first users of accumulation tried, and other libraries (downloads MNIST and CIFAR, an hour and a half)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,integrations,bench]'
	$(BIN)/python benchmarks/errors.py
	$(BIN)/python benchmarks/mnist.py
	$(BIN)/python benchmarks/cifar.py
	$(BIN)/python benchmarks/others.py

size: $(READY) ## How large the code is, and how many calls a window takes
	@$(BIN)/python -W ignore benchmarks/size.py

clean: ## Remove what the other commands made
	rm -rf .venv .coverage _proc _docs build dist *.egg-info .pytest_cache .hypothesis tests/.mutants.json
