#!/usr/bin/env bash
# Installs torch's CPU build where the given Python has no torch. Usage: install_torch.sh PYTHON REQUIREMENT [INDEX_URL]
set -euo pipefail
python=$1
requirement=$2
index=${3:-}

if version=$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null); then
  echo "== torch $version is there already" >&2
  exit 0
fi
echo "== Installing $requirement (200 MB to download)" >&2
arguments=(install --quiet --disable-pip-version-check)
[[ -n "$index" ]] && arguments+=(--extra-index-url "$index")
"$python" -m pip "${arguments[@]}" "$requirement" && exit 0
cat >&2 <<MESSAGE
ebbtide: pip could not install $requirement. Do one of these, then run make again:
  - name the index of torch's CPU builds (PyTorch's installation page tells it):   make test TORCH_INDEX=<its address>
  - install a torch of your choice first:                                            .venv/bin/pip install <a torch from 2.6 on>
  - use the Python and the torch that you have:                                      make test SYSTEM=1
MESSAGE
exit 1
