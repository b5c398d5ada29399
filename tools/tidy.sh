#!/usr/bin/env bash
# clang-tidy over our own C++ sources, as many units at a time as there are processors.
#
#   tools/tidy.sh CLANG_TIDY BUILD_DIR
#
# BUILD_DIR holds compile_commands.json of a unity build: shared headers of a unit are read once, which takes a
# quarter of the time. csrc/torch/cpu and csrc/torch/lms are left out: they are compiled where torch is, by no CMake.
set -euo pipefail
tidy=$1
build=$2
mapfile -t units < <(sed -n 's/^ *"file": "\(.*\.\(cpp\|cxx\)\)".*/\1/p' "$build/compile_commands.json" | sort -u)
covered=$({ printf '%s\n' "${units[@]}" && cat "${units[@]}"; } | sed -n "s|.*$PWD/\(csrc/[^\"]*\.cpp\).*|\1|p" | sort -u)
missing=$(find csrc -name '*.cpp' -not -path 'csrc/torch/*/*' | sort | comm -23 - <(echo "$covered"))
if [[ -n $missing ]]; then
  printf 'in no unit of %s:\n%s\n' "$build" "$missing" >&2
  exit 1
fi
# Their folders' exceptions go with them.
cp csrc/sim/.clang-tidy "$build/CMakeFiles/ebbtide_sim.dir/Unity/"
cp csrc/preload/.clang-tidy "$build/CMakeFiles/ebbtide_preload.dir/Unity/"
printf '%s\0' "${units[@]}" | xargs -0 -n 1 -P "$(nproc)" "$tidy" --quiet -p "$build" 2>&1 |
  { grep -v ' warnings\? generated\.$\|^Suppressed \|^Use -header-filter' || true; }
