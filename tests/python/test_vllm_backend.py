"""The backend "ebbtide" and the ways to it, in a stub of vLLM whose signatures are those of two releases."""

import ast
import gc
import importlib
import inspect
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import vllm_stub  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from ebbtide.integrations import vllm as integration  # noqa: E402
from ebbtide.integrations import vllm_allocator  # noqa: E402
from vllm_signatures import PLACES, RELEASES  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def prefix(tag, monkeypatch):
    monkeypatch.setattr(vllm_allocator, "PREFIX", f"{tag}.")
    return f"{tag}."


@pytest.fixture
def allocator(saver, prefix, monkeypatch):
    made = vllm_allocator.Allocator()
    monkeypatch.setattr(vllm_allocator, "_own", made)
    # What `use` replaces for good is put back here.
    for owner in (torch.cuda, torch.cuda.memory, torch.accelerator):
        if hasattr(owner, "empty_cache"):
            monkeypatch.setattr(owner, "empty_cache", owner.empty_cache)
    monkeypatch.delenv("EBBTIDE_VLLM", raising=False)
    yield made
    vllm_stub.uninstall()
    saver.resume()
    gc.collect()
    made.release_pools()


class Model(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((MIB,), 2.0, device=device))
        self.register_buffer("scale", torch.full((1024,), 3.0, device=device))


def start(saver, backend):
    """A worker with a model, a cache and state of the runtime."""
    worker = vllm_stub.Worker(vllm_stub.config(backend), 0, 0, "env://")
    worker.load_model(lambda: Model(saver.device))
    worker.initialize_cache(
        lambda: torch.full((MIB,), 4.0, device=saver.device), lambda: torch.full((MIB,), 5.0, device=saver.device)
    )
    return worker


def values(worker):
    tensors = worker.model.weight, worker.model.scale, worker.cache, worker.runtime
    return [tensor.flatten()[0].item() for tensor in tensors]


@pytest.mark.parametrize("way", ["by name", "by variable", "by one line"])
def test_a_level_1_sleep_keeps_weights_and_runtime_and_drops_the_cache(saver, allocator, prefix, monkeypatch, way):
    vllm_stub.install()
    if way == "by variable":
        monkeypatch.setenv("EBBTIDE_VLLM", "1")
    integration.register()
    if way == "by one line":
        integration.use()
    worker = start(saver, "ebbtide" if way == "by name" else "cumem")
    assert worker.backend().state() == "RUNNING"
    assert {name for name in saver.tags() if name.startswith(prefix)} == {
        f"{prefix}{tag}" for tag in ("weights", "runtime", "kv_cache")
    }
    worker.sleep(level=1)
    assert worker.backend().state() == "SUSPENDED"
    assert all(each.is_asleep for each in allocator.pointer_to_data.values())
    worker.wake_up()
    assert worker.backend().state() == "RUNNING"
    assert values(worker) == [2.0, 3.0, 0.0, 5.0]


def test_a_level_2_sleep_drops_the_weights_and_buffers_come_back(saver, allocator):
    vllm_stub.install()
    integration.register()
    worker = start(saver, "ebbtide")
    worker.sleep(level=2)
    worker.wake_up(tags=["weights"])
    assert allocator.pointer_to_data[worker.cache.data_ptr()].is_asleep
    worker.model.weight.data.fill_(7.0)  # a trainer's new weights
    worker.wake_up(tags=["kv_cache"])
    assert values(worker) == [7.0, 3.0, 0.0, 5.0]


def test_a_discard_leaves_the_weights_in_place(saver, allocator):
    vllm_stub.install()
    integration.register()
    worker = start(saver, "ebbtide")
    worker.backend().discard(("kv_cache",))
    assert worker.backend().state() == "SUSPENDED"
    assert worker.model.weight[0].item() == 2.0
    assert allocator.pointer_to_data[worker.cache.data_ptr()].is_asleep
    worker.wake_up()
    assert values(worker) == [2.0, 3.0, 0.0, 5.0]


def test_a_resume_that_fails_stays_suspended(saver, allocator):
    from ebbtide import _core

    vllm_stub.install()
    integration.register()
    worker = start(saver, "ebbtide")
    worker.sleep()
    saver.configure(device_limit=_core.query_device(0).held_bytes + MIB)
    with pytest.raises(RuntimeError, match="device_limit"):
        worker.wake_up()
    assert worker.backend().state() == "SUSPENDED"
    saver.configure(device_limit=None)
    worker.wake_up()
    assert values(worker)[:2] == [2.0, 3.0]


