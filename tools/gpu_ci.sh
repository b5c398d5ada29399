#!/usr/bin/env bash
# Builds, tests and measures on a machine with a GPU, and downloads nothing. Results and logs go to $OUT (default
# build/gpu).
#
#   [REVISION=<git revision>] tools/gpu_ci.sh [build] [tests] [sanitizer] [examples] [bench]   (default: all)
#
# In place of "tests", which takes half an hour: "beside" are the tests that may run side by side, on one GPU; "alone"
# are those that need a GPU for themselves, shared out among all GPUs that there are; "peers" are those that need two.
# STEP_SECONDS: after so long, each of these is interrupted and reports what it has found. "lms" is the part of the
# tests for large model support alone.
# By hand, and for the sake of the machine's many processors, on the simulated device: "asan", "tsan", "walks" (random
# walks of 100000 steps with the seeds in $SEEDS) and "mutants" (the samples in $MUTANTS, such as "7:20 8:20").
# Steps are independent: a failed one is named at the end and makes the exit status 1, the others still run.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
steps=${*:-build tests sanitizer examples bench}
failed=() walkers=()

run() { # run NAME COMMAND...: its output to $OUT/NAME.log, its last lines to the screen
  local name=$1
  shift
  local start=$SECONDS
  if "$@" >"$OUT/$name.log" 2>&1; then echo "== $name: ok ($((SECONDS - start)) s)"; else
    failed+=("$name")
    echo "== $name: FAILED ($((SECONDS - start)) s)"
  fi
  tail -n "${LINES_SHOWN:-8}" "$OUT/$name.log" | cut -c1-300
}

export PYTHONUNBUFFERED=1 EBBTIDE_DRIVER=cuda
SITE=(env "PYTHONPATH=$PWD/build/site${PYTHONPATH:+:$PYTHONPATH}")
# The names of tests, so that those which were never reported can be told.
ON_GPU=("${SITE[@]}" EBBTIDE_TEST_DRIVER=cuda EBBTIDE_NO_SKIPS=1 timeout -s INT -k 15 "${STEP_SECONDS:-0}"
  python3 -m pytest --tb=short -v --timeout=240 --durations=25 --ignore=tests/tooling)

found() { # found LOG...: what failed, and the totals
  grep -hE "^(FAILED|ERROR) |^=* ?[0-9]+ (passed|failed|error|skipped|deselected).* in [0-9.]+s" "$@" | cut -c1-300
}

for step in $steps; do
  case $step in
    build) run build make --no-print-directory build/site/.ebbtide-installed SYSTEM=1 ;;
    tests)
      run gpu-test make --no-print-directory gpu-test SYSTEM=1 PYTEST_ARGS="${PYTEST_ARGS:--q --timeout=240}"
      # The totals of both passes.
      grep -E "^=* ?[0-9]+ (passed|failed|error|skipped|deselected).* in [0-9.]+s" "$OUT/gpu-test.log"
      ;;
    beside)
      LINES_SHOWN=1 run beside env CUDA_VISIBLE_DEVICES=0 "${ON_GPU[@]}" -n "${PYTEST_JOBS:-12}" --dist loadfile \
        --max-worker-restart=0 -m "not device_memory"
      found "$OUT/beside.log"
      ;;
    alone)
      mapfile -t files < <(grep -rl device_memory tests --include='test_*.py' | grep -v '^tests/tooling/' | sort)
      gpus=$(nvidia-smi -L | wc -l) runs=()
      for ((gpu = 0; gpu < gpus; ++gpu)); do
        mine=()
        for ((index = gpu; index < ${#files[@]}; index += gpus)); do mine+=("${files[index]}"); done
        (
          failed=()
          LINES_SHOWN=1 run "alone-$gpu" env CUDA_VISIBLE_DEVICES=$gpu "${ON_GPU[@]}" -m device_memory "${mine[@]}"
          exit ${#failed[@]}
        ) &
        runs+=("$!:$gpu")
      done
      for each in "${runs[@]}"; do wait "${each%:*}" || failed+=("alone-${each#*:}"); done
      found "$OUT"/alone-*.log
      ;;
    peers)
      run peers "${ON_GPU[@]}" tests/gpu/test_gpu_peers.py tests/gpu/test_gpu_nccl.py tests/gpu/test_gpu_lms.py \
        -k "peers or nccl or two_gpus"
      ;;
    lms)
      run lms "${ON_GPU[@]}" tests/gpu/test_gpu_lms*.py
      ;;
    asan | tsan) run "$step" env EBBTIDE_DRIVER=sim make --no-print-directory "$step" SYSTEM=1 ;;
    walks)
      for seed in ${SEEDS:-1 2 3}; do
        (
          failed=()
          run "walk-$seed" env EBBTIDE_DRIVER=sim "${SITE[@]}" python3 -m tests.walk --steps 100000 --seed "$seed"
          exit ${#failed[@]}
        ) &
        walkers+=("$!:$seed")
      done
      for walker in "${walkers[@]}"; do wait "${walker%:*}" || failed+=("walk-${walker#*:}"); done
      ;;
    mutants)
      # shellcheck disable=SC2086
      run mutants env EBBTIDE_DRIVER=sim OUT="$(realpath "$OUT")" "${SITE[@]}" tools/mutants/side_by_side.sh ${MUTANTS:-1:20 2:20}
      ;;
    sanitizer) run sanitizer "${SITE[@]}" compute-sanitizer --tool memcheck --error-exitcode 9 python3 examples/01_pause_resume.py ;;
    examples)
      for example in examples/0*.py; do
        run "$(basename "$example" .py)" "${SITE[@]}" python3 "$example"
      done
      ;;
    bench)
      # BENCH_ARGS: such as "--workloads first_pause,swap" where one call may not take long enough for all of them.
      # shellcheck disable=SC2086
      run bench "${SITE[@]}" python3 -m benchmarks run --out "$OUT" ${REVISION:+--revision "$REVISION"} ${BENCH_ARGS:-}
      ;;
    *)
      echo "unknown step: $step"
      failed+=("$step")
      ;;
  esac
done

if ((${#failed[@]})); then
  echo "failed: ${failed[*]}"
  exit 1
fi
