# make demo: install into .venv and run the main job on the embedded model
# make test: install into .venv and run lint, type check and the CI set of tests
# The tests inside vLLM have an environment of their own, made once a machine (3.5 GB); POLYLENS_VLLM_PYTHON names another
# one, or none if it is empty: these tests are then skipped.
PYTHON ?= python3
VENV ?= .venv
TEST_WORKERS ?= 2

BIN := $(VENV)/bin
HASH := $(shell $(PYTHON) -c "import hashlib; print(hashlib.sha256(open('pyproject.toml', 'rb').read()).hexdigest()[:16])")
# Exists when what this pyproject.toml asks for is installed.
STAMP := $(VENV)/.installed-$(HASH)
# Names the checkout that the editable install points to: a venv can be shared between clones.
CHECKOUT := $(VENV)/.checkout

# Runs pytest; where the environment of vLLM cannot be made, says so at the end too.
define PYTEST
@vllm=$${POLYLENS_VLLM_PYTHON-$$(PYTHON='$(PYTHON)' tests/hosts/vllm/venv.sh || echo none)}; \
POLYLENS_VLLM_PYTHON="$${vllm#none}" $(BIN)/python -m pytest -n $(TEST_WORKERS) $(1); status=$$?; \
if [ "$$vllm" = none ]; then \
  echo "NOT RUN: the tests inside vLLM, as its environment could not be made (see the top of this output)" >&2; fi; \
exit $$status
endef

.PHONY: demo families test test-all ray lint format install clean

demo: install
	$(BIN)/polylens demo

test: lint
	$(call PYTEST,-m "not full")

# Writes docs/families.md from the tiny builds of the families.
families: install
	$(BIN)/python -m tools.families_table

test-all: lint families ray
	$(call PYTEST)

# The tests with real replicas skip without Ray.
ray: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ray]'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)
	@if [ "$$(cat '$(CHECKOUT)' 2>/dev/null)" != "$(CURDIR)" ]; then \
	  $(BIN)/python -m pip install --quiet --no-deps -e . && echo "$(CURDIR)" > '$(CHECKOUT)'; fi

$(STAMP):
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'polylens needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)')"
	$(PYTHON) -m venv '$(VENV)'
	@echo "Installing into $(VENV): torch and the like, some minutes the first time."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@echo "$(CURDIR)" > '$(CHECKOUT)'
	@rm -f '$(VENV)'/.installed-* && touch '$@'

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
