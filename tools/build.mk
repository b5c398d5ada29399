# How `make` installs ebbtide: into the virtual environment .venv, or with SYSTEM=1 into build/site for the installed
# Python. Stamp files make the second run quick.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

SOURCES := $(shell find csrc cmake python tests/cpp tests/conformance tests/c -type f -not -name '*.pyc' 2>/dev/null) CMakeLists.txt pyproject.toml
CPP_FILES := $(shell find csrc tests examples benchmarks -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.c' -o -name '*.cu' \) 2>/dev/null)
say = @echo '== $(1)' >&2

BIN := .venv/bin
LINTERS := .venv/.lint-tools
PTX_TOOLS := .venv/.ptx-tools
CODE_OBJECT_TOOLS := .venv/.code-object-tools
DOC_TOOLS := .venv/.doc-tools
PROGRAMS := build/programs/.downloaded

ifeq ($(SYSTEM),)
  PY := $(BIN)/python
  RUN :=
  BUILD_DIR := build/venv
  BUILD_TOOLS := .venv/.tools
  INSTALLED := .venv/.ebbtide-installed
  TOOL_PATH := $(abspath $(BIN)):$(PATH)
  TESTS_OPTION := ON
  RUN_CTEST = @$(CTEST) --test-dir $(BUILD_DIR) --output-on-failure --no-tests=error --parallel $(JOBS) $(CTEST_ARGS)
else
  PY := $(PYTHON)
  RUN := env PYTHONPATH=$(abspath build/site)$(if $(PYTHONPATH),:$(PYTHONPATH)) PATH="$(abspath build/site/bin):$$PATH"
  BUILD_DIR := build/system
  BUILD_TOOLS := build/.system-tools
  INSTALLED := build/site/.ebbtide-installed
  TOOL_PATH := $(dir $(shell command -v $(PYTHON))):$(PATH)
  # GoogleTest is the one build tool that such a machine may lack: then the C++ tests are left out, and said to be.
  GTEST_FOUND := $(firstword $(wildcard $(addsuffix /CMakeLists.txt,$(EBBTIDE_GTEST_DIR) /usr/src/googletest)) $(wildcard /usr/lib/*/cmake/GTest/GTestConfig.cmake /usr/local/lib/cmake/GTest/GTestConfig.cmake))
  TESTS_OPTION := $(if $(GTEST_FOUND),ON,OFF)
  RUN_CTEST = $(if $(GTEST_FOUND),@$(CTEST) --test-dir $(BUILD_DIR) --output-on-failure --no-tests=error --parallel $(JOBS) $(CTEST_ARGS),\
    @echo "C++ tests left out: GoogleTest is not installed here. Give its sources with EBBTIDE_GTEST_DIR=<folder>.")
endif

CMAKE_CONFIGURE = PATH="$(TOOL_PATH)" cmake $(if $(EBBTIDE_GTEST_DIR),-DEBBTIDE_GTEST_DIR=$(abspath $(EBBTIDE_GTEST_DIR))) $(if $(SYSTEM),-DEBBTIDE_OFFLINE=ON) -DPython_EXECUTABLE="$(shell command -v $(PY) || echo $(abspath $(PY)))"
CMAKE_BUILD = PATH="$(TOOL_PATH)" cmake --build
CTEST = PATH="$(TOOL_PATH)" ctest
# One build tree serves the package and the C++ tests: pip drives CMake, and ctest runs what it left there.
PIP_BUILD = PATH="$(TOOL_PATH)" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PY) -m pip install --quiet --no-build-isolation --no-deps --no-index \
  --config-settings=build-dir=$(BUILD_DIR) --config-settings=cmake.define.EBBTIDE_TESTS=$(TESTS_OPTION) \
  --config-settings=cmake.define.CMAKE_UNITY_BUILD=$(UNITY) \
  $(if $(EBBTIDE_GTEST_DIR),--config-settings=cmake.define.EBBTIDE_GTEST_DIR=$(abspath $(EBBTIDE_GTEST_DIR))) \
  $(if $(SYSTEM),--config-settings=cmake.define.EBBTIDE_OFFLINE=ON)

# --- the virtual environment ---

.venv/.created:
	$(call say,Making the virtual environment .venv with $(PYTHON))
	@tools/check_prerequisites.sh "$(PYTHON)"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.tools: .venv/.created requirements/build.txt requirements/test.txt
	$(call say,Installing the build and test tools into .venv)
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements/build.txt -r requirements/test.txt
	@touch $@

.venv/.torch: .venv/.tools
	@tools/install_torch.sh "$(PY)" "$(TORCH)" "$(TORCH_INDEX)"
	@touch $@

.venv/.ebbtide-installed: .venv/.torch $(SOURCES)
	$(call say,Building and installing ebbtide (a few minutes the first time))
	@$(PIP_BUILD) .
	@touch $@

# Their sources alone are read, so any Python's wheel will do.
$(PROGRAMS): .venv/.created requirements/programs.txt
	$(call say,Downloading programs whose sources the tests run)
	@mkdir -p $(@D) && rm -f $(@D)/*.whl
	@.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	  --implementation cp --python-version 3.11 --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 \
	  --dest $(@D) -r requirements/programs.txt
	@touch $@

.venv/.lint-tools: .venv/.created requirements/lint.txt
	$(call say,Installing the formatters and checkers into .venv)
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/lint.txt
	@touch $@

.venv/.doc-tools: .venv/.created requirements/docs.txt
	$(call say,Installing the documentation tools into .venv)
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	@touch $@

.venv/.ptx-tools: .venv/.created requirements/ptx.txt
	$(call say,Installing the compiler of the kernels into .venv)
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/ptx.txt
	@touch $@

.venv/.code-object-tools: .venv/.created requirements/code_objects.txt
	$(call say,Installing the compiler of the kernels for AMD into .venv)
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/code_objects.txt
	@touch $@

# --- SYSTEM=1 ---

# Another Python, or GoogleTest come or gone: build anew.
SYSTEM_CHOICES := $(shell command -v $(PYTHON)) tests=$(TESTS_OPTION) $(EBBTIDE_GTEST_DIR)
build/.system-choices: FORCE
	@mkdir -p build
	@if [[ "$$(cat $@ 2>/dev/null)" != "$(SYSTEM_CHOICES)" ]]; then rm -rf build/system; echo "$(SYSTEM_CHOICES)" >$@; fi

build/.system-tools: build/.system-choices
	@PATH="$(TOOL_PATH)" tools/check_prerequisites.sh --system "$(PYTHON)"
	@touch $@

build/site/.ebbtide-installed: build/.system-tools $(SOURCES)
	$(call say,Building ebbtide into build/site with $(PYTHON); nothing is downloaded)
	@rm -rf build/site
	@$(PIP_BUILD) --target build/site .
	@touch $@
