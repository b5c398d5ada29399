"""A random walk of processes that share a device, while some are stopped and killed: no bytes are lost, a resume that
has room starts, and what the dead leave behind goes away."""

import os
import random
import re
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("torch")

from companions import Companion
from ebbtide.processes import folder, requests

pytestmark = pytest.mark.sim_only

SEED = 1  # of what is done; when it happens depends on the machine
WALK_SECONDS = 6
LONGEST_SECONDS = 60  # where the machine is so busy that nobody has been asked for anything by then
LATE_SECONDS = 3  # of a resume that has room, or whose timeout has passed
CAPACITY, TAGS = 64, 3
SIZES = (10, 12, 14, 16)  # MiB: torch rounds none, and one process alone never fills the device
TIMEOUTS = (0.2, 2, 8, 8)
CODE = """
from ebbtide import _core
from ebbtide.processes import member
member.configure(True)
tensors, values = {}, {}

def make(tag, mib):
    with saver.region(tag):
        tensors[tag] = torch.full((mib * 2**20,), 7, dtype=torch.uint8)
    values[tag] = 7
    saver.pause(tag)

def resume(tags, timeout):
    saver.resume(*tags, timeout=timeout)
    for tag in tags:
        assert bool((tensors[tag] == values[tag]).all()), f"{tag} has lost its bytes"
        values[tag] = (values[tag] + 1) % 256
        tensors[tag].fill_(values[tag])

def serve(offered):
    saver.configure(give_up=offered)
    done = saver.safe_point().done
    there = [tag for tag in tensors if not saver.is_paused(tag)]
    for tag in there:
        assert bool((tensors[tag] == values[tag]).all()), f"{tag} has lost its bytes"
    return {"there": there, "done": len(done), "problems": [each.problem for each in done if each.problem]}
"""


class Worker(Companion):
    def __init__(self, **variables: str) -> None:
        super().__init__(**variables)
        self.sizes: dict[str, int] = {}  # MiB, by tag
        self.resident: set[str] = set()
        self.step, self.tags, self.timeout = "begin", [""], 60.0  # what it does; "" for nothing
        self.began = self.runs_since = self.short_at = time.monotonic()
        self.stopped_until: float | None = None

    def take(self, step: str, tags: list[str], timeout: float, code: str) -> None:
        self.step, self.tags, self.timeout = step, tags, timeout
        self.began = self.runs_since = self.short_at = time.monotonic()
        self.start(code)

    def is_late(self, free: int) -> bool:
        """Whether it should have begun what it waits for, or given up, by now."""
        now = time.monotonic()
        wanted = sum(self.sizes[tag] for tag in self.tags if tag not in self.resident) if self.step == "resume" else 0
        if self.stopped_until is not None:
            self.runs_since = self.short_at = now
        elif not 0 < wanted <= free:
            self.short_at = now
        has_waited = self.step == "resume" and now - self.runs_since > self.timeout + LATE_SECONDS
        return has_waited or now - self.short_at > LATE_SECONDS

    def go_on(self) -> None:
        self.stopped_until = None
        os.kill(self.pid, signal.SIGCONT)


