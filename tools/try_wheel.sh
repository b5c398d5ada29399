#!/usr/bin/env bash
# Builds the wheel in isolation, installs it into an environment that holds nothing else (no torch, no CUDA), and tries
# it there.
#
#   try_wheel.sh PYTHON
set -euo pipefail
python=$1

rm -rf dist build/wheel-env
echo "== Building the wheel in isolation" >&2
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
"$python" -m venv build/wheel-env
build/wheel-env/bin/python -m pip install --quiet --disable-pip-version-check dist/ebbtide-*.whl

echo "== Trying it beside no torch and no driver" >&2
cd build/wheel-env
EBBTIDE_DRIVER=sim bin/python - <<'PROGRAM'
import sys

import ebbtide
from ebbtide import _core

assert "torch" not in sys.modules
_core.use_driver("sim")
address = _core.alloc("weights", 8 << 20)
assert _core.pause(["weights"]).bytes == 8 << 20
assert _core.resume(["weights"]).bytes == 8 << 20
_core.free(address)
print(f"ebbtide {ebbtide.__version__} from {_core.loaded_library()}: pause and resume work")
PROGRAM
bin/ebbtide --help >/dev/null
echo "== The wheel works" >&2
