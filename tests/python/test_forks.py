"""A forked child never waits for a lock that another thread of its parent held."""

import importlib
import os
import threading
import time

import pytest
from ebbtide import locks

STRESS = """
    import os, signal, sys, threading, time
    import torch
    from ebbtide import errors, saver
    device = saver.device
    with saver.region("w"):
        keep = torch.ones(1000, device=device)
    with saver.region("v"):
        other = torch.ones(1000, device=device)
    preparation = saver.prepare("v", wait=False)
    pending = saver.resume("v", wait=False)
    is_over = False

    def churn(number):
        while not is_over:
            remove = saver.on("before_pause", "nobody", print)
            remove()
            with saver.region(f"own-{number}"):
                torch.ones(100, device=device)
            saver.stats(), saver.tags()
            saver.configure(reserve=None)
            saver.pause(f"own-{number}")
            saver.resume(f"own-{number}", wait=False).wait()
            saver.trim(f"own-{number}")

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()

    def uses():
        with saver.region("w"):
            torch.ones(10)

    calls = [
        uses, saver.pause, saver.resume, lambda: saver.resume(wait=False), saver.tags, saver.stats,
        lambda: saver.swap(pause="w", resume="v"), lambda: saver.paused("w").__enter__(), saver.trim,
        lambda: saver.prepare("w"), lambda: saver.adopt(torch.ones(3), tag="w"), lambda: saver.configure(reserve=None),
        saver.promote, saver.demote, lambda: saver.is_paused("w"), lambda: saver.backup_of(keep), preparation.wait,
        pending.wait,
    ]

    def child():
        signal.alarm(20)
        saver.on("before_pause", "w", print)()
        for call in calls:
            try:
                call()
            except errors.StateError:
                continue
            os._exit(1)
        os._exit(0)

    for number in range(FORKS):
        time.sleep(0.0007 * (number % 7))
        pid = os.fork()
        if pid == 0:
            child()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != 0:
            print("a child ended with", status, "at fork", number)
            os._exit(1)
    is_over = True
    for thread in threads:
        thread.join()
    print("well")
"""


def test_invariant_10_forks_beside_busy_threads_never_hang(saver, run_python):
    assert saver.device  # builds the torch extension, which prints a line on stderr
    done = run_python(STRESS.replace("FORKS", "60"), timeout=110)
    assert done.stdout.endswith("well\n"), done.stdout + done.stderr


def in_child(function):
    """Whether `function()` is true in a forked child."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if function() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_lock_that_another_thread_holds_is_free_in_a_child():
    made = [locks.make_lock() for _ in range(3)]
    held, may_end = threading.Event(), threading.Event()

    def hold():
        with made[0], made[1], made[1]:
            held.set()
            may_end.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    try:
        assert not made[0].acquire(blocking=False)
        assert in_child(lambda: all(lock.acquire(timeout=5) for lock in made))
    finally:
        may_end.set()
        thread.join(30)


def test_a_lock_that_the_forking_thread_holds_stays_its_own():
    lock = locks.make_lock()

    def is_mine():
        lock.release()
        time.sleep(0)
        return lock.acquire(timeout=5)

    with lock:
        assert in_child(is_mine)


def test_every_lock_of_the_saver_is_one_of_these(saver):
    from ebbtide import driver_choice, errors, torch_extension
    from ebbtide.saver.pools import bypass, captures, region_pools
    from ebbtide.saver.regions import graphs, startup
    from ebbtide.saver.state import hooks

    modules = (driver_choice, torch_extension, captures, graphs, hooks, startup)
    for lock in [*(module._lock for module in modules), errors._join_lock, bypass.lock, region_pools.registry._lock]:
        assert lock in locks._made


@pytest.mark.parametrize("kind", ["prepare", "resume"])
def test_what_goes_on_in_the_parent_is_an_error_in_a_child(saver, tag, kind):
    import torch
    from ebbtide.errors import StateError

    with saver.region(tag):
        keep = torch.ones(1000, device=saver.device)
    going = saver.prepare(tag, wait=False) if kind == "prepare" else saver.resume(tag, wait=False)

    def is_refused():
        try:
            going.wait()
        except StateError:
            return True
        return False

    if saver.device == "cpu":
        assert in_child(is_refused)
    going.wait()
    assert float(keep.sum()) == 1000


WHO_WRITES_AT_A_FORK = """
import io, logging, os, signal, sys, threading, time
from ebbtide import logs
lock, writing = threading.Lock(), threading.Event()
class Slow(io.StringIO):
    def write(self, text):
        with lock:
            writing.set()
            time.sleep({seconds})
        return len(text)
sys.stderr = Slow()
thread = threading.Thread(target=logs.log, args=(logging.ERROR, "x"), daemon=True)
thread.start()
writing.wait()
start = time.monotonic()
child = os.fork()
if child == 0:
    signal.alarm(10)
    {in_child}
    os._exit(0)
seconds = time.monotonic() - start
is_well = os.waitpid(child, 0)[1] == 0 and seconds < 3
os._exit(0 if is_well else 9)  # at once, and not when the line is written
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize(("seconds", "in_child"), [(0.1, "logs.log(logging.ERROR, 'y')"), (4, "pass")])
def test_a_fork_waits_for_a_line_of_ours_but_not_for_ever(run_python, seconds, in_child):
    """A file of Python keeps the lock of who was writing at the fork: the child would wait for it for ever."""
    done = run_python(WHO_WRITES_AT_A_FORK.format(seconds=seconds, in_child=in_child))
    assert done.returncode == 0, done.stderr


def test_each_module_with_state_forgets_its_parent():
    for name in locks._WITH_STATE:
        assert callable(importlib.import_module(name).forget_parent)
