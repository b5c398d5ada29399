"""Forked children end normally. Any use of ebbtide in them raises, and none hangs."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from random import Random

import torch
from ebbtide import saver
from ebbtide.errors import StateError

from ..model import Failure
from ..world import World
from . import Arguments, Operation, register

ALARM_SECONDS = 60
RAISED, DID_NOT_RAISE, RAISED_WRONG = 0, 3, 4


def uses(world: World, number: int | None) -> dict[str, Callable[[], object]]:
    """The calls that a child may try. Each raises StateError there."""
    tag = world.tag("a")
    found: dict[str, Callable[[], object]] = {
        "enter": lambda: saver.region(tag).__enter__(),
        "enter_new": lambda: saver.region(f"{tag}-new").__enter__(),
        "pause": lambda: saver.pause(tag),
        "pause_all": saver.pause,
        "resume": saver.resume,
        "resume_behind": lambda: saver.resume(wait=False),
        "swap": lambda: saver.swap(pause=tag, resume=world.tag("b"), missing_ok=True),
        "prepare": saver.prepare,
        "promote": saver.promote,
        "demote": saver.demote,
        "paused": lambda: saver.paused(tag).__enter__(),
        "adopt": lambda: saver.adopt(torch.ones(3), tag=tag),
    }
    if number is not None and world.model.memories[number].policy is not None:
        base = world.model.memories[number].base
        found["backup_of"] = lambda: saver.backup_of(base)
    return found


def tried(use: Callable[[], object]) -> int:
    """The exit status for the outcome of this call."""
    try:
        use()
    except StateError:
        return RAISED
    except BaseException:
        return RAISED_WRONG
    return DID_NOT_RAISE


def in_child(child: Callable[[], int]) -> int:
    """The exit status of a child that runs `child` and ends with its result. A negative number is a signal."""
    number = os.fork()
    if number == 0:
        status = 5
        try:
            signal.alarm(ALARM_SECONDS)
            status = child()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Runs threads that use ebbtide meanwhile, and may hold any of its locks at the moment of the fork."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            saver.on("before_pause", "*", print)()
            saver.tags()
            saver.stats()

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@register
class Fork(Operation):
    """Forks a child that exits, reads, drops tensors, or tries to use ebbtide."""

    name = "fork"
    weight = 0.7
    sim_only = True

    def draw(self, world: World, rng: Random) -> Arguments | None:
        number = world.draw_memory(rng)
        what = rng.choice(["exit", "read", "let_go", *uses(world, number)])
        return {"number": number, "what": what, "busy_threads": rng.choice((0, 0, 3))}

    def run(self, world: World, number: int | None, what: str, busy_threads: int) -> str:
        memory = world.model.memories.get(number) if number is not None else None
        is_readable = memory is not None and not (memory.is_paused or memory.is_doubtful or memory.may_be_zero)

        def child() -> int:
            if what == "read":
                is_right = not is_readable or memory.base[0].item() == memory.expected[0]
                return RAISED if is_right else DID_NOT_RAISE
            if what == "let_go":
                world.model.memories.clear()
                world.model.views.clear()
                return RAISED
            use = uses(world, number if memory is not None else None).get(what)
            return RAISED if use is None else tried(use)

        with busy(busy_threads):
            status = in_child(child)
        if status == -signal.SIGALRM:
            raise Failure(f"a forked child hangs: {what}")
        if status == DID_NOT_RAISE:
            raise Failure(f"a forked child could do this, or read other bytes: {what}")
        if status != RAISED:
            raise Failure(f"a forked child ended with {status}: {what}")
        return "done"
