#!/usr/bin/env bash
# clang-tidy over our own C++ sources, as many at a time as there are processors. Usage: tidy.sh CLANG_TIDY BUILD_DIR
#
# BUILD_DIR holds compile_commands.json. csrc/torch/cpu and csrc/torch/lms are left out: they are compiled where torch
# is, by no CMake.
set -euo pipefail
tidy=$1
build=$2
find csrc -name '*.cpp' -not -path 'csrc/torch/*/*' -print0 | xargs -0 -n 1 -P "$(nproc)" "$tidy" --quiet -p "$build" 2>&1 |
  { grep -v ' warnings\? generated\.$\|^Suppressed \|^Use -header-filter' || true; }
