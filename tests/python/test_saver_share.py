"""Memory that one process lends another: `saver.share` and `saver.attach`, in processes of one simulated device."""

import json
import os
import pickle
import time

import pytest

torch = pytest.importorskip("torch")

from companions import pair  # noqa: E402
from ebbtide.saver import Shared  # noqa: E402

pytestmark = pytest.mark.sim_only

MAKE = """
from dataclasses import astuple
with saver.region("weights", exportable=True):
    tensor_w = torch.arange(1000, dtype=torch.int32, device=saver.device)
answer = astuple(saver.share(tensor_w))
"""
ATTACH = "tensor_w = saver.attach(saver.Shared(*{shared}), pauseable={pauseable}); answer = tensor_w[:3].tolist()"
PAUSE = "answer = saver.pause('weights').bytes"
RESUME = "answer = saver.resume('weights').bytes"
LET_GO = """
import gc, time
tensor_w = tensor_v = None
gc.collect()
answer = True
"""
CLEAN = """
import gc
for name in [name for name in globals() if name.startswith("tensor_")]:
    del globals()[name]
gc.collect()
answer = True
"""
FREE = (
    "saver.pause(missing_ok=True); saver.resume(missing_ok=True); saver.trim(); answer = saver.stats()['device_bytes']"
)


@pytest.fixture(scope="module")
def made():
    with pair("lending", 256) as found:
        yield found


@pytest.fixture
def two(made):
    """The owner and the user. One that a test has killed is made anew."""
    for one in made:
        one.revive()
    yield made
    living = [one for one in made if one.poll() is None]
    assert [one.run(CLEAN) for one in living] == [True] * len(living)
    for one in living:
        assert one.run_until(FREE, 0) == 0


def attach(user, shared, pauseable=False):
    return user.run(ATTACH.format(shared=shared, pauseable=pauseable))


def test_both_see_what_either_writes(two):
    owner, user = two
    shared = owner.run(MAKE)
    assert attach(user, shared) == [0, 1, 2]
    user.run("tensor_w[1] = 77")
    assert owner.run("tensor_w[2] = 88; answer = tensor_w[:3].tolist()") == [0, 77, 88]
    assert user.run("answer = tensor_w[:3].tolist()") == [0, 77, 88]
    held = user.run("answer = [saver.stats()['device_bytes'], len(saver.tags())]")
    assert held[0] == 0, "what is borrowed is the owner's"


@pytest.mark.parametrize(
    ("make", "look"),
    [
        ("base = torch.arange(24.0).reshape(4, 6); tensor_w = base[1:, ::2]", "tensor_w"),
        ("tensor_w = torch.arange(12).to(torch.bfloat16).reshape(3, 4).t()", "tensor_w.float()"),
        ("tensor_w = torch.tensor(7.5)", "tensor_w"),
        ("tensor_w = torch.nn.Parameter(torch.ones(3, 2))", "tensor_w.detach()"),
    ],
)
def test_views_keep_their_shape(two, make, look):
    owner, user = two
    code = f"""
        from dataclasses import astuple
        with saver.region("weights", exportable=True):
            {make}
        answer = [astuple(saver.share(tensor_w)), {look}.tolist()]
        base = None
    """
    shared, want = owner.run(code)
    attach(user, shared)
    assert user.run(f"answer = {look}.tolist()") == want


def test_a_pause_is_refused_and_names_who_uses_the_memory(two):
    owner, user = two
    shared = owner.run(MAKE)
    attach(user, shared)
    for call in ("pause('weights')", "pause()", "swap(pause='weights', resume='other')", "demote('weights')"):
        owner.run("with saver.region('other'): pass")
        refused = owner.run(f"saver.{call}")
        assert refused["error"] == "StateError", call
    refused = owner.run(PAUSE)
    assert f"python {user.pid} uses 1 of its tensors" in refused["text"] and "pauseable=True" in refused["text"]
    assert owner.run("answer = tensor_w[:3].tolist()") == [0, 1, 2]
    user.run(LET_GO)
    assert owner.run_until(PAUSE, 2 << 20) == 2 << 20


def test_who_agreed_loses_it_and_gets_it_back(two):
    owner, user = two
    assert attach(user, owner.run(MAKE), pauseable=True) == [0, 1, 2]
    address = user.run("answer = tensor_w.data_ptr()")
    for turn in range(3):
        assert owner.run(PAUSE) == 2 << 20, turn
        assert user.run("from ebbtide import _core; answer = _core.query_device(0).free_bytes") == 256 << 20
        assert owner.run(RESUME) == 2 << 20
        owner.run(f"tensor_w[0] = {turn}")
        assert user.run("answer = [tensor_w.data_ptr(), *tensor_w[:3].tolist()]") == [address, turn, 1, 2]


