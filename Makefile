# Everything that needs installing is installed by the targets themselves, into .venv.
# PYTHON names the interpreter that makes .venv; HOST, PORT and MODEL go to `make serve`.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= smollm2-135m
BIN := .venv/bin
TRITON36 := .venv-triton36

.DEFAULT_GOAL := help

help:
	@echo "make serve      install, fetch the default model, serve it on $(HOST):$(PORT)"
	@echo "make test       install, run the whole test suite"
	@echo "make kernels-check  the Triton kernels without a GPU: interpreted, compiled, bugs planted"
	@echo "make check      formatting, lint, types (strict), import layers"
	@echo "make beams      beams of the default model against transformers, the whole matrix; takes long"
	@echo "make coverage   branch coverage of the pure-Python core, at least 98 %"
	@echo "make mutation   mutants of that core that no test kills; takes long"
	@echo "make bench      the bookkeeping benchmark; TRACE=conversation_trace.jsonl"
	@echo "make clean      remove .venv and what tools leave behind"

# The stamp comes last. An install that was interrupted left .venv/installing: it starts anew.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "prefixkv needs Python 3.11 or newer: make PYTHON=...")'
	@test ! -e .venv/installing || rm -rf .venv
	@mkdir -p .venv && touch .venv/installing
	@echo "installing into .venv, once; this takes a few minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@mv .venv/installing $@

install: .venv/installed

serve: install
	$(BIN)/prefixkv pull $(MODEL)
	$(BIN)/prefixkv serve $(MODEL) --host $(HOST) --port $(PORT)

# Each file goes to one of two processes of one thread each: the tests share little, tiny tensors
# gain nothing from threads, and OpenMP loses much where cores are taken.
TWO := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

test: install $(TRITON36)/installed
	$(TWO) --dist loadfile --no-loadscope-reorder --ignore=tests/kernels/triton
	@$(MAKE) --no-print-directory kernels-apart

# What of the kernels' tests needs processes of its own: Triton reads TRITON_INTERPRET when it is
# first imported, which transformers does; bugs are planted before that; and another compiler.
kernels-apart: install $(TRITON36)/installed
	TRITON_INTERPRET=1 $(TWO) tests/kernels/triton
	OMP_NUM_THREADS=1 $(BIN)/python -P tests/proof/planting.py --only triton:
	OMP_NUM_THREADS=1 $(TRITON36)/bin/python -P -m pytest -n 2 tests/kernels/test_compiled_kernels.py -k 'not sm_80 and not sm_100'

kernels-check: kernels-apart
	$(TWO) tests/kernels/test_triton_plan.py tests/kernels/test_compiled_kernels.py
	$(BIN)/python -P tests/doubles/compiled_kernels.py
	$(TRITON36)/bin/python -P tests/doubles/compiled_kernels.py

# What triton 3.6.0 makes of the same kernels, in a second venv that holds nothing else: the rest is
# seen through to .venv. The stamp comes last, and an interrupted install starts anew, as above.
$(TRITON36)/installed: .venv/installed
	rm -rf $(TRITON36)
	$(PYTHON) -m venv $(TRITON36)
	$(TRITON36)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'triton==3.6.0' \
		|| { echo "triton 3.6.0 could not be installed into $(TRITON36): part of the kernels' tests needs it" >&2; exit 1; }
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$($(TRITON36)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/see_venv.pth
	@touch $@

beams: install
	PREFIXKV_BEAMS=all $(BIN)/pytest tests/engine/test_default_beams.py

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

coverage: install
	$(BIN)/pytest tests/core --cov --cov-report=
	$(BIN)/coverage report --include='prefixkv/block.py,prefixkv/config.py,prefixkv/errors.py,prefixkv/eviction.py,prefixkv/hashing.py,prefixkv/identity.py,prefixkv/invariants.py,prefixkv/pool.py,prefixkv/prefix_cache.py,prefixkv/request.py,prefixkv/scheduler.py,prefixkv/sequence.py' --show-missing --fail-under=98

# A copy is mutated. Its folder has to exist before Python starts, or Python remembers that it does
# not, and tests the editable install. Look at a mutant: cd build/mutation, mutmut show NAME.
MUTMUT = cd build/mutation && HYPOTHESIS_PROFILE=quick \
	PYTHONPATH='$(CURDIR)/build/mutation/mutants' '$(CURDIR)/$(BIN)/mutmut'

mutation: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutation]'
	rm -rf build/mutation
	mkdir -p build/mutation/prefixkv build/mutation/tests build/mutation/mutants
	cp pyproject.toml build/mutation
	cp prefixkv/*.py build/mutation/prefixkv
	cp -R tests/conftest.py tests/core tests/doubles build/mutation/tests
	$(MUTMUT) run
	@$(MUTMUT) results
	@$(MUTMUT) results --all true | awk -F '[.:]' '{ n[$$2 $$NF]++ } END { for (i in n) print i, n[i] }' | sort

bench: install
	$(BIN)/python -P benchmarks/bookkeeping.py $(TRACE)

clean:
	rm -rf .venv $(TRITON36) build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

include clients.mk

.PHONY: help install serve test beams kernels-apart kernels-check check coverage mutation bench clean
