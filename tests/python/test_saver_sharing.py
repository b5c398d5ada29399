"""Sending a region's tensor to another process is an error that names the tag. Every other object is sent as before."""

import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest

torch = pytest.importorskip("torch")

pytest.importorskip("torch.multiprocessing")  # registers the reducers of tensors

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from ebbtide.saver.pools import captures  # noqa: E402
from ebbtide.saver.regions import startup  # noqa: E402
from ebbtide.saver.state import program  # noqa: E402
from ebbtide.saver.tensors import process_sharing  # noqa: E402


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


def test_every_way_of_a_storage_is_refused_with_its_arguments(saver, tag):
    """The methods of torch's CUDA storages are faked, because they need a GPU."""
    calls = []

    class Storage:
        def __init__(self, tensor):
            self.data_ptr = tensor.data_ptr

        def _share_cuda_(self, *args, **kwargs):
            calls.append((args, kwargs))
            return "handle"

    process_sharing.install(Storage)
    with saver.region(tag):
        inside = torch.ones(10, device=saver.device)
    outside = torch.ones(10, device=saver.device)
    for name in process_sharing.METHODS:
        with pytest.raises(StateError, match=f"tag '{tag}'"):
            getattr(Storage(inside), name)()
        assert getattr(Storage(outside), name)(1, two=2) == "handle"
        assert getattr(Storage(torch.empty(0)), name)() == "handle"
    assert calls == [((1,), {"two": 2}), ((), {})]


def test_in_a_pauseable_program_sharing_is_refused_without_a_region(saver, tag, monkeypatch):
    """On a GPU, that is; here torch is said to have one, and its storages are not touched."""
    installed = []
    monkeypatch.setattr(program, "_own", program.Program(tag, 1))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(captures, "install", lambda: None)
    monkeypatch.setattr(process_sharing, "install", lambda: installed.append(None))
    startup.introduce_program()
    assert installed == [None]


def test_installing_twice_refuses_once():
    class Storage:
        def _share_cuda_(self):
            return "handle"

    process_sharing.install(Storage)
    first = Storage._share_cuda_
    process_sharing.install(Storage)
    assert Storage._share_cuda_ is first


def test_torchs_storages_have_these_methods(saver, tag):
    with saver.region(tag):
        pass
    for name in process_sharing.METHODS:
        assert getattr(torch.UntypedStorage, name).__code__.co_name == "refuse_or_share"
