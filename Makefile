# The one door to everything here: make help.
PYTHON ?= python3.13
VENV := .venv
BIN := $(VENV)/bin
SAM_VENV := .venv-sam
CHECKOV_VENV := .venv-checkov
GUARD := .cfn-guard
# sam build wants exactly python3.13 on PATH: the environment of the SAM CLI has it.
WITH_SAM := PATH="$(CURDIR)/$(SAM_VENV)/bin:$$PATH"
export SAM_CLI_TELEMETRY := 0
# Where it keeps notes of its own: here, and not in the home of whoever runs it.
export __SAM_CLI_APP_DIR := $(CURDIR)/.aws-sam/sam

# What static checks read. Each folder joins by existing.
PACKAGE := layers/charging/python
CODE := $(wildcard $(PACKAGE) functions local tests bench)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run demo events ops sam-local sam-invoke test check bench format format-check lint types imports template \
	schema schema-check openapi reliability scaling lock build sizes clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- the service on this machine ----------------------------------------------------------------------------------

run: $(VENV)/installed $(SAM_VENV)/installed ## Start the whole stack on loopback (PORT=0: a free port; LOCAL_DIR=, PARAMETERS=)
	@exec env $(WITH_SAM) $(BIN)/python -m local run

demo: $(VENV)/installed $(SAM_VENV)/installed ## Show both guarantees, with real faults, as a story
	@exec env $(WITH_SAM) $(BIN)/python -m local demo

sam-local: $(VENV)/installed $(SAM_VENV)/installed ## Serve the API from Lambda containers, needs Docker (PORT=3000, LOCAL_DIR=)
	@exec $(BIN)/python -m local sam_local

sam-invoke: $(VENV)/installed $(SAM_VENV)/installed ## Invoke a function in a container, beside sam-local (EVENT=events/...)
	@exec $(BIN)/python -m local sam_invoke '$(EVENT)'

events: $(VENV)/installed ## Print the events that arrive in the running stack's queue
	@exec $(BIN)/python -m local events

ops: $(VENV)/installed ## Look at, redrive and park the running stack's events (ARGS='redrive --type ChargeCreated --since 1h')
	@exec $(BIN)/python -m local ops $(ARGS)

# ---- tests and checks ---------------------------------------------------------------------------------------------

TESTS := tests
test: $(VENV)/installed $(SAM_VENV)/installed $(GUARD)/installed ## Run the whole test suite (or a part: TESTS=tests/unit)
	$(WITH_SAM) $(BIN)/python -m pytest --numprocesses auto --dist loadgroup $(TESTS)

check: format-check lint types imports template schema-check test ## Run every check there is, and the tests

format: $(VENV)/installed ## Format the code
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix --show-fixes $(CODE)

format-check: $(VENV)/installed
	$(BIN)/ruff format --check $(CODE)

lint: $(VENV)/installed ## Lint the code
	$(BIN)/ruff check $(CODE)

types: $(VENV)/installed ## Check the types, strictly
	$(BIN)/mypy $(CODE)

imports: $(VENV)/installed ## Check that imports go one way
	$(BIN)/lint-imports

