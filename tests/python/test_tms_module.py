"""The module torch_memory_saver over ebbtide: its surface, and what each of its calls does."""

import ctypes
import gc
import threading

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import OutOfMemoryError, StateError  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def cdll(tms):
    return tms._ensure_initialized()._binary_wrapper.cdll


def make(saver, value, count=MIB):
    return torch.full((count,), value, dtype=torch.uint8, device=saver.device)


@pytest.mark.device_memory
def test_a_pause_frees_the_memory_and_a_resume_brings_back_the_bytes(saver, tms, tag, capsys):
    from torch_memory_saver.testing_utils import get_and_print_gpu_memory

    outside = make(saver, 100)
    with tms.region(tag=tag, enable_cpu_backup=True):
        inside = make(saver, 7, 64 * MIB)
    tms.pause(tag)  # the first one loads kernels, which takes device memory
    tms.resume(tag)
    address, before = inside.data_ptr(), get_and_print_gpu_memory("before")
    tms.pause(tag)
    paused = get_and_print_gpu_memory("paused")
    tms.resume(tag)
    assert before - paused >= 64 * MIB <= get_and_print_gpu_memory("resumed") - paused
    assert inside.data_ptr() == address and bool((inside == 7).all()) and bool((outside == 100).all())
    assert capsys.readouterr().out.splitlines()[1].endswith("(paused)")


def test_a_backend_needs_a_backup_and_there_are_two(tms):
    for call in (tms.region, lambda **given: tms.cuda_graph(None, **given)):
        with pytest.raises(ValueError, match="requires enable_cpu_backup=True"):
            call(cpu_backup_backend="mmap")
        with pytest.raises(ValueError, match="mmap or pinned, not 'paper'"):
            call(enable_cpu_backup=True, cpu_backup_backend="paper")
    with pytest.raises(ValueError, match="mutually exclusive"):
        tms.region(enable_cpu_backup=True, enable_disk_backup=True)
    assert tms._impl is None


@pytest.mark.parametrize("name", [None, ""])
def test_no_tag_is_every_tag(saver, tms, tag, tag2, name):
    with tms.region(tag=tag):
        first = make(saver, 1)
    with saver.region(tag2):
        second = make(saver, 2)
    tms.pause(name)
    assert saver.is_paused(tag) and saver.is_paused(tag2)
    tms.resume(name)
    assert not saver.is_paused(tag) and bool((second == 2).all()) and not first.any()


def test_what_is_empty_unknown_or_done_already_is_no_error(saver, tms, tag):
    tms.pause("never named")
    tms.resume("never named")
    with tms.region(tag=tag, enable_cpu_backup=True):
        tensor = make(saver, 3)
    tms.resume(tag)
    tms.pause(tag)
    tms.pause(tag)
    with tms.region(tag=tag, enable_cpu_backup=True):  # a part of the tag is resident
        other = make(saver, 4)
    assert bool((other == 4).all())
    tms.pause()
    tms.resume(tag)
    tms.resume()
    assert bool((tensor == 3).all()) and bool((other == 4).all())


@pytest.mark.parametrize("name", ["a/b", "*", " ", "Gewichte ü", "%", "x" * 1000, "tab\there", "kv_cache"])
def test_any_text_is_a_tag(saver, tms, cdll, name):
    with tms.region(tag=name, enable_cpu_backup=True):
        assert cdll.tms_get_current_tag() == name.encode()
        tensor = make(saver, 5)
    tms.pause(f"{name}?")
    assert not _core.is_away(tensor.data_ptr(), 1)
    tms.pause(name)
    assert _core.is_away(tensor.data_ptr(), 1)
    tms.resume(name)
    assert bool((tensor == 5).all())


def test_a_tag_of_the_savers_is_the_same_tag_here(saver, tms, tag):
    with saver.region(tag):
        tensor = make(saver, 6)
    tms.pause(tag)
    assert saver.is_paused(tag)
    saver.resume(tag)
    assert bool((tensor == 6).all())


def test_instances_share_one_core(saver, tms_module, tms, tag):
    with tms.region(tag=tag, enable_cpu_backup=True):
        tensor = make(saver, 8)
    tms_module.torch_memory_saver.pause(tag)
    assert torch.equal(tms_module.TorchMemorySaver().get_cpu_backup(tensor), torch.full((MIB,), 8, dtype=torch.uint8))
    tms.resume(tag)
    assert bool((tensor == 8).all())


