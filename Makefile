# make demo   set up, build an engine from SmolLM2-135M, and read hidden states for the sample prompts
# make test   set up, and run the tests that need no GPU (make test-slow, make test-gpu: the others)
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo test test-slow test-gpu clean

demo: .venv/core
	$(BIN)/python -m demo

test: .venv/test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu"

test-slow: .venv/test
	$(BIN)/python -m pytest -m "slow and not gpu"

test-gpu:
	python3 -m pytest -m gpu

.venv/core: pyproject.toml setup.py $(wildcard cpp/*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable .
	$(BIN)/pip install --quiet --no-deps $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["demo"])')
	touch $@

.venv/test: .venv/core
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf .venv build demo/out