# Wherever RDS's certificates are known, since types of resources and their values differ from region to region.
REGIONS := $(filter-out proxy,$(basename $(notdir $(wildcard $(PACKAGE)/charging/certificates/*.pem))))
template: $(VENV)/installed $(SAM_VENV)/installed $(CHECKOV_VENV)/installed $(GUARD)/installed ## Check template.yaml
	$(BIN)/cfn-lint template.yaml --regions $(REGIONS)
	$(WITH_SAM) sam validate --lint
	$(CHECKOV_VENV)/bin/checkov --config-file checkov.yaml
	$(BIN)/python -m local cfn_guard

# ---- benchmarks ---------------------------------------------------------------------------------------------------

bench: $(VENV)/installed $(SAM_VENV)/installed ## Measure, some 20 minutes (or a part: BENCH=charge; a taste: BENCH=--quick)
	@exec env $(WITH_SAM) $(BIN)/python -m bench $(BENCH)

# ---- generated files ----------------------------------------------------------------------------------------------

schema: $(VENV)/installed ## Regenerate schema/current.sql from the migrations
	$(BIN)/python -m local schema --write

openapi: $(VENV)/installed ## Regenerate docs/openapi.json, and the paths in template.yaml
	$(BIN)/python -m local openapi

scaling: $(VENV)/installed ## Regenerate the tables in docs/scaling.md and docs/deploy.md from the model
	WRITE_SCALING=1 $(BIN)/python -m pytest --quiet tests/unit/test_sizing.py

reliability: $(VENV)/installed ## Regenerate the tables in docs/reliability.md by breaking charges, refunds, relays and dispatchers (fifteen minutes)
	WRITE_RELIABILITY=1 $(BIN)/python -m pytest --quiet tests/integration/test_charge_crashes.py \
		tests/integration/test_relay_crashes.py tests/integration/test_webhook_crashes.py

schema-check: $(VENV)/installed
	$(BIN)/python -m local schema

COMPILE = $(BIN)/uv pip compile --quiet --universal --python $(BIN)/python --generate-hashes \
	--custom-compile-command 'make lock' $(UPGRADE)

# What ships is what was tested: the layer takes its releases from the development environment.
lock: $(VENV)/installed ## Regenerate the pinned requirements (UPGRADE=--upgrade raises them)
	$(COMPILE) requirements/uv.in --output-file requirements/uv.txt
	$(COMPILE) pyproject.toml requirements/dev.in --output-file requirements/dev.txt
	$(COMPILE) requirements/sam.in --output-file requirements/sam.txt
	$(COMPILE) requirements/checkov.in --output-file requirements/checkov.txt
	$(COMPILE) --no-deps requirements/guard.in --output-file requirements/guard.txt
	$(COMPILE) pyproject.toml --constraints requirements/dev.txt --output-file layers/dependencies/requirements.txt

# ---- artifacts ----------------------------------------------------------------------------------------------------

build: $(SAM_VENV)/installed ## Build what is deployed (sam build)
	$(WITH_SAM) sam build

sizes: $(VENV)/installed $(SAM_VENV)/installed ## Print what the functions and layers weigh, built for this machine
	@exec $(BIN)/python -m local sizes

# Any interpreter will do: it asks for no package. First of all, since it refuses while a stack runs in LOCAL_DIR.
clean: ## Remove the artifacts, the embedded stack's database, and caches
	@for python in $(BIN)/python '$(PYTHON)' python3; do \
		"$$python" -c '' 2>/dev/null && exec "$$python" -m local clean; \
	done; $(no_python)
	rm -rf bench/results/postgres .aws-sam .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find functions layers local tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- environments, made on first use and again when their pinned files change -------------------------------------

define no_python
echo "Python 3.13 is needed, and $(PYTHON) is not it, is missing, or has no venv module." >&2; \
echo "Install it (Debian: python3.13 and python3.13-venv; pyenv: pyenv install 3.13)," >&2; \
echo "or name it: make PYTHON=/path/to/python3.13 ..." >&2; \
exit 1
endef

# A fresh environment each time: nothing that an earlier list named is left in it. uv takes seconds where pip takes more
# than a minute; pip stands in where uv cannot reach the index that pip's own configuration names.
define environment
@$(PYTHON) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 13))' 2>/dev/null || { $(no_python); }
@echo "Installing $(1) into $(@D) ..."
@$(PYTHON) -m venv --clear $(@D)
@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements/uv.txt
@$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --require-hashes --requirement $(2) \
	|| $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $(2)
endef

$(VENV)/installed: requirements/uv.txt requirements/dev.txt
	$(call environment,the development tools,requirements/dev.txt)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(SAM_VENV)/installed: requirements/uv.txt requirements/sam.txt
	$(call environment,the SAM CLI,requirements/sam.txt)
	@touch $@

# A program for each system and the rules, in an archive in a package of which nothing else is used.
$(GUARD)/installed: requirements/guard.txt | $(VENV)/installed
	@echo "Installing cfn-guard into $(@D) ..."
	@rm -rf $(@D)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target $(@D)/plug-in \
		--requirement $<
	@tar -xzf $(@D)/plug-in/cdklabs/cdk_validator_cfnguard/_jsii/*.tgz -C $(@D) package/bin package/rules
	@rm -r $(@D)/plug-in
	@touch $@

$(CHECKOV_VENV)/installed: requirements/uv.txt requirements/checkov.txt
	$(call environment,checkov,requirements/checkov.txt)
	@touch $@
