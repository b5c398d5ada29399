#!/usr/bin/env bash
# Names missing tools in one sentence, before a build fails in a hundred lines.
#
#   check_prerequisites.sh [--system] PYTHON
set -euo pipefail

system=0
if [[ "${1:-}" == --system ]]; then
  system=1
  shift
fi
python=${1:?the Python to use}

fail() {
  echo "ebbtide: $1" >&2
  exit 1
}

command -v "$python" >/dev/null || fail "there is no $python. Install Python 3.10 or newer, or say which one to use: make PYTHON=python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  fail "$python is $("$python" -V 2>&1); ebbtide needs Python 3.10 or newer. Say which one to use: make PYTHON=python3.12"
command -v c++ >/dev/null || command -v g++ >/dev/null || fail "there is no C++ compiler. On Debian: apt-get install build-essential"
header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h
[[ -e "$header" ]] || fail "Python's development files are missing ($header). On Debian: apt-get install python3-dev"

if ((system)); then
  missing=()
  for module in pip pybind11 scikit_build_core pytest hypothesis click rich torch; do
    "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" || missing+=("$module")
  done
  command -v cmake >/dev/null || missing+=(cmake)
  command -v ninja >/dev/null || command -v make >/dev/null || missing+=(ninja)
  ((${#missing[@]} == 0)) || fail "SYSTEM=1 downloads nothing, and $python lacks: ${missing[*]}. Install them, or leave SYSTEM=1 out."
else
  "$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python cannot make virtual environments. On Debian: apt-get install python3-venv"
fi
