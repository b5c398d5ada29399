"""What meets lent memory: other operations and threads, hooks, interrupts, processes that do not answer."""

import itertools
import time

import pytest

pytest.importorskip("torch")

from companions import pair

pytestmark = pytest.mark.sim_only

MIB = 2**20
numbers = itertools.count()
MAKE = """
import gc
from dataclasses import astuple
from ebbtide import _core
from ebbtide.processes import lent, offers
def make(mib=10):
    with saver.region(W, exportable=True):
        return torch.full((mib * 2**20,), 3, dtype=torch.uint8)
w = make()
answer = astuple(saver.share(w))
"""
ATTACH = "w = saver.attach(saver.Shared(*{shared}), pauseable={pauseable}); answer = int(w[0])"
IS_MAPPED = """
from ebbtide.processes import borrowed
answer = [part.is_mapped for owner in borrowed._owners.values() for part in owner.parts.values()]
"""
FILL = """
import os, resource
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (60, limits[1]))
files = []
try:
    while True:
        files.append(os.dup(0))
except OSError:
    pass
"""
EMPTY = "resource.setrlimit(resource.RLIMIT_NOFILE, limits); [os.close(each) for each in files]"
DUMP = """
import base64, io, pickle
from multiprocessing.reduction import ForkingPickler
import torch.multiprocessing
def dump(thing):
    ForkingPickler(out := io.BytesIO()).dump(thing)
    return base64.b64encode(out.getvalue()).decode()
def load(text):
    return pickle.loads(base64.b64decode(text))
"""
CLEAN = """
import gc
w = v = None
gc.collect()
saver.pause(missing_ok=True); saver.resume(missing_ok=True); saver.trim()
answer = saver.stats()["device_bytes"]
"""


@pytest.fixture(scope="module")
def made():
    with pair("meets", 256) as found:
        yield found


@pytest.fixture
def two(made):
    """The owner and the user, whose tag W is new."""
    for one in made:
        one.revive()
    tag = f"weights{next(numbers)}"
    assert [one.run(f"W = {tag!r}") for one in made] == [None, None]
    yield made
    for one in reversed(made):
        if one.poll() is None:
            assert one.run_until(CLEAN, 0) == 0


def attach(two, pauseable=True):
    owner, user = two
    shared = owner.run(MAKE)
    assert user.run(ATTACH.format(shared=shared, pauseable=pauseable)) == 3


def attach_another(two):
    owner, user = two
    shared = owner.run("answer = astuple(saver.share(w))")
    assert user.run(f"v = saver.attach(saver.Shared(*{shared}))") is None


SETTLED = "answer = [[use.is_away, use.is_asked] for each in lent._borrowers for use in each.uses.values()]"


def is_back(two):
    owner, user = two
    assert owner.run_until(SETTLED, [[False, False]]) == [[False, False]]
    return user.run(IS_MAPPED) == [True] and user.run("answer = int(w[0])") == 3


def test_operations_of_other_threads_take_nothing_away_for_good(two):
    owner = two[0]
    attach(two)
    code = """
        import threading
        with saver.region("other"):
            o = torch.ones(1000, device=saver.device)
        errors = []
        def turn(tag):
            for _ in range(40):
                try:
                    saver.pause(tag)
                    saver.resume(tag)
                except Exception as error:
                    errors.append(repr(error))
        threads = [threading.Thread(target=turn, args=(each,)) for each in (W, "other", W)]
        [each.start() for each in threads]
        [each.join() for each in threads]
        saver.resume()
        o = None
        answer = errors
    """
    assert owner.run(code) == []
    assert is_back(two)


def test_hooks_of_another_tag_change_nothing(two):
    owner, user = two
    attach(two)
    owner.run("remove = saver.on('before_pause', 'zzz', print)")
    assert owner.run("answer = saver.pause(W).bytes") == 10 * MIB
    owner.run("saver.resume(W)")
    assert is_back(two)
    attach_another(two)
    for call in ("saver.pause(W)", "saver.demote(W)"):
        assert f"python {user.pid} uses 1 of its tensors" in owner.run(call)["text"], call
    owner.run("remove()")


def test_a_before_hook_may_have_the_user_let_go(two):
    owner, user = two
    attach(two, pauseable=False)
    code = """
        import time
        def wait_until_unused(tag):
            for _ in range(100):
                if not lent.are_used():
                    return
                time.sleep(0.02)
        remove = saver.on("before_pause", W, wait_until_unused)
    """
    assert owner.run(code) is None
    owner.start("answer = saver.pause(W).bytes")
    time.sleep(0.1)
    user.run("w = None; __import__('gc').collect()")
    assert owner.answer() == 10 * MIB
    owner.run("remove(); saver.resume(W)")


@pytest.mark.parametrize("call", ["with saver.region('open'): saver.pause()", "saver.pause(W, 'typo')"])
def test_what_is_refused_at_once_takes_nothing(two, call):
    attach(two)
    assert two[0].run(call)["error"] == "StateError"
    assert is_back(two)


def test_a_user_without_descriptors_gets_it_later(two):
    owner, user = two
    attach(two)
    owner.run("lent._BACK_SECONDS = 0.5; saver.pause(W)")
    user.run(FILL)
    assert owner.run("answer = saver.resume(W).bytes") == 10 * MIB
    assert user.run(IS_MAPPED) == [False]
    user.run(EMPTY)
    assert is_back(two)


def test_a_resume_in_the_background_that_is_dropped(two):
    attach(two)
    two[0].run("saver.pause(W); saver.resume(W, wait=False) and None")
    assert is_back(two)


