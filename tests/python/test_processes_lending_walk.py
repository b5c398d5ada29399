"""A random walk of processes that lend one another memory, pause, resume, keep and hand it over, and are killed: every
byte is what its last writer wrote, who may not pause is refused, and in the end nothing is left.

One step after the other, so that each step's outcome is known. LENDING_STEPS and LENDING_PROCESSES make it longer.
"""

import os
import random
from dataclasses import dataclass, field

import pytest

pytest.importorskip("torch")

from companions import Companion, sharing

pytestmark = pytest.mark.sim_only

SEED = int(os.environ.get("LENDING_SEED", "1"))
STEPS = int(os.environ.get("LENDING_STEPS", "150"))
PROCESSES = int(os.environ.get("LENDING_PROCESSES", "4"))
TAGS = 2
MIB = 2**20
CODE = """
import gc
from dataclasses import astuple
from ebbtide import _core
mine, theirs, kept = {}, {}, {}

def make(tag, mib, value):
    with saver.region(tag, exportable=True):
        mine[tag] = torch.full((mib * 2**20,), value, dtype=torch.uint8)

def look(names):
    found = {name: theirs.get(name, mine.get(name)) for name in names}
    return {name: [int(each.min()), int(each.max())] for name, each in found.items()}

def let_go(name):
    theirs.pop(name)
    gc.collect()
"""
LEFT = """
import os
links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
answer = [where for each in links if os.path.lexists(each) and "ebbtide-sim-block" in (where := os.readlink(each))]
"""


@dataclass
class Memory:
    """A tag of a process, and who else uses it."""

    owner: int
    tag: str
    mib: int
    value: int
    is_here: bool = True
    is_kept: bool = False
    is_orphan: bool = False  # its owner is dead
    users: dict[int, bool] = field(default_factory=dict)  # whether they agreed to pauses

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.tag}"


