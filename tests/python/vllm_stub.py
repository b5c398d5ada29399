"""The parts of vLLM that sleep mode touches, in our own words: the modules and names that ebbtide meets there.

`install(release)` puts them into sys.modules. They behave as the documentation of vLLM says; the
signatures are held against tests/python/vllm_signatures.py.
"""

import importlib
import sys
from abc import ABC, abstractmethod
from types import ModuleType, SimpleNamespace


class TheirAllocator:
    """vLLM's own allocator, as far as it is asked: the singleton, and whether it holds memory."""

    instance = None
    default_tag = "default"

    @staticmethod
    def get_instance():
        assert sys.modules["vllm.device_allocator.cumem"].cumem_available
        if TheirAllocator.instance is None:
            TheirAllocator.instance = TheirAllocator()
        return TheirAllocator.instance

    def __init__(self):
        self.pointer_to_data = {}


class SleepModeBackend(ABC):
    """The base class of backends."""

    def __init__(self):
        self._state = "RUNNING"

    @abstractmethod
    def suspend(self, level=1): ...

    @abstractmethod
    def resume(self, tags=None): ...

    def state(self):
        return self._state

    def discard(self, tags):
        raise RuntimeError(f"{type(self).__name__} does not discard")

    @classmethod
    def is_supported(cls):
        return True

    @classmethod
    def preserves_communicators(cls):
        return False

    @classmethod
    def preserves_compiled_artifacts(cls):
        return False

    @classmethod
    def preserves_graphs_with_communicators(cls):
        return False

    @classmethod
    def supports_durable_storage(cls):
        return False


class CuMemBackend(SleepModeBackend):
    """The default backend: it asks for the allocator at each call."""

    def suspend(self, level=1):
        self._state = "SUSPENDED"
        kept = ("runtime", "cudagraph")
        sys.modules["vllm.device_allocator"].get_mem_allocator_instance().sleep(
            offload_tags=("weights", *kept) if level == 1 else kept
        )

    def resume(self, tags=None):
        sys.modules["vllm.device_allocator"].get_mem_allocator_instance().wake_up(tags)
        self._state = "RUNNING"


class SleepModeBackendFactory:
    """Backends by name, imported when they are selected."""

    _registry = {}  # noqa: RUF012 - as there

    @classmethod
    def register_backend(cls, name, module_path, class_name):
        if name in cls._registry:
            raise ValueError(f"{name} is already registered")
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)

    @classmethod
    def get_backend_class(cls, name):
        return cls._registry[name]()

    @classmethod
    def create_backend(cls, model_config):
        chosen = cls.get_backend_class(model_config.sleep_mode_backend)
        if not chosen.is_supported():
            raise ValueError(f"{model_config.sleep_mode_backend} is not supported")
        return chosen()


class WorkerBase:
    """The base class of workers."""

    def __init__(self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=False):
        self.vllm_config = vllm_config
        self.sleep_saved_buffers = {}


class Worker(WorkerBase):
    """A worker's calls around the allocator and the backend: load, make the cache, sleep and wake up."""

    def pool(self, tag):
        allocator = sys.modules["vllm.device_allocator"].get_mem_allocator_instance()
        if tag == "weights":
            assert allocator.get_current_usage() == 0
        return allocator.use_memory_pool(tag=tag)

    def backend(self):
        if not hasattr(self, "_backend"):
            self._backend = SleepModeBackendFactory.create_backend(self.vllm_config.model_config)
        return self._backend

    def load_model(self, build):
        with self.pool("weights"):
            self.model = build()

    def initialize_cache(self, build, build_runtime):
        with self.pool("runtime"):
            self.runtime = build_runtime()
            with self.pool("kv_cache"):
                self.cache = build()

    def sleep(self, level=1):
        if level == 2:
            self.sleep_saved_buffers = {name: buffer.cpu().clone() for name, buffer in self.model.named_buffers()}
        self.backend().suspend(level)

    def wake_up(self, tags=None):
        self.backend().resume(tags)
        if tags is None or "weights" in tags:
            for name, buffer in self.model.named_buffers():
                if name in self.sleep_saved_buffers:
                    buffer.data.copy_(self.sleep_saved_buffers[name])
            self.sleep_saved_buffers = {}