def test_a_stopped_user_is_named_and_gets_it_in_the_end(two):
    owner, user = two
    attach(two)
    owner.run("lent._LEAVE_SECONDS = lent._BACK_SECONDS = 0.5")
    user.stop()
    refused = owner.run("saver.pause(W)")
    assert f"python {user.pid}, tag " in refused["text"] and "does not answer" in refused["text"]
    assert owner.run("answer = [saver.is_paused(W), int(w[0])]") == [False, 3]
    user.go_on()
    assert is_back(two)
    assert owner.run("lent._LEAVE_SECONDS = 20; saver.pause(W)") is None
    user.stop()
    code = """
        log = []
        remove = saver.on("after_resume", W, log.append)
        saver.resume(W)
        remove()
        answer = log == [W]
    """
    hooks_ran = owner.run(code)
    user.go_on()
    assert hooks_ran is True
    assert is_back(two)


def test_an_attach_that_is_interrupted_holds_nothing(two):
    owner, user = two
    shared = owner.run(MAKE)
    owner.stop()
    code = f"""
        import signal
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            saver.attach(saver.Shared(*{shared}))
        except KeyboardInterrupt:
            answer = "interrupted"
    """
    assert user.run(code) == "interrupted"
    owner.go_on()
    assert owner.run_until("answer = saver.pause(W).bytes", 10 * MIB) == 10 * MIB
    owner.run("saver.resume(W)")


def test_a_refusal_names_users_only_where_they_are_its_cause(two):
    owner, user = two
    attach(two, pauseable=False)
    inside = owner.run("with saver.region(W): saver.pause(W)")
    assert inside["error"] == "StateError" and "region" in inside["text"], inside
    assert str(user.pid) not in inside["text"]
    outside = owner.run("saver.pause(W)")
    assert str(user.pid) in outside["text"] and "pauseable=True" in outside["text"], outside


def test_users_of_one_allocation_agree_one_by_one(two):
    owner, user = two
    attach(two)
    attach_another(two)
    assert owner.run("saver.pause(W)")["error"] == "StateError"
    user.run("v = None; __import__('gc').collect()")
    assert owner.run_until("answer = saver.pause(W).bytes", 10 * MIB) == 10 * MIB
    owner.run("saver.resume(W)")
    assert is_back(two)


def test_kept_memory_is_nobodys_to_lose(two):
    owner, user = two
    attach(two, pauseable=False)
    owner.run("let_go = saver.keep(w)")
    assert owner.run("answer = saver.pause(W).bytes") == 0
    assert user.run("answer = int(w[0])") == 3
    owner.run("let_go(); saver.resume(W)")


def test_a_trim_goes_on_beside_it(two):
    owner, user = two
    attach(two, pauseable=False)
    assert owner.run("v = make(20); v = None; gc.collect(); answer = saver.trim(W).bytes") == 20 * MIB
    assert user.run("answer = int(w[0])") == 3


def test_what_is_sent_twice_arrives_twice(two):
    owner, user = two
    owner.run(MAKE + DUMP)
    user.run(DUMP)
    first, second = owner.run("answer = [dump(w), dump(w)]; w = None; gc.collect()")
    assert user.run(f"w = load({first!r}); answer = int(w[0])") == 3
    user.run("w = None; __import__('gc').collect()")
    time.sleep(0.2)
    assert user.run(f"w = load({second!r}); answer = int(w[0])") == 3


def test_what_its_own_process_loads_is_not_held(two):
    owner = two[0]
    owner.run(MAKE + DUMP)
    code = """
        v = load(dump(w))
        answer = [v.data_ptr() == w.data_ptr(), sum(len(each.held) for each in offers._offers.values())]
        v = None
    """
    assert owner.run(code) == [True, 0]


def test_what_is_borrowed_is_not_sent_on(two):
    owner, user = two
    attach(two)
    user.run(DUMP)
    for call in ("dump(w)", "saver.share(w)"):
        assert "this memory is another process's" in user.run(call)["text"]
    owner.run("w[0] = 9")
    assert user.run("answer = int(w[0])") == 9


@pytest.mark.parametrize("view", ["w.conj()", "w.conj().imag", "w.real"])
def test_lazy_conjugation_and_negation_are_kept(two, view):
    owner, user = two
    code = f"""
        from dataclasses import astuple
        with saver.region(W, exportable=True):
            w = torch.tensor([1 - 2j, 3 - 4j])
        v = {view}
        answer = [astuple(saver.share(v)), str(v.tolist())]
    """
    shared, want = owner.run(code)
    assert user.run(f"v = saver.attach(saver.Shared(*{shared})); answer = str(v.tolist())") == want


def test_a_process_that_leaves_the_others_has_its_own_tensors(two):
    owner = two[0]
    owner.run(MAKE + "shared = saver.share(w); saver.configure(shared=False)")
    assert owner.run("answer = saver.attach(shared).data_ptr() == w.data_ptr()") is True
    owner.run("saver.configure(shared=True)")


def test_old_offers_go(two):
    owner = two[0]
    owner.run(MAKE)
    code = """
        for _ in range(400):
            saver.share(w)
            saver.pause(W)
            saver.resume(W)
        answer = len(offers._offers) <= 256
    """
    assert owner.run(code) is True


def test_a_forked_child_tries_nothing(two):
    user = two[1]
    attach(two)
    code = """
        import os, threading
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            w = None
            os.write(writer, str(threading.active_count()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        answer = os.read(reader, 10).decode()
        os.close(reader), os.close(writer)
    """
    assert user.run(code) == "1"
    assert user.run("answer = int(w[0])") == 3