class Walk:
    def __init__(self, seed: int, variables: dict[str, str]) -> None:
        self.random, self.variables = random.Random(seed), variables
        self.processes: dict[int, Companion] = {}
        self.memories: list[Memory] = []
        self.made = self.handed = 0
        for _ in range(PROCESSES):
            self.add()

    def add(self) -> None:
        self.made += 1
        one = self.processes[self.made] = Companion(**self.variables)
        one.wait_until_ready().run(CODE)

    def step(self) -> None:
        steps = (
            *(self.attach, self.attach, self.write, self.pause, self.hand_over, self.hand_over),
            *(self.resume, self.resume, self.let_go, self.keep),
        )
        number = self.random.choice(list(self.processes))
        own = [each for each in self.memories if each.owner == number]
        if len(own) < TAGS and self.random.random() < 0.5:
            self.make(number, f"tag{len(own)}")
        elif self.random.random() < 0.03:
            self.kill(number)
        else:
            living = [each for each in self.memories if not each.is_orphan or each.users]
            if living:
                self.random.choice(steps)(self.random.choice(living))

    def make(self, number: int, tag: str) -> None:
        made = Memory(number, tag, self.random.choice((10, 12, 14)), self.random.randrange(256))
        assert self.processes[number].run(f"make({tag!r}, {made.mib}, {made.value})") is None
        self.memories.append(made)

    def attach(self, memory: Memory) -> None:
        number = self.random.choice(list(self.processes))
        if memory.is_orphan or number == memory.owner or number in memory.users:
            return
        shared = self.processes[memory.owner].run(f"answer = astuple(saver.share(mine[{memory.tag!r}]))")
        agrees = self.random.random() < 0.7
        code = f"theirs[{memory.name!r}] = saver.attach(saver.Shared(*{shared}), pauseable={agrees})"
        answer = self.processes[number].run(code)
        if memory.is_here:
            assert answer is None, answer
            memory.users[number] = agrees
        else:
            assert answer["error"] == "StateError", answer

    def write(self, memory: Memory) -> None:
        writers = [*memory.users, *([] if memory.is_orphan else [memory.owner])]
        if not memory.is_here:
            return
        number, memory.value = self.random.choice(writers), self.random.randrange(256)
        where = f"mine[{memory.tag!r}]" if number == memory.owner else f"theirs[{memory.name!r}]"
        assert self.processes[number].run(f"{where}.fill_({memory.value}) is None") is None
        self.look()

    def pause(self, memory: Memory) -> None:
        if memory.is_orphan:
            return
        may_leave = all(memory.users.values())
        bytes_ = memory.mib * MIB if memory.is_here and not memory.is_kept else 0
        code = f"answer = saver.pause({memory.tag!r}).bytes"
        if may_leave or memory.is_kept or not memory.is_here:
            # Who let go, or died, did so a moment ago.
            assert self.processes[memory.owner].run_until(code, bytes_) == bytes_
            memory.is_here = memory.is_here and memory.is_kept
        else:
            answer = self.processes[memory.owner].run(code)
            assert "can't leave" in answer["text"], answer

    def resume(self, memory: Memory) -> None:
        if memory.is_orphan:
            return
        assert self.processes[memory.owner].run(f"saver.resume({memory.tag!r})") is None
        memory.is_here = True
        self.look()

    def hand_over(self, memory: Memory) -> None:
        """To a process with something away."""
        others = [each for each in self.memories if not each.is_here and not each.is_orphan]
        taken = next((each for each in others if each.owner != memory.owner), None)
        if taken is None or memory.is_orphan or not memory.is_here or memory.is_kept or not all(memory.users.values()):
            return
        giver, taker = self.processes[memory.owner], self.processes[taken.owner]
        giver.start(f"answer = saver.hand_over(pause={memory.tag!r}, to={taker.pid}).bytes")
        offered = "from ebbtide.processes import handing; answer = len(handing._offers)"
        assert taker.run_until(offered, 1) == 1
        assert taker.run(f"answer = saver.resume({taken.tag!r}).bytes") == taken.mib * MIB
        assert giver.answer() == memory.mib * MIB
        memory.is_here, taken.is_here = False, True
        self.handed += 1
        self.look()

    def keep(self, memory: Memory) -> None:
        if memory.is_orphan or not memory.is_here or memory.users:
            return
        tag, code = memory.tag, "kept.pop({0!r})()" if memory.is_kept else "kept[{0!r}] = saver.keep(mine[{0!r}])"
        assert self.processes[memory.owner].run(code.format(tag)) is None
        memory.is_kept = not memory.is_kept

    def let_go(self, memory: Memory) -> None:
        if memory.users:
            number = self.random.choice(list(memory.users))
            assert self.processes[number].run(f"let_go({memory.name!r})") is None
            del memory.users[number]

    def kill(self, number: int) -> None:
        self.processes.pop(number).kill()
        for memory in list(self.memories):
            memory.users.pop(number, None)
            memory.is_orphan |= memory.owner == number
            if memory.is_orphan and not memory.is_here:  # nobody has it any more
                for user in memory.users:
                    assert self.processes[user].run(f"let_go({memory.name!r})") is None
                memory.users.clear()
        self.add()

    def look(self) -> None:
        for number, process in self.processes.items():
            names = {each.name: each.value for each in self.memories if each.is_here and number in each.users}
            names |= {each.tag: each.value for each in self.memories if each.is_here and each.owner == number}
            assert process.run(f"answer = look({list(names)})") == {
                name: [value, value] for name, value in names.items()
            }

    def end(self) -> None:
        self.look()
        for memory in self.memories:
            while memory.users:
                self.let_go(memory)
        end = "mine.clear(); kept.clear(); gc.collect(); saver.pause(); saver.resume(); saver.trim(); "
        used = "info = _core.query_device(0); answer = info.total_bytes - info.free_bytes"
        for process in self.processes.values():
            process.run("[each() for each in kept.values()]")
            assert process.run_until(end + "answer = saver.stats()['device_bytes']", 0) == 0
        assert next(iter(self.processes.values())).run_until(used, 0) == 0
        for process in self.processes.values():
            assert process.run(LEFT) == []


def test_a_walk_of_processes_that_lend_memory() -> None:
    with sharing("lending-walk", 1024) as variables:
        walk = Walk(SEED, variables)
        try:
            for _ in range(STEPS):
                walk.step()
            walk.end()
        finally:
            for process in walk.processes.values():
                process.close()
    assert walk.made > PROCESSES and walk.handed > 0
