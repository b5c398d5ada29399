# Everything a developer types. `make help` lists it; CONTRIBUTING.md says more.
#
# SYSTEM=1 builds and tests with the Python that is there (PYTHON=python3): no virtual environment, nothing downloaded. That is how a GPU machine without network runs it.

PYTHON ?= python3
SYSTEM ?=
# Processes for compiling. Each takes up to 1 GiB.
JOBS ?= $(shell nproc)
# ON compiles the library's sources in batches, which takes half the time. OFF: one by one, so that a change to one compiles that one alone.
UNITY ?= ON
# What pip installs where the virtual environment has no torch, and the index to look in, if pip's own settings don't lead to torch's CPU builds.
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?=
PYTEST_ARGS ?=
# Processes for the Python tests that may run side by side. Each takes up to 2 GiB. One more than the processors of the smallest machine: many tests wait for programs that they start.
PYTEST_JOBS ?= 3
CTEST_ARGS ?=
# The Python tests for a driver by HIP's names: which rules it has, refusals, and torch_memory_saver's and vLLM's callers.
HIP_TESTS = tests/conformance $(addprefix tests/python/,test_hip.py test_tms_module.py test_vllm_allocator.py)
# Mutants: how many are drawn by which seed, and further arguments, such as "--at csrc/core/operation/swapped_memory.cpp:8".
SAMPLE ?= 60
SEED ?= 1
MUTANTS_ARGS ?=
# Such as --rows 2.15.0, --list, --again or --python /path/to/python3.14.
MATRIX_ARGS ?=
# Such as --pythons 3.12.
WHEELS_ARGS ?=
# python -m tests.walk --help lists them.
WALK_ARGS ?= --steps 100000 --seed 1
# Such as --workloads first_pause,swap, or --small on a machine without a GPU.
BENCH_ARGS ?=

include tools/build.mk

.DEFAULT_GOAL := help
.PHONY: FORCE help demo test test-cpp test-hip test-hip-quirks test-python tools-test programs sweep walk gpu-test matrix lint docs bench tidy format ptx code-objects asan tsan mutants wheels clean

help: ## List these targets
	@echo "Usage: make TARGET [SYSTEM=1] [PYTHON=python3] [JOBS=n]"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{ printf "  %-12s %s\n", $$1, $$2 }'
	@echo "SYSTEM=1 uses the Python, torch and build tools that are installed, and downloads nothing."

demo: $(INSTALLED) ## A model trains and its copy generates, in turns on one device (the main job)
	@$(RUN) $(PY) -m ebbtide.cli demo

test: test-cpp test-hip test-hip-quirks test-python ## C++ and Python tests on the simulated device

test-cpp: $(INSTALLED) ## C++ tests only
	$(RUN_CTEST)

test-hip: export EBBTIDE_SIM_HIP = 1
test-hip: CTEST_ARGS = -E "Faults[.]"
test-hip: $(INSTALLED) ## C++ tests but sweeps, and some in Python, with the simulated device called by HIP's names
	$(RUN_CTEST)
	@$(RUN) tools/run_pytest.sh $(PY) $(PYTEST_JOBS) $(HIP_TESTS)

test-hip-quirks: export EBBTIDE_SIM_HIP = 1
test-hip-quirks: export EBBTIDE_SIM_QUIRKS = all
test-hip-quirks: CTEST_ARGS = -R "Faults[.]|HipWays[.]" -E Overflow
test-hip-quirks: $(INSTALLED) ## Sweeps of failing calls, where the simulated device does what drivers of AMD GPUs were seen to do
	$(RUN_CTEST)

test-python: $(INSTALLED) ## Python tests only
	@$(RUN) tools/run_pytest.sh $(PY) $(PYTEST_JOBS) $(PYTEST_ARGS)

sweep: export EBBTIDE_SWEEP = all
sweep: $(INSTALLED) ## Before a release: fault injection at every driver call, not at a sample of them, by CUDA's and HIP's names
	@$(CTEST) --test-dir $(BUILD_DIR) --output-on-failure --no-tests=error --parallel $(JOBS) -R "Invariant" $(CTEST_ARGS)
	@EBBTIDE_SIM_HIP=1 $(CTEST) --test-dir $(BUILD_DIR) --output-on-failure --no-tests=error --parallel $(JOBS) -R "Faults[.]" $(CTEST_ARGS)