def test_a_suspend_that_fails_stays_running(saver, allocator):
    vllm_stub.install()
    integration.register()
    worker = start(saver, "ebbtide")
    with allocator.use_memory_pool("weights"), pytest.raises(StateError, match="region"):
        worker.sleep()
    assert worker.backend().state() == "RUNNING"
    assert values(worker) == [2.0, 3.0, 4.0, 5.0]


def test_another_backend_keeps_vllms_allocator(saver, allocator):
    vllm_stub.install()
    integration.register()
    vllm_stub.Worker(vllm_stub.config("cumem"), 0, 0, "env://")
    assert isinstance(
        sys.modules["vllm.device_allocator.cumem"].CuMemAllocator.get_instance(), vllm_stub.TheirAllocator
    )


def test_register_again_does_nothing(saver, allocator):
    vllm_stub.install()
    integration.register()
    construct = vllm_stub.WorkerBase.__init__
    integration.register()
    assert vllm_stub.WorkerBase.__init__ is construct
    assert sorted(vllm_stub.SleepModeBackendFactory._registry) == ["cumem", "ebbtide"]


def test_workers_in_another_place_leave_vllm_alone_and_the_backend_says_so(saver, allocator, monkeypatch):
    vllm_stub.install()
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.worker_base")
    integration.register()
    backend = vllm_stub.SleepModeBackendFactory.get_backend_class("ebbtide")
    with pytest.raises(StateError, match="EBBTIDE_VLLM=1"):
        backend()
    integration.use()
    assert backend().state() == "RUNNING"


def test_use_again_does_nothing_but_set_the_backup(saver, allocator, monkeypatch):
    vllm_stub.install()
    integration.use()
    empty = torch.accelerator.empty_cache
    integration.use(backup="pinned", retain=True)
    assert torch.accelerator.empty_cache is empty
    monkeypatch.setenv("EBBTIDE_VLLM", "1")
    integration.register()
    assert (allocator.backup, allocator.retain) == ("pinned", True)


def test_a_vllm_without_backends_gets_the_allocator_alone(saver, allocator, monkeypatch):
    vllm_stub.install(has_factory=False)
    integration.register()
    theirs = sys.modules["vllm.device_allocator.cumem"].CuMemAllocator
    assert theirs.instance is None
    monkeypatch.setenv("EBBTIDE_VLLM", "1")
    integration.register()
    assert theirs.get_instance() is allocator