def test_one_that_did_not_agree_keeps_all_of_it_here(two):
    owner, user = two
    shared = owner.run(MAKE)
    attach(user, shared, pauseable=True)
    user.run(f"tensor_v = saver.attach(saver.Shared(*{shared}))")
    assert owner.run(PAUSE)["error"] == "StateError"
    assert user.run("answer = tensor_w[:3].tolist()") == [0, 1, 2]


@pytest.mark.parametrize("ways", ["with saver.paused('weights'): pass", "saver.swap(pause='weights', resume='away')"])
def test_every_way_to_pause_asks_for_it(two, ways):
    owner, user = two
    attach(user, owner.run(MAKE), pauseable=True)
    owner.run("""
        with saver.region("away"):
            tensor_a = torch.ones(1000, device=saver.device)
        saver.pause("away")
    """)
    assert owner.run(ways) is None
    owner.run("saver.resume()")
    assert user.run("answer = tensor_w[:3].tolist()") == [0, 1, 2]


def test_a_pause_that_fails_gives_it_back(two):
    owner, user = two
    attach(user, owner.run(MAKE), pauseable=True)
    refused = owner.run("saver.configure(host_limit=1); saver.pause('weights')")
    owner.run("saver.configure(host_limit=None)")
    assert refused["error"] == "StoreError"
    assert user.run("answer = tensor_w[:3].tolist()") == [0, 1, 2]


def test_a_resume_that_does_not_wait_gives_it_back_at_its_end(two):
    owner, user = two
    attach(user, owner.run(MAKE), pauseable=True)
    owner.run(PAUSE)
    owner.run("saver.resume('weights', wait=False).wait()")
    assert user.run("answer = tensor_w[:3].tolist()") == [0, 1, 2]


# --- stale shares ---


def test_a_share_is_stale_after_a_pause(two):
    owner, user = two
    shared = owner.run(MAKE)
    owner.run(PAUSE)
    assert "stale" in attach(user, shared)["text"]
    owner.run(RESUME)
    refused = attach(user, shared)
    assert refused["error"] == "StateError" and "'weights' was paused since. Share the tensor again" in refused["text"]
    again = owner.run("answer = astuple(saver.share(tensor_w))")
    assert attach(user, again) == [0, 1, 2]


@pytest.mark.parametrize("end", ["del tensor_w; gc.collect()", "saver.adopt(tensor_w, tag='other')"])
def test_a_share_is_stale_when_the_tensor_is_gone_or_has_moved(two, end):
    owner, user = two
    shared = owner.run(MAKE)
    owner.run(f"import gc; {end}")
    assert attach(user, shared)["text"] == "this share is stale: its tensor is gone"


def test_a_share_of_a_dead_process_and_invented_ones(two):
    owner, user = two
    shared = owner.run(MAKE)
    invented = [shared[0], "0" * 32, *shared[2:]]
    assert "stale" in attach(user, invented)["text"]
    for name in ("1-00000000", "../1-00000000", "x" * 300):
        assert "is gone" in attach(user, [name, *shared[1:]])["text"]
    owner.kill()
    refused = attach(user, shared)
    assert refused["error"] == "StateError" and f"the process {owner.pid} that shared this" in refused["text"]


def test_what_is_attached_lives_on_here_and_there(two):
    """Nothing else comes to lie in the owner's memory, and the user's outlives the owner."""
    owner, user = two
    attach(user, owner.run(MAKE))
    owner.run("""
        import gc
        del tensor_w
        gc.collect()
        with saver.region("weights", exportable=True):
            tensor_others = [torch.full((1000,), 5, dtype=torch.int32, device=saver.device) for _ in range(100)]
    """)
    assert user.run("answer = tensor_w[:3].tolist()") == [0, 1, 2]
    owner.kill()
    assert user.run("tensor_w += 1; answer = tensor_w[:3].tolist()") == [1, 2, 3]


@pytest.mark.parametrize("is_away", [False, True])
def test_a_user_that_is_killed_uses_it_no_more(two, is_away):
    owner, user = two
    attach(user, owner.run(MAKE), pauseable=is_away)
    if is_away:
        owner.run(PAUSE)
    user.kill()
    if is_away:
        assert owner.run(RESUME) == 2 << 20
    assert owner.run_until(PAUSE, 2 << 20) == 2 << 20
    owner.run(RESUME)
    assert owner.run("answer = tensor_w[:3].tolist()") == [0, 1, 2]


def test_a_forked_child_keeps_nothing_borrowed(two):
    owner, user = two
    attach(user, owner.run(MAKE))
    user.run("import os, time; child = os.fork(); child or (time.sleep(100), os._exit(0))")
    child = user.run("answer = child")
    user.kill()
    try:
        assert owner.run_until(PAUSE, 2 << 20) == 2 << 20
    finally:
        os.kill(child, 9)


