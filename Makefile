# Every target is a few lines; the first two are all a user needs: `make run` and `make test`.
PYTHON ?= python3
JOBS ?= 2
PROMPT ?= Why is the sky blue? Answer in one sentence.
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard core/*.pyx core/*.h core/*.pxd formats/*.pyx) $(shell find backends -name '*.pyx' -o -name '*.pxi' -o -name '*.c' -o -name '*.h')
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: install run chat test external lint conformance docs bench web wheel clean

install: $(VENV)/.installed ## make .venv, build the native code in place, install the command `fastllm` into it

run: install ## answer PROMPT with the default model, which is fetched on the first run
	@$(BIN)/fastllm run --prompt "$(PROMPT)"

chat: install ## chat with the default model
	@$(BIN)/fastllm run -i

# Files are shared out whole and in their order: what a file builds once for its tests is built once, and the long ones come first.
test: $(VENV)/.installed-test build/web/.installed ## the whole suite in JOBS=2 processes; K=EXPRESSION runs a part of it, in one
	$(BIN)/python -m pytest $(if $(K),-k "$(K)",-n $(JOBS) --dist loadfile --no-loadscope-reorder)

external: $(VENV)/.installed-test ## the clients' own suites and llama.cpp's, fetched from the package index; SUITES="openai anthropic", ARGS=--bounded
	$(BIN)/python tests/external/run.py $(SUITES) $(ARGS)

lint: $(VENV)/.installed-dev ## ruff, mypy, cython-lint, clang-format; warnings are errors
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/lint

conformance: install ## every mutant, then the whole suite on cpu_avx in every variant; reports go to docs/conformance
	$(BIN)/fastllm conformance self-test
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/conformance_reports.py

docs: install ## write the generated parts of the documents
	$(BIN)/python scripts/make_docs.py

bench: install ## the default model beside the limits of this machine; `python -m benchmarks --help` for the rest
	$(BIN)/fastllm bench $(MODEL)

web: build/web/.installed ## bundle interface/web/src into interface/web/static, which is committed; needs Node 18 or newer
	node interface/web/build.mjs

wheel: ## build dist/*.whl
	$(PYTHON) -m venv build/wheel-env && build/wheel-env/bin/python -m pip --disable-pip-version-check wheel -q --no-deps -w dist .

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info
	find core backends -name '*.so' -delete

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fastllm needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)

# A missing compiler is said at once, not after a minute inside of pip. The build tools live in the environment, so that a change of
# one file is built in place.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml setup.py $(NATIVE)
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || \
		{ echo "fastllm: building needs a C compiler: install gcc or clang (Debian: apt-get install gcc)"; exit 1; }
	@echo "fastllm: building the native code; the first time takes some minutes"
	$(PIP) install -q "setuptools>=77" "Cython>=3.1" "numpy>=2.0"
	$(PIP) install -q --no-build-isolation -e .
	@touch $@

# The page's libraries. Tests do without, where there is no Node: then they say that they have not compared the bundle.
build/web/.installed: interface/web/package-lock.json
	@command -v npm >/dev/null || echo "fastllm: no npm here, so the web page is not built (Debian: apt-get install npm)"
	@! command -v npm >/dev/null || { mkdir -p build/web && cp interface/web/package.json interface/web/package-lock.json interface/web/.npmrc build/web && \
		(cd build/web && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error && touch .installed) || \
		echo "fastllm: the web page's libraries cannot be had, so its bundle is not compared"; }

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python scripts/extras.py test | $(PIP) install -q -r /dev/stdin
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python scripts/extras.py test dev | $(PIP) install -q -r /dev/stdin
	@touch $@
