#!/usr/bin/env bash
# Runs the Python tests: first those that may run side by side, in several processes, then those that need the device
# for themselves.
#
#   tools/run_pytest.sh PYTHON JOBS [pytest's arguments]
#
# Without a path, the tests of the tools (tests/tooling) are left out: `make tools-test` runs them.
# There is one pass in one process if JOBS is 1, if pytest-xdist is missing, or if the arguments choose by marker (-m)
# or want the terminal (-s, --pdb).
# One pass, all side by side, on the simulated device: each process has one of its own.
set -uo pipefail
python=$1 jobs=$2
shift 2
# Short: pytest's long style prints tensors in the arguments of frames, byte by byte.
run=("$python" -m pytest --tb=short)
NO_TESTS=5
# torch's threads wait for each other by spinning otherwise, and take the processors from what runs beside them.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
if [[ " $* " != *" tests/"* ]]; then run+=(--ignore=tests/tooling); fi
# A test that hangs fails, with the stacks of all threads. The slowest takes a minute on two cores.
if "$python" -c "import pytest_timeout" 2>/dev/null; then run+=(--timeout=600); fi

if [[ $jobs == 1 || " $* " =~ " "(-m|-s|--pdb)" " ]] || ! "$python" -c "import xdist" 2>/dev/null; then exec "${run[@]}" "$@"; fi

# A file stays in one process, with what its tests share. Files start in their order: the longest is among the first.
# A process that crashed is not replaced: xdist 3.8 waits for ever then for the rest of the crashed one's files.
# One thread of torch each: more would wait for one another.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
side_by_side=(-n "$jobs" --dist loadfile --no-loadscope-reorder --max-worker-restart=0)
if [[ ${EBBTIDE_TEST_DRIVER:-sim} == sim ]]; then exec "${run[@]}" "$@" "${side_by_side[@]}"; fi

"${run[@]}" "$@" -n "$jobs" -m "not device_memory"
beside=$?
"${run[@]}" "$@" -m device_memory
alone=$?
for status in $beside $alone; do
  if ((status != 0 && status != NO_TESTS)); then exit "$status"; fi
done
if ((beside == NO_TESTS && alone == NO_TESTS)); then exit $NO_TESTS; fi