def state(cdll):
    return (
        cdll.tms_get_interesting_region(),
        cdll.tms_get_current_tag().decode(),
        cdll.tms_get_enable_cpu_backup(),
        cdll.tms_get_enable_disk_backup(),
        cdll.tms_get_cpu_backup_backend().decode(),
    )


def test_the_symbols_show_where_the_thread_is(tms, cdll):
    outside = state(cdll)
    assert outside == (False, "default", False, False, "pinned")
    with tms.region(tag="model", enable_cpu_backup=True, cpu_backup_backend="mmap"):
        model = (True, "model", True, False, "mmap")
        assert state(cdll) == model
        with tms.region(tag="grads"):
            assert state(cdll)[:4] == (True, "grads", False, False)
            with tms.disable():
                assert not cdll.tms_get_interesting_region()
            with tms.region(enable_disk_backup=True):
                assert state(cdll)[:4] == (True, "default", False, True)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(state(cdll)))
        thread.start()
        thread.join(30)
        assert seen == [outside] and state(cdll) == model
        with tms._impl._with_region_config(tag="raw", enable_cpu_backup=True, cpu_backup_backend="pinned"):
            assert state(cdll) == (True, "raw", True, False, "pinned")
        assert state(cdll) == model
    assert state(cdll) == outside


def test_a_configuration_alone_leaves_the_region_its_pool(saver, tms, tag):
    with tms.region(tag=tag, enable_cpu_backup=True), tms._impl._with_region_config("other", False, None):
        tensor = make(saver, 1)
    assert _core.find(tensor.data_ptr()).tag == tag


def test_a_caller_that_turns_tagging_off_for_a_while(tms, cdll):
    """As slime and miles do around DeepEP's buffers."""
    with tms.region(tag="model"):
        original = cdll.tms_get_interesting_region()
        cdll.tms_set_interesting_region(False)
        assert not cdll.tms_get_interesting_region()
        cdll.tms_set_interesting_region(original)
        assert state(cdll)[:2] == (True, "model")


def test_an_exception_or_a_decorator_leaves_nothing_open(saver, tms, cdll, tag):
    with pytest.raises(KeyError), tms.region(tag=tag), tms.disable():
        raise KeyError
    assert not cdll.tms_get_interesting_region()

    @tms.region(tag=tag, enable_cpu_backup=True)
    def build():
        return make(saver, 9)

    assert [_core.find(build().data_ptr()).tag for _ in range(2)] == [tag, tag]
    tms.pause(tag)
    tms.resume(tag)


def test_disable_gives_memory_that_no_pause_takes(saver, tms, tag):
    with tms.region(tag=tag):
        inside = make(saver, 1)
        with tms.disable():
            outside = make(saver, 2)
    assert _core.find(outside.data_ptr()) is None is not _core.find(inside.data_ptr())
    tms.pause()
    with tms.disable():  # while everything is away
        assert bool((make(saver, 3) == 3).all()) and bool((outside == 2).all())
    tms.resume()


def test_the_hook_mode_is_accepted_at_any_time(tms, tag):
    assert tms.hook_mode == "preload" and tms.enabled
    tms.hook_mode = "torch"
    with tms.region(tag=tag):
        tms.hook_mode = "preload"
    assert tms.hook_mode == "preload"
    with pytest.raises(ValueError, match="preload or torch, not 'both'"):
        tms.hook_mode = "both"