def test_tensors_of_one_allocation_are_one_import(two):
    owner, user = two
    shared = owner.run("""
        from dataclasses import astuple
        with saver.region("weights", exportable=True):
            tensor_w = [torch.full((1000,), each, dtype=torch.int32, device=saver.device) for each in range(20)]
        answer = [astuple(saver.share(each)) for each in tensor_w]
    """)
    user.run(f"tensor_w = [saver.attach(saver.Shared(*each)) for each in {shared}]")
    assert user.run("answer = [int(each[0]) for each in tensor_w]") == list(range(20))
    user.run("del tensor_w[1:]; import gc; gc.collect()")
    time.sleep(0.2)
    assert owner.run(PAUSE)["error"] == "StateError"
    assert user.run("answer = int(tensor_w[0][0])") == 0
    user.run(LET_GO)
    assert owner.run_until(PAUSE, 2 << 20) == 2 << 20


def test_descriptors_do_not_leak(two):
    owner, user = two
    count = "import os; answer = len(os.listdir('/proc/self/fd'))"
    attach(user, owner.run(MAKE))
    user.run(LET_GO)
    assert owner.run_until(PAUSE, 2 << 20) == 2 << 20
    owner.run(RESUME)
    before = owner.run(count), user.run(count)
    for _ in range(5):
        attach(user, owner.run("answer = astuple(saver.share(tensor_w))"), pauseable=True)
        owner.run(PAUSE)
        owner.run(RESUME)
        user.run(LET_GO)
        assert (
            owner.run_until("from ebbtide import _core; answer = _core.find(tensor_w.data_ptr()).is_lent", False)
            is False
        )
    assert (owner.run(count), user.run(count)) == before


def test_too_few_descriptors_are_an_error_that_says_so(two):
    owner, user = two
    shared = owner.run(MAKE)
    refused = user.run(f"""
        import os, resource
        tensor_v = saver.attach(saver.Shared(*{shared}))  # the connection is there
        shared = {
        owner.run(
            "with saver.region('weights', exportable=True): tensor_l = torch.ones(3 << 20); "
            "answer = astuple(saver.share(tensor_l))"
        )
    }
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, limits[1]))
        files = []
        try:
            while True:
                files.append(os.dup(0))
        except OSError:
            pass
        try:
            saver.attach(saver.Shared(*shared))
            answer = "attached"
        except Exception as error:
            answer = str(error)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in files:
            os.close(file)
    """)
    assert "may open no more files" in str(refused)
    user.run(LET_GO)


# --- in one process, and through pickles ---


def test_a_process_attaches_its_own(two):
    (owner, _) = two
    owner.run(MAKE)
    assert owner.run("""
        tensor_v = saver.attach(saver.share(tensor_w[3:5]))
        answer = [tensor_v.tolist(), tensor_v.untyped_storage()._cdata == tensor_w.untyped_storage()._cdata]
    """) == [[3, 4], True]
    assert owner.run("answer = saver.pause('weights').bytes > 0")


DUMP = """
import base64, io, pickle
from multiprocessing.reduction import ForkingPickler
import torch.multiprocessing
def dump(thing):
    ForkingPickler(out := io.BytesIO()).dump(thing)
    return base64.b64encode(out.getvalue()).decode()
"""


def test_a_queue_of_torchs_sends_a_tensor_without_a_copy(two):
    owner, user = two
    owner.run(MAKE)
    sent = owner.run(DUMP + "answer = dump({'w': tensor_w[5:8]})")
    assert len(sent) < 4000
    user.run("import base64, pickle")
    user.run(f"tensor_d = pickle.loads(base64.b64decode({sent!r}))")
    owner.run("tensor_w[5] = -1")
    assert user.run("answer = tensor_d['w'].tolist()") == [-1, 6, 7]


def test_what_was_sent_lives_until_it_has_arrived(two):
    owner, user = two
    sent = owner.run(
        DUMP + "import gc\n"
        "with saver.region('weights', exportable=True): tensor_t = torch.full((5,), 3.0)\n"
        "answer = dump(tensor_t); del tensor_t; gc.collect()\n"
    )
    owner.run("with saver.region('weights', exportable=True): tensor_o = [torch.ones(5) for _ in range(50)]")
    user.run(f"import base64, pickle; tensor_t = pickle.loads(base64.b64decode({sent!r}))")
    assert user.run("answer = tensor_t.tolist()") == [3.0] * 5
    user.run("del tensor_t; import gc; gc.collect()")
    assert owner.run_until("answer = saver.pause('weights').bytes > 0", True)


def test_the_result_is_plain_data():
    shared = Shared("4711-01234567", "0" * 32, 2, "torch.int32", (2,), (1,), 0)
    assert Shared(*json.loads(json.dumps([*vars(shared).values()]))).owner == shared.owner
    assert pickle.loads(pickle.dumps(shared)) == shared
