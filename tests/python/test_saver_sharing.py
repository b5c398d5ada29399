"""Sending a region's tensor to another process is an error that names the tag. Every other object is sent as before."""

import io
import pickle
import types
from multiprocessing.reduction import ForkingPickler

import pytest

torch = pytest.importorskip("torch")

pytest.importorskip("torch.multiprocessing")  # registers the reducers of tensors

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from ebbtide.saver.pools import captures  # noqa: E402
from ebbtide.saver.regions import startup  # noqa: E402
from ebbtide.saver.sharing import storages, torch_queues  # noqa: E402
from ebbtide.saver.state import program  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402


def send(thing):
    """Sends as a queue of torch.multiprocessing does."""
    ForkingPickler(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(thing)


WAYS = {
    "a tensor": send,
    "a view": lambda tensor: send(tensor[1:]),
    "a parameter": lambda tensor: send(torch.nn.Parameter(tensor)),
    "in a state": lambda tensor: send({"weight": tensor}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("is_paused", [False, True])
def test_a_regions_tensor_is_not_sent(saver, tag, way, is_paused):
    with saver.region(tag):
        tensor = torch.ones(10, device=saver.device)
    address = tensor.data_ptr()
    if is_paused:
        saver.pause(tag)
    with pytest.raises(StateError, match=f"tag '{tag}' can't be shared.*saver.disabled"):
        way(tensor)
    assert tensor.data_ptr() == address
    saver.resume(tag)
    with saver.region(tag), saver.disabled():
        copy = tensor.clone()
    send(copy)


def test_a_program_for_torch_memory_saver_reads_its_own_words(saver, tms):
    with tms.region(tag="weights/0"):
        tensor = torch.ones(10, device=saver.device)
    with pytest.raises(StateError, match=r"tag 'weights/0' can't be .*`with torch_memory_saver\.disable\(\): copy"):
        tensor.untyped_storage()._share_cuda_()


@pytest.mark.sim_only
@pytest.mark.parametrize("share", [torch.Tensor.share_memory_, send], ids=["share_memory_", "send"])
def test_on_the_simulated_device_torch_moves_it_out_of_its_tag(saver, tag, share):
    with saver.region(tag):
        tensor = torch.arange(1000.0)
    share(tensor)
    assert tensor.is_shared() and _core.find(tensor.data_ptr()) is None
    saver.pause(tag)
    assert torch.equal(tensor, torch.arange(1000.0))
    saver.resume(tag)


class Storage:
    """torch's, of which CUDA's methods are faked, because they need a GPU."""

    def __init__(self, tensor):
        self._storage = tensor.untyped_storage()
        self.data_ptr, self.nbytes, self.device = self._storage.data_ptr, self._storage.nbytes, torch.device("cuda:0")

    def _share_cuda_(self, *args, **kwargs):
        return "shared", args, kwargs

    @staticmethod
    def _new_shared_cuda(*args, **kwargs):
        return "opened", args, kwargs

    @staticmethod
    def _release_ipc_counter_cuda(*args, **kwargs):
        return "released", args, kwargs


@pytest.fixture
def fake(monkeypatch):
    made = type("Fake", (Storage,), {"_share_cuda_": Storage._share_cuda_})
    torch_queues.install(made)
    return made


def test_memory_of_others_is_torchs_to_send(saver, tag, fake):
    with saver.region(tag):
        inside = torch.ones(10, device=saver.device)
    outside = torch.ones(10, device=saver.device)
    with pytest.raises(
        StateError, match=f"tag '{tag}' can't be shared with another process: enter its region with exp"
    ):
        fake(inside)._share_cuda_()
    assert fake(outside)._share_cuda_(1, two=2) == ("shared", (1,), {"two": 2})
    assert fake(torch.empty(0))._share_cuda_() == ("shared", (), {})
    assert fake._new_shared_cuda(0, b"cuda", 40, 0) == ("opened", (0, b"cuda", 40, 0), {})
    assert fake._release_ipc_counter_cuda(b"file", 3) == ("released", (b"file", 3), {})


@pytest.mark.sim_only
def test_a_handle_of_ours_goes_where_cudas_would(saver, tag, fake, monkeypatch):
    """As `reduce_tensor` and `rebuild_cuda_tensor` of torch pass it on."""
    stream = types.SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(storages, "StorageWeakRef", lambda storage: StorageWeakRef(storage._storage))
    with saver.region(tag, exportable=True):
        tensor = torch.ones(10, device=saver.device)
    device, handle, size, offset, counter, counter_offset, event, must_wait = fake(tensor)._share_cuda_()
    assert (device, size, offset, counter, counter_offset, event, must_wait) == (0, 40, 0, b"", 0, b"", False)
    arrived = pickle.loads(pickle.dumps(handle))
    assert isinstance(arrived, torch_queues.Handle) and arrived == handle
    assert fake._new_shared_cuda(5, arrived, size, offset, counter, 0, event, must_wait).data_ptr() == tensor.data_ptr()
    assert fake._release_ipc_counter_cuda(counter, 0) is None


def test_in_a_pauseable_program_sharing_is_refused_without_a_region(saver, tag, monkeypatch):
    """On a GPU, that is; here torch is said to have one, and its storages are not touched."""
    installed = []
    monkeypatch.setattr(program, "_own", program.Program(tag, 1))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(captures, "install", lambda: None)
    monkeypatch.setattr(torch_queues, "install", lambda: installed.append(None))
    startup.introduce_program()
    assert installed == [None]


def test_installing_twice_shares_once(fake):
    first = fake._share_cuda_
    torch_queues.install(fake)
    assert fake._share_cuda_ is first


def test_torchs_storages_have_these_methods(saver, tag):
    with saver.region(tag):
        pass
    assert torch.UntypedStorage._share_cuda_.__code__.co_name == "share_in_regions"
    assert torch.UntypedStorage._new_shared_cuda.__code__.co_name == "attach_or_open"
