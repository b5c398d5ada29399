#!/usr/bin/env bash
# Samples of mutants side by side, for a machine with many processors. Needs root: each sample has mounts of its own.
#
#   tools/mutants/side_by_side.sh SEED:COUNT...
#
# Every sample works in a copy of one build, mounted where that was built, so that nothing is compiled twice. Results
# and output go to $OUT (default build/mutants/results), a file of each for each seed. After LIMIT_S seconds (default
# 500) of trying the rest is stopped; the results so far are there. EBBTIDE_GTEST_DIR is as for make.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
place=$PWD/build/mutants
OUT=${OUT:-$place/results}
copies=$(mktemp -d)
trap 'rm -rf "$copies"' EXIT
gtest=${EBBTIDE_GTEST_DIR:+--cmake=-DEBBTIDE_GTEST_DIR=$(realpath "$EBBTIDE_GTEST_DIR")}
mkdir -p "$OUT"

"$python" -m tools.mutants --sample 0 --jobs "$(nproc)" $gtest # copies and builds
jobs=$((($(nproc) + $# - 1) / $#))

try_sample() { # try_sample SEED COUNT
  mount --bind "$copies/$1" "$place"
  exec timeout --signal=INT --kill-after=20 "${LIMIT_S:-500}" \
    "$python" -m tools.mutants --sample "$2" --seed "$1" --jobs "$jobs" $gtest
}
export -f try_sample
export python place copies jobs gtest

declare -A samples
for word in "$@"; do
  seed=${word%:*}
  cp -a "$place" "$copies/$seed"
  unshare --mount bash -c "try_sample $seed ${word#*:}" >"$OUT/seed-$seed.log" 2>&1 &
  samples[$seed]=$!
done

worst=0
for seed in "${!samples[@]}"; do
  status=0
  wait "${samples[$seed]}" || status=$?
  echo "== seed $seed: status $status (1: some survived, 2: nothing to compare with, 124: stopped)"
  tail -n 20 "$OUT/seed-$seed.log"
  cp "$copies/$seed/results/seed-$seed.json" "$OUT/" || status=2
  if ((status > worst)); then worst=$status; fi
done
exit "$worst"