def test_an_import_that_fails_inside_of_vllm_is_no_missing_name(saver, allocator, monkeypatch):
    class Planted:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "vllm.device_allocator.sleep_mode_backend":
                raise ModuleNotFoundError("No module named 'planted'", name="planted")

    vllm_stub.install(has_factory=False)
    monkeypatch.setattr(sys, "meta_path", [Planted, *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="planted"):
        integration.register()


def test_use_is_refused_once_vllms_allocator_holds_memory(saver, allocator):
    vllm_stub.install()
    vllm_stub.TheirAllocator.get_instance().pointer_to_data[1] = "a segment"
    with pytest.raises(StateError, match="before a model is loaded"):
        integration.use()


def test_use_is_refused_where_vllm_has_no_sleep_mode(saver, allocator):
    vllm_stub.install(has_extension=False)
    with pytest.raises(StateError, match="extension is missing"):
        integration.use()


@pytest.mark.parametrize("arguments", [{"backup": None}, {"backup": "tape"}, {"retain": 1}])
def test_use_refuses_malformed_arguments(saver, allocator, arguments):
    vllm_stub.install()
    with pytest.raises((TypeError, ValueError)):
        integration.use(**arguments)
    assert vllm_stub.TheirAllocator.instance is None


def test_a_load_frees_what_it_replaces_where_it_empties_torchs_cache(saver, allocator):
    vllm_stub.install()
    integration.use()
    with allocator.use_memory_pool("weights"):
        weight = torch.ones(16 * MIB, dtype=torch.uint8, device=saver.device)
        weight = torch.ones(12 * MIB, dtype=torch.uint8, device=saver.device)
        integration._trimming(lambda: None)()  # as torch.accelerator.empty_cache, which this build may not have
        assert allocator.get_current_usage() == weight.nbytes


@pytest.mark.parametrize("name", ["torch.cuda", "torch.cuda.memory", "torch.accelerator"])
def test_emptying_torchs_cache_trims(saver, allocator, name, monkeypatch):
    vllm_stub.install()
    owner = importlib.import_module(name)
    monkeypatch.setattr(owner, "empty_cache", lambda: calls.append("emptied"), raising=False)
    monkeypatch.setattr(allocator, "trim", lambda: calls.append("trimmed"))
    calls = []
    integration.use()
    owner.empty_cache()
    assert calls[:1] == ["trimmed"] and calls[-1] == "emptied"


def test_the_backend_is_off_where_ebbtide_is(saver, allocator, monkeypatch):
    from ebbtide import driver_choice

    vllm_stub.install()
    integration.register()
    backend = vllm_stub.SleepModeBackendFactory.get_backend_class("ebbtide")
    assert backend.is_supported()
    monkeypatch.setattr(driver_choice, "is_off", lambda: True)
    assert not backend.is_supported()


# --- signatures ---


def parameters(function):
    """`name`, or `name=default`, without self and cls."""
    found = inspect.signature(function).parameters.values()
    return [
        each.name if each.default is each.empty else f"{each.name}={each.default!r}"
        for each in found
        if each.name not in ("self", "cls")
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_the_allocator_has_the_signatures_of_the_release(release):
    for name, wanted in RELEASES[release]["allocator"].items():
        assert parameters(getattr(vllm_allocator.Allocator, name)) == wanted, name
    shown = {*vllm_allocator.Allocation.__dataclass_fields__, "cpu_backup_tensor"}
    assert shown == set(RELEASES[release]["allocation"])
    if RELEASES[release]["deferrable"]:
        assert RELEASES[release]["deferrable"] == vllm_allocator.DEFERRABLE_TAGS


@pytest.mark.parametrize("release", RELEASES)
def test_the_backend_has_the_signatures_of_the_release(allocator, release):
    vllm_stub.install()
    integration.register()
    backend = vllm_stub.SleepModeBackendFactory.get_backend_class("ebbtide")
    for name, wanted in RELEASES[release]["backend"].items():
        assert parameters(getattr(backend, name)) == wanted, name
        is_class_method = inspect.ismethod(getattr(backend, name))
        assert is_class_method == (name.startswith("preserves") or "support" in name), name


@pytest.mark.parametrize("release", RELEASES)
def test_the_stub_has_the_signatures_of_the_release(release):
    for part, stub in (
        ("backend", vllm_stub.SleepModeBackend),
        ("factory", vllm_stub.SleepModeBackendFactory),
        ("worker", vllm_stub.WorkerBase),
    ):
        for name, wanted in RELEASES[release][part].items():
            assert parameters(getattr(stub, name)) == wanted, f"{part}.{name}"


def read_signatures(source, name):
    """The public methods of a class in a source, as `parameters` writes them."""
    (found,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    signatures = {}
    for node in found.body:
        if isinstance(node, ast.FunctionDef):
            defaults = [None] * (len(node.args.args) - len(node.args.defaults)) + node.args.defaults
            signatures[node.name] = [
                argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"
                for argument, default in zip(node.args.args, defaults, strict=True)
                if argument.arg not in ("self", "cls")
            ]
    return signatures


@pytest.mark.expected_skip("EBBTIDE_VLLM_SOURCES is a folder of vLLM's sources, one folder for each release")
@pytest.mark.parametrize("release", RELEASES)
def test_the_table_is_what_the_sources_say(release):
    sources = Path(os.environ.get("EBBTIDE_VLLM_SOURCES", ""), release)
    if not (sources / "vllm").is_dir():
        pytest.skip("no sources of this release")
    for part, (path, name) in PLACES.items():
        found = read_signatures((sources / path).read_text(), name)
        wanted = RELEASES[release][part]
        assert {method: found.get(method) for method in wanted} == wanted


def test_a_changed_signature_is_noticed():
    changed = read_signatures("class Allocator:\n    def sleep(self, tags=None, *, deep=False): ...\n", "Allocator")
    assert changed["sleep"] != RELEASES["0.33.0"]["allocator"]["sleep"]


def test_vllm_finds_the_entry_point():
    (entry,) = [each for each in metadata.entry_points(group="vllm.general_plugins") if each.name == "ebbtide"]
    assert entry.load() is integration.register