class VllmConfig:
    """The configuration, as far as graphs and their pool are concerned."""

    def __init__(self, backend, offloads_graphs=True):
        self.model_config = SimpleNamespace(sleep_mode_backend=backend, sleep_mode_offload_cudagraph=offloads_graphs)

    @property
    def use_cumem_cudagraph_pool(self):
        return self.model_config.sleep_mode_offload_cudagraph and self.model_config.sleep_mode_backend == "cumem"


def config(backend="cumem"):
    """A worker's configuration, as far as it is read."""
    return SimpleNamespace(model_config=SimpleNamespace(sleep_mode_backend=backend))


def install(has_factory=True, has_extension=True):
    """Puts the stub into sys.modules. The caller restores that, and the classes' state, with `uninstall`."""
    uninstall()
    names = {
        "vllm": {},
        "vllm.device_allocator": {"get_mem_allocator_instance": lambda: TheirAllocator.get_instance()},
        "vllm.device_allocator.cumem": {"CuMemAllocator": TheirAllocator, "cumem_available": has_extension},
        "vllm.config": {"VllmConfig": VllmConfig},
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.worker_base": {"WorkerBase": WorkerBase},
    }
    if has_factory:
        names["vllm.device_allocator.sleep_mode_backend"] = {
            "SleepModeBackend": SleepModeBackend,
            "SleepModeBackendFactory": SleepModeBackendFactory,
            "CuMemBackend": CuMemBackend,
        }
    for name, content in names.items():
        module = ModuleType(name)
        module.__path__ = []
        module.__dict__.update(content)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    SleepModeBackendFactory._registry = {"cumem": lambda: CuMemBackend}


_construct = WorkerBase.__init__
_uses_pool = VllmConfig.use_cumem_cudagraph_pool


def uninstall():
    """Undoes `install`, and ebbtide's changes of the stub."""
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]
    sys.modules.pop("ebbtide.integrations.vllm_backend", None)
    TheirAllocator.instance = None
    WorkerBase.__init__ = _construct
    VllmConfig.use_cumem_cudagraph_pool = _uses_pool


# --- for vLLM's own tests of its allocator, which import more names ---


class Engine:
    """Stands where tests of whole engines name theirs. Those tests are not run."""


class Platform:
    """The platform of the tests: CUDA's names, or the simulated device's, whose tensors are CPU tensors."""

    def __init__(self, device_type):
        self.device_type = device_type

    def is_cuda(self):
        return True

    is_cuda_alike = is_cuda

    def is_rocm(self):
        return False

    is_xpu = is_rocm

    def mem_get_info(self):
        import torch
        from ebbtide import _core

        if self.device_type == "cuda":
            return torch.cuda.mem_get_info()
        info = _core.query_device(0)
        return info.free_bytes, info.total_bytes


def install_for_upstream_tests(device_type):
    """Like `install`, with the names that vLLM's tests import, and ebbtide's allocator in the place of vLLM's."""
    import torch
    from ebbtide.integrations import vllm as integration

    install()
    integration.use()
    platform = Platform(device_type)
    for name in ("LLM", "SamplingParams", "AsyncEngineArgs", "AsyncLLMEngine"):
        setattr(sys.modules["vllm"], name, Engine)
    for name, content in {
        "vllm.platforms": {"current_platform": platform},
        "vllm.envs": {},
        "vllm.utils": {"GiB_bytes": 1 << 30},
        "vllm.utils.mem_constants": {"GiB_bytes": 1 << 30},
    }.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(content)
    if device_type == "cpu":
        torch.cuda.mem_get_info = torch.accelerator.get_memory_info = platform.mem_get_info
    elif not hasattr(torch.accelerator, "get_memory_info"):
        torch.accelerator.get_memory_info = platform.mem_get_info
