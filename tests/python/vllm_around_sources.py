"""Runs vLLM's own modules of `vllm.device_allocator`, from a folder of its sources, with ebbtide's allocator.

What they import from elsewhere in vLLM is replaced by names that do next to nothing: a wheel's sources lack what is
compiled. `python vllm_around_sources.py FOLDER` prints "ok" at the end.
"""

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace


class WorkerBase:
    def __init__(self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=False):
        self.vllm_config = vllm_config


def replace(name, **content):
    module = ModuleType(name)
    module.__path__ = []
    module.__dict__.update(content)
    sys.modules[name] = module


def main(sources):
    platform = SimpleNamespace(is_cuda_alike=lambda: True, is_xpu=lambda: False, is_rocm=lambda: False)
    replace("vllm")
    sys.modules["vllm"].__path__ = [str(sources / "vllm")]
    replace("vllm.logger", init_logger=logging.getLogger)
    replace("vllm.platforms", current_platform=platform)
    replace("vllm.utils")
    replace("vllm.utils.system_utils", find_loaded_library=lambda name: None)
    replace("vllm.utils.torch_utils", PIN_MEMORY=False)
    compiled = ("init_module", "python_create_and_map", "python_unmap_and_release")
    replace("vllm.cumem_allocator", **dict.fromkeys(compiled))
    replace("vllm.distributed")
    replace("vllm.distributed.device_communicators")
    replace("vllm.distributed.device_communicators.cuda_wrapper", CudaRTLibrary=lambda: None)
    replace("vllm.v1")
    replace("vllm.v1.worker")
    replace("vllm.v1.worker.worker_base", WorkerBase=WorkerBase)

    import torch
    from ebbtide import saver
    from ebbtide.integrations import vllm, vllm_allocator
    from vllm.device_allocator import get_mem_allocator_instance
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    vllm.register()
    vllm.register()
    model_config = SimpleNamespace(sleep_mode_backend="ebbtide")
    WorkerBase(SimpleNamespace(model_config=model_config), 0, 0, "env://")
    allocator = get_mem_allocator_instance()
    assert allocator is vllm_allocator.allocator()
    with allocator.use_memory_pool(tag="weights"):
        weights = torch.randn(1 << 22, device=saver.device)
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = torch.ones(1 << 22, device=saver.device)
    before = weights.clone()

    def asleep():
        return {each.tag for each in allocator.pointer_to_data.values() if each.is_asleep}

    for model_config.sleep_mode_backend in ("ebbtide", "cumem"):
        backend = SleepModeBackendFactory.create_backend(model_config)
        assert backend.state() == "RUNNING"
        cache.fill_(1.0)
        backend.suspend(level=1)
        assert (backend.state(), asleep()) == ("SUSPENDED", {"weights", "kv_cache"})
        backend.resume(["weights"])
        assert asleep() == {"kv_cache"} and torch.equal(weights, before)
        backend.resume()
        assert backend.state() == "RUNNING" and not cache.any()
        if hasattr(backend, "discard"):
            backend.discard(("kv_cache",))
            assert asleep() == {"kv_cache"} and torch.equal(weights, before)
            backend.resume()
    backend.suspend(level=2)
    backend.resume()
    assert not weights.any()
    CuMemAllocator.instance.release_pools()
    print("ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