walk: $(INSTALLED) ## Long random walks over the core and ebbtide.saver against models
	@EBBTIDE_SWEEP=all $(CTEST) --test-dir $(BUILD_DIR) --output-on-failure --no-tests=error --parallel $(JOBS) -R "Walk"
	@$(RUN) env EBBTIDE_WALK=1000 $(PY) -m pytest -q tests/python/test_core_walk.py
	@$(RUN) $(PY) -m tests.walk $(WALK_ARGS)

gpu-test: PYTEST_JOBS = 12
gpu-test: $(INSTALLED) ## The same tests on a GPU, with torch for ROCm those of test-hip; an unexpected skip is a failure
	@driver=$$($(RUN) $(PY) -c "import torch; print('hip' if torch.version.hip else 'cuda')"); \
	$(RUN) env EBBTIDE_TEST_DRIVER=$$driver EBBTIDE_NO_SKIPS=1 tools/run_pytest.sh $(PY) $(PYTEST_JOBS) \
	  $$([ $$driver = cuda ] || echo "$(HIP_TESTS)") $(PYTEST_ARGS)

tools-test: $(INSTALLED) ## By hand: the benchmark, the mutation tests, the version matrix and the walk find what they should
	@$(RUN) tools/run_pytest.sh $(PY) $(PYTEST_JOBS) tests/tooling $(PYTEST_ARGS)
	@$(RUN) $(PY) -m tests.walk.planted

programs: $(PROGRAMS) ## Download the programs whose own sources the Python tests run on ebbtide

matrix: ## By hand: every supported torch and Python, one environment after the other; writes docs/support.md
	@tools/matrix.py $(MATRIX_ARGS)

bench: $(INSTALLED) ## Measure ebbtide, the baselines and the machine: a table, and JSON in benchmarks/results/
	@$(RUN) $(PY) -m benchmarks run --out benchmarks/results $(BENCH_ARGS)

lint: $(LINTERS) tidy ## Formatting, naming, style and types; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	$(BIN)/mypy
	$(BIN)/mypy tests/typing/user_program.py

format: $(LINTERS) ## Rewrite sources in the project's format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

docs: $(DOC_TOOLS) ## The documentation site, in build/docs; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

tidy: $(LINTERS) $(BUILD_TOOLS) ## clang-tidy over the C++ sources
	@$(CMAKE_CONFIGURE) -S . -B build/tidy -DEBBTIDE_OFFLINE=ON -DCMAKE_UNITY_BUILD=ON >/dev/null
	tools/tidy.sh $(BIN)/clang-tidy build/tidy

ptx: $(PTX_TOOLS) ## Compile the GPU kernels anew (csrc/kernels/blocks.ptx)
	@$(BIN)/python tools/make_ptx.py

code-objects: $(CODE_OBJECT_TOOLS) ## Compile them for AMD's GPUs (csrc/kernels/code_objects.s)
	@$(BIN)/python tools/make_code_objects.py

asan: $(BUILD_TOOLS) ## C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(CMAKE_CONFIGURE) --preset asan
	@$(CMAKE_BUILD) --preset asan --parallel $(JOBS)
	@$(CTEST) --preset asan --parallel $(JOBS) $(CTEST_ARGS)

tsan: $(BUILD_TOOLS) ## C++ tests under ThreadSanitizer
	@$(CMAKE_CONFIGURE) --preset tsan
	@$(CMAKE_BUILD) --preset tsan --parallel $(JOBS)
	@$(CTEST) --preset tsan --parallel $(JOBS) $(CTEST_ARGS)

mutants: $(INSTALLED) ## Break csrc in SAMPLE=60 places drawn by SEED=1, and tell what no test notices
	@$(RUN) $(PY) -m tools.mutants --sample $(SAMPLE) --seed $(SEED) --jobs $(JOBS) $(if $(EBBTIDE_GTEST_DIR),--cmake=-DEBBTIDE_GTEST_DIR=$(abspath $(EBBTIDE_GTEST_DIR))) $(MUTANTS_ARGS)

wheels: ## A manylinux wheel for each Python from 3.10 to 3.13 and the sdist, in dist/, each tried apart
	@$(PYTHON) tools/wheels.py --torch "$(TORCH)" --torch-index "$(TORCH_INDEX)" $(WHEELS_ARGS)

clean: ## Remove what was built; the virtual environment stays
	rm -rf build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -f .venv/.ebbtide-installed