class Walk:
    def __init__(self, seed: int, stack: ExitStack, **variables: str) -> None:
        self.random, self.stack, self.variables = random.Random(seed), stack, variables
        self.place = folder.Folder(Path(variables["EBBTIDE_SHARED_FOLDER"]))
        self.watcher, *self.workers = [self.add() for _ in range(5)]
        assert self.watcher.wait_until_ready().run(CODE) is None
        self.died: dict[int, float] = {}
        self.freed_at, self.served = 0.0, 0
        self.settle()

    def add(self) -> Worker:
        worker = Worker(**self.variables)
        self.stack.callback(worker.close)
        return worker

    def start_step(self, worker: Worker) -> None:
        away = sorted(set(worker.sizes) - worker.resident)
        if len(worker.sizes) < TAGS:
            tag, mib = f"tag{len(worker.sizes)}", self.random.choice(SIZES)
            worker.take("make", [tag, str(mib)], 0, f"make('{tag}', {mib})")
        elif away and self.random.random() < 0.6:
            tags, timeout = self.random.sample(away, self.random.randint(1, len(away))), self.random.choice(TIMEOUTS)
            worker.take("resume", tags, timeout, f"resume({tags}, {timeout})")
        elif self.random.random() < 0.5:
            self.ask(worker)
            offered = self.random.sample(sorted(worker.sizes), self.random.randint(0, len(worker.sizes)))
            worker.take("serve", [], 0, f"answer = serve({offered or None})")
        elif worker.resident:
            tags = self.random.sample(sorted(worker.resident), self.random.randint(1, len(worker.resident)))
            worker.take("pause", tags, 0, f"saver.pause(*{tags})")

    def ask(self, worker: Worker) -> None:
        """As `ebbtide pause` does, and its like. Nobody waits for the answer."""
        what = self.random.choice((requests.PAUSE, requests.RESUME, requests.TRIM, ""))
        tags = self.random.sample(sorted(worker.sizes), self.random.randint(0, len(worker.sizes)))
        for entry in self.place.entries() if what else ():
            if entry.pid == worker.pid:
                requests.ask(self.place, entry.name, requests.Request(what, tags, "the walk"))
                time.sleep(self.random.choice((0, 0.05)))

    def end_step(self, worker: Worker) -> None:
        step, worker.step = worker.step, ""
        if step == "begin":
            worker.wait_until_ready()
            worker.take("code", [], 0, CODE)
            return
        answer = worker.answer()
        if step == "serve":
            assert isinstance(answer, dict) and "error" not in answer, answer
            assert all("too little memory" in each for each in answer["problems"]), answer
            self.freed_at = time.monotonic() if worker.resident - set(answer["there"]) else self.freed_at
            worker.resident = set(answer["there"])
            self.served += answer["done"]
        elif isinstance(answer, dict):
            assert step in ("make", "resume") and "OutOfMemoryError" in answer["error"], answer
            if step == "resume":
                self.check_refusal(worker, answer["text"])
        elif step == "make":
            worker.sizes[worker.tags[0]] = int(worker.tags[1])
        elif step == "resume":
            worker.resident.update(worker.tags)
        elif step == "pause":
            worker.resident.difference_update(worker.tags)
            self.freed_at = time.monotonic()

    def check_refusal(self, worker: Worker, text: str) -> None:
        named = [int(pid) for pid in re.findall(r"python (\d+) holds", text)]
        assert named or self.freed_at > worker.began, text  # who has just given up its memory is not named
        assert all(self.died.get(pid, worker.began) >= worker.began for pid in named), text

    def disturb(self) -> None:
        waiting = [worker for worker in self.workers if worker.step == "resume"]
        worker = self.random.choice(waiting or self.workers)
        if self.random.random() < 0.2:
            worker.kill()
            self.freed_at = self.died[worker.pid] = time.monotonic()
            self.workers[self.workers.index(worker)] = self.add()
        elif worker.stopped_until is None:
            worker.stopped_until = time.monotonic() + self.random.choice((0.1, 1, 6, 6))
            os.kill(worker.pid, signal.SIGSTOP)

    def look(self) -> None:
        self.watcher.start("answer = _core.query_device(0).free_bytes // 2**20")
        if not self.watcher.has_answered(1):  # one was stopped while it had the simulator's table for itself
            for worker in self.workers:
                worker.go_on()
        free = self.watcher.answer()
        late = [
            (worker.pid, worker.step, worker.tags, worker.timeout) for worker in self.workers if worker.is_late(free)
        ]
        assert not late, (free, late)

    def run(self) -> None:
        begin, disturbed_next = time.monotonic(), 0.0
        while (now := time.monotonic()) < begin + (WALK_SECONDS if self.served > 0 else LONGEST_SECONDS):
            for worker in self.workers:
                if worker.stopped_until is not None and now > worker.stopped_until:
                    worker.go_on()
                if not worker.step:
                    self.start_step(worker)
                elif worker.has_answered():
                    self.end_step(worker)
            if now > disturbed_next:
                self.disturb()
                disturbed_next = now + self.random.uniform(0.1, 0.8)
            self.look()
        self.settle()

    def settle(self) -> None:
        for worker in self.workers:
            worker.go_on()
        for worker in self.workers:
            while worker.step:
                assert worker.has_answered(60)
                self.end_step(worker)

    def check_end(self, place: Path) -> None:
        held = {worker.pid: sum(worker.sizes[tag] for tag in worker.resident) * 2**20 for worker in self.workers}
        told = "answer = [[each.pid, each.held_bytes(member.uuid_of(0))] for each in member.others_now()]"
        assert dict(self.watcher.run(told)) == held
        assert self.served > 0
        used = "info = _core.query_device(0); answer = info.total_bytes - info.free_bytes"
        assert self.watcher.run(used) == sum(held.values())
        assert {int(file.name.split("-")[0]) for file in place.iterdir()} == {self.watcher.pid, *held}
        for code in (
            "saver.safe_point()",
            "saver.pause(missing_ok=True)",
            "resume(list(tensors), 8); saver.pause(*tensors)",
        ):
            assert [worker.run(code) for worker in self.workers] == [None] * len(self.workers)


def test_a_walk_of_processes_that_are_stopped_and_killed() -> None:
    name = f"walk-{os.getpid()}"
    shared = {"EBBTIDE_DRIVER": "sim", "EBBTIDE_SIM_SHARED": name, "EBBTIDE_SIM_CAPACITY": f"{CAPACITY}MiB"}
    with ExitStack() as stack:
        stack.callback(Path(f"/dev/shm/ebbtide-sim-{os.geteuid()}-{name}").unlink, missing_ok=True)
        # pytest's own paths are too long for the address of a socket.
        place = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "place"
        walk = Walk(int(os.environ.get("WALK_SEED", SEED)), stack, EBBTIDE_SHARED_FOLDER=str(place), **shared)
        walk.run()
        walk.check_end(place)
