"""Two tenants of one device: a language model trains on real text while a copy of it generates.

Trainer (weights, gradients, optimizer) and generator (weights, key-value cache) take turns: each phase pauses what the
other does not need. The same job runs first in ordinary memory, without a pause; losses, texts and final weights must
be the same to the last bit. The phases are in python/ebbtide/demo/job.py.

    python examples/02_rl_weight_swap.py
    python examples/02_rl_weight_swap.py --width 1024 --layers 12 --heads 16 --batch 64    # for a GPU
"""

import argparse
import dataclasses
import sys

from ebbtide.demo.job import JobResult, Listener, Move, run_job
from ebbtide.demo.size import JobSize
from ebbtide.sizes import format_size


def parse_arguments() -> JobSize:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(JobSize):
        meaning = f"{field.metadata['meaning']} (default {field.default})"
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default, help=meaning)
    return JobSize(**vars(parser.parse_args()))


def show_move(move: Move) -> None:
    report = move.report
    verb = "freed" if report.kind == "pause" else "claimed"
    print(
        f"round {move.round}, {move.phase}: {verb} {format_size(report.bytes)} in {report.seconds * 1000:.1f} ms "
        f"({', '.join(report.by_tag)}); {format_size(move.held_bytes)} on the device"
    )


def show_text(number: int, text: str) -> None:
    print(f"round {number}, generated: {text!r}")


def show_result(result: JobResult) -> None:
    print(f"mean loss of the first round {result.mean_loss(0):.3f}, of the last {result.mean_loss(-1):.3f}")
    counts = ", ".join(f"{tag} {count}" for tag, count in result.tensors_by_tag.items())
    print(f"every tensor lies in its tag: {counts}")
    tenants = format_size(sum(result.bytes_by_tag.values()))
    print(f"at most {format_size(result.peak_bytes)} were on the device at once; all tenants together are {tenants}")


def main() -> int:
    size = parse_arguments()
    print("without pausing, in ordinary memory ...", flush=True)
    reference = run_job(size, is_pausing=False)
    print("with pausing ...", flush=True)
    result = run_job(size, is_pausing=True, listener=Listener(on_move=show_move, on_text=show_text))
    show_result(result)
    differences = result.differences(reference)
    if differences:
        print(f"FAILED: not as without pausing: {', '.join(differences)}")
        return 1
    print("identical to the run without pausing: losses, generated text, final weights; same addresses throughout")
    return 0


if __name__ == "__main__":
    sys.exit(main())
