"""Two processes on one GPU: lent memory, torch's queues, hand-overs. The memory is the driver's own."""

import tempfile

import pytest

pytest.importorskip("torch")

from companions import Companion, running

pytestmark = pytest.mark.gpu
SHARED = {"EBBTIDE_DRIVER": "cuda"}
MIB = 2**20


@pytest.fixture(scope="module")
def two():
    with tempfile.TemporaryDirectory() as path:  # pytest's own are too long for the address of a socket
        with running(2, {**SHARED, "EBBTIDE_SHARED": "1", "EBBTIDE_SHARED_FOLDER": f"{path}/place"}) as made:
            yield made


def make(owner: Companion, tag: str, mib: int, value: int) -> None:
    code = f"""
        with saver.region({tag!r}, exportable=True):
            {tag} = torch.full(({mib} << 20,), {value}, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
    """
    assert owner.run(code) is None


def test_lent_memory_leaves_and_comes_back(two):
    owner, user = two
    make(owner, "lent", 300, 3)
    shared = owner.run("from dataclasses import astuple; answer = astuple(saver.share(lent))")
    assert user.run(f"w = saver.attach(saver.Shared(*{shared}), pauseable=True); answer = int(w.max())") == 3
    assert user.run("w.fill_(4); torch.cuda.synchronize(); answer = w.device.index") == 0
    assert owner.run("answer = int(lent.min())") == 4
    free = "answer = torch.cuda.mem_get_info()[0]"
    before = owner.run(free)
    assert owner.run("answer = saver.pause('lent').bytes") == 300 * MIB
    assert owner.run(free) - before >= 290 * MIB, "the user holds nothing of it"
    assert owner.run("answer = saver.resume('lent').bytes") == 300 * MIB
    assert owner.run("lent.add_(1); torch.cuda.synchronize()") is None
    assert user.run("answer = [int(w.min()), int(w.max())]") == [5, 5]
    assert user.run("w = None; __import__('gc').collect()") is None
    assert owner.run_until("answer = saver.pause('lent').bytes", 300 * MIB) == 300 * MIB


def test_a_queue_of_torchs_sends_no_copy(two):
    owner, user = two
    make(owner, "sent", 64, 7)
    dump = """
        import base64, io, pickle
        from multiprocessing.reduction import ForkingPickler
        from torch.multiprocessing.reductions import reduce_tensor
        ForkingPickler(out := io.BytesIO()).dump([sent[5:9], reduce_tensor(sent)])
        answer = base64.b64encode(out.getvalue()).decode()
    """
    text = owner.run(dump)
    code = f"""
        import base64, pickle
        part, (rebuild, arguments) = pickle.loads(base64.b64decode({text!r}))
        arguments = list(arguments)
        arguments[6] = 0  # as vLLM does for a process that sees other devices
        whole = rebuild(*arguments)
        answer = [part.tolist(), int(whole.max()), part.data_ptr() - whole.data_ptr()]
    """
    assert user.run(code) == [[7] * 4, 7, 5]
    assert owner.run("sent.fill_(9); torch.cuda.synchronize()") is None
    assert user.run("answer = [part.tolist(), int(whole.min())]") == [[9] * 4, 9]
    assert user.run("part = whole = arguments = None; __import__('gc').collect()") is None
    assert owner.run_until("answer = saver.pause('sent').bytes", 64 * MIB) == 64 * MIB


def test_memory_is_handed_over_to_and_fro(two):
    giver, taker = two
    make(giver, "out", 3000, 3)
    make(taker, "incoming", 3000, 5)
    assert taker.run("saver.pause('incoming')") is None
    for _ in range(3):
        giver.start(f"answer = saver.hand_over(pause='out', to={taker.pid}).bytes")
        assert taker.run_until("from ebbtide.processes import handing; answer = len(handing._offers)", 1) == 1
        assert taker.run("answer = saver.resume('incoming').bytes") == 3000 * MIB
        assert giver.answer() == 3000 * MIB
        assert taker.run("answer = [int(incoming.min()), int(incoming.max())]") == [5, 5]
        taker.start(f"answer = saver.hand_over(pause='incoming', to={giver.pid}).bytes")
        assert giver.run_until("from ebbtide.processes import handing; answer = len(handing._offers)", 1) == 1
        assert giver.run("answer = saver.resume('out').bytes") == 3000 * MIB
        assert taker.answer() == 3000 * MIB
        assert giver.run("answer = [int(out.min()), int(out.max())]") == [3, 3]