def test_a_resume_without_room_is_torchs_error_and_works_later(saver, tms, tag, tag2):
    with tms.region(tag=tag, enable_cpu_backup=True):
        tensor = make(saver, 1, 8 * MIB)
    tms.pause(tag)
    held = _core.query_device(0).held_bytes
    saver.configure(device_limit=held + 4 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        tms.resume(tag)
    assert isinstance(caught.value, OutOfMemoryError) and saver.is_paused(tag)
    saver.configure(device_limit=None)
    tms.resume(tag)
    assert bool((tensor == 1).all())


def test_a_pause_inside_the_region_is_a_clear_error(tms, tag):
    with tms.region(tag=tag), pytest.raises(StateError, match=tag):
        tms.pause(tag)


def test_a_graph_gets_the_callers_arguments_and_a_pool_in_place_of_theirs(tms, tag, monkeypatch):
    calls = []
    monkeypatch.setattr("torch_memory_saver.implementation.cuda_graph_in_place_of", lambda *given: calls.append(given))
    tms.cuda_graph(cuda_graph="graph", pool=(0, 1), stream="side", tag=f"{tag}/")
    tms.cuda_graph("graph", capture_error_mode="relaxed", enable_cpu_backup=True, cpu_backup_backend="mmap")
    assert calls == [
        ((0, 1), "graph", f"{tag}%2F", None, {"stream": "side", "capture_error_mode": "global"}),
        (None, "graph", "default", "ram", {"stream": None, "capture_error_mode": "relaxed"}),
    ]


def test_a_pool_that_the_caller_drops_gives_its_memory_back(saver, tms, tag):
    with tms.region(tag=tag, enable_cpu_backup=True):
        tensor = make(saver, 1, 32 * MIB)
    pool = tms._impl._mem_pools.pop((tag, True, False, "pinned", 0))
    assert (tag, True, False, "pinned", 0) not in tms._impl._mem_pools
    with tms._impl._with_region_config(tag=tag, enable_cpu_backup=True, cpu_backup_backend="pinned"):
        del tensor, pool
        gc.collect()
        if saver.device == "cuda":
            torch.cuda.empty_cache()
    assert saver.tags()[tag].size_bytes == 0
    with tms.region(tag=tag, enable_cpu_backup=True):
        again = make(saver, 2)
    assert bool((again == 2).all())


def test_a_pool_that_is_dropped_while_its_tensors_live_keeps_them(saver, tms, tag):
    with tms.region(tag=tag, enable_cpu_backup=True):
        tensor = make(saver, 3)
    del tms._impl._mem_pools[tag, True, False, "pinned", 0]
    tms.pause(tag)
    tms.resume(tag)
    assert bool((tensor == 3).all())


def test_the_library_finds_other_names_in_the_process(cdll):
    assert cdll.getpid() == ctypes.CDLL(None).getpid()
    with pytest.raises(AttributeError, match="tms_no_such_name"):
        cdll.tms_no_such_name  # noqa: B018


def test_the_surface_has_the_names_of_torch_memory_saver(tms_module):
    from torch_memory_saver import binary_wrapper, entrypoint, testing_utils, utils
    from torch_memory_saver.hooks import base, mode_preload, mode_torch

    assert isinstance(tms_module.torch_memory_saver, tms_module.TorchMemorySaver)
    assert entrypoint.TorchMemorySaver is tms_module.TorchMemorySaver
    assert mode_preload.configure_subprocess is tms_module.configure_subprocess
    assert testing_utils.is_xpu is utils.is_xpu and not utils.is_xpu()
    for mode, kind in (("preload", mode_preload.HookUtilModePreload), ("torch", mode_torch.HookUtilModeTorch)):
        made = base.HookUtilBase.create(mode)
        assert type(made) is kind and made.get_path_binary() == _core.loaded_library()
    stem = "torch_memory_saver_hook_mode_torch"
    assert str(utils.get_binary_path_from_package(stem)) == _core.loaded_library()
    wrapper = binary_wrapper.BinaryWrapper(path_binary=_core.loaded_library())
    assert wrapper.cdll.tms_get_current_tag() == b"default"


def test_the_allocator_of_mode_torch_is_the_cores(tms_module, monkeypatch):
    from torch_memory_saver.hooks.mode_torch import HookUtilModeTorch

    class Pluggable:
        def __init__(self, *given):
            self.given = given

        def allocator(self):
            return self.given

    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", Pluggable)
    given = HookUtilModeTorch().get_allocator()
    assert given == (_core.loaded_library(), "tms_torch_malloc", "tms_torch_free")
    assert all(hasattr(ctypes.CDLL(given[0]), name) for name in given[1:])


def test_a_region_inherits_the_backend_through_one_without_a_backup(saver, tms, tag):
    def backup(tensor):
        return _core.find(tensor.data_ptr()).backup

    with tms.region(tag=tag, enable_cpu_backup=True, cpu_backup_backend="mmap"):
        with tms.region(tag=tag):
            dropped = make(saver, 1)
            with tms.region(tag=tag, enable_cpu_backup=True):
                kept = make(saver, 2)
            with tms.region(tag=tag, enable_cpu_backup=True, cpu_backup_backend="pinned"), tms.region(tag=tag):
                with tms.region(tag=tag, enable_cpu_backup=True):
                    pinned = make(saver, 3)
    with tms.region(tag=tag), tms.region(tag=tag, enable_cpu_backup=True):
        outside = make(saver, 4)
    assert [backup(tensor) for tensor in (dropped, kept, pinned, outside)] == [0, 1, 2, 2]


def test_what_is_no_tag_is_said_in_words(tms):
    with pytest.raises(TypeError, match=r"^a tag is a str, not int$"):
        tms.region(tag=3)
    with pytest.raises(UnicodeEncodeError):
        tms.region(tag="\ud800")
    for call in (tms.pause, tms.resume):
        for wrong in (["a"], []):
            with pytest.raises(TypeError, match=r"^a tag is a str, not list$"):
                call(wrong)


def test_what_other_packages_take_of_the_inside_is_there(tms_module, saver, tag):
    """dynamo's memory service builds on HookUtilBase and makes an implementation of its own, patches of slime call
    set_config, and AReaL asks for the arguments of the constructor."""
    from torch_memory_saver import entrypoint
    from torch_memory_saver.hooks.base import HookUtilBase

    made = tms_module.TorchMemorySaver()
    made.hook_mode = "torch"
    assert made._impl_ctor_kwargs == {"hook_mode": "torch"}
    implementation = made._ensure_initialized()
    assert not hasattr(made, "_impl_ctor_kwargs") and isinstance(implementation, entrypoint._TorchMemorySaverImpl)
    made.hook_mode = "preload"
    assert HookUtilBase.create(hook_mode="torch").get_path_binary() == _core.loaded_library()
    assert HookUtilBase().get_allocator() is None
    with implementation.disable(dispose_mem_pool_after_use=True):
        assert _core.find(make(saver, 1).data_ptr()) is None
    with pytest.raises(ValueError, match="not supported"):
        implementation.disable(dispose_mem_pool_after_use=False)


def test_the_configuration_of_a_thread_is_set_in_one_call(tms, cdll):
    before = state(cdll)
    wrapper = tms._impl._binary_wrapper
    for changed, expected in (
        ({"enable_cpu_backup": True}, (True, "a/b", True, False, "pinned")),
        ({"enable_cpu_backup": True, "cpu_backup_backend": "mmap"}, (True, "a/b", True, False, "mmap")),
        ({"enable_cpu_backup": False, "enable_disk_backup": True}, (True, "a/b", False, True, "mmap")),
        ({"enable_cpu_backup": False}, (True, "a/b", False, False, "mmap")),
    ):
        wrapper.set_config(tag="a/b", interesting_region=True, **changed)
        assert state(cdll) == expected
    wrapper.set_config(
        tag=before[1], interesting_region=before[0], enable_cpu_backup=before[2], cpu_backup_backend=before[4]
    )
    assert state(cdll) == before


def test_a_pool_may_be_asked_for_before_its_region(saver, tms, tag):
    pools = tms._ensure_initialized()._mem_pools
    pool = pools[tag, True, False, "pinned", 0]
    with tms.region(tag=tag, enable_cpu_backup=True):
        kept = make(saver, 1)
    assert pools[tag, True, False, "pinned", 0] is pool and bool((kept == 1).all())
    with pytest.raises(KeyError):
        pools["another form of key"]


def test_the_saver_answers_for_a_tag_that_it_could_not_have(saver, tms):
    from ebbtide.compat.torch_memory_saver import saver_tag

    with tms.region(tag="layer/0"):
        kept = make(saver, 1)
    (row,) = saver.survivors(saver_tag("layer/0"))
    assert row.address == kept.data_ptr() and saver_tag("plain") == "plain"
    with pytest.raises(TypeError, match=r"^a tag is a str, not bytes$"):
        saver_tag(b"layer/0")
