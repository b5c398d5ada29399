"""Names and parameters of two releases of vLLM, as their sources have them, which ebbtide calls, replaces or imitates.

Each parameter is its name, and `name=default` where it has one.
"""

_ALLOCATOR = {
    "use_memory_pool": ["tag=None"],
    "sleep": ["offload_tags=None"],
    "wake_up": ["tags=None"],
    "get_current_usage": [],
    "release_pools": [],
    "close": [],
}
_BACKEND = {
    "suspend": ["level=1"],
    "resume": ["tags=None"],
    "state": [],
    "is_supported": [],
    "preserves_communicators": [],
    "preserves_compiled_artifacts": [],
    "preserves_graphs_with_communicators": [],
    "supports_durable_storage": [],
}
_FACTORY = {
    "register_backend": ["name", "module_path", "class_name"],
    "get_backend_class": ["name"],
    "create_backend": ["model_config"],
}
_WORKER = {"__init__": ["vllm_config", "local_rank", "rank", "distributed_init_method", "is_driver_worker=False"]}
_ALLOCATION = ["handle", "tag", "cpu_backup_tensor", "is_asleep"]

RELEASES = {
    "0.26.0": {
        "allocator": _ALLOCATOR,
        "backend": _BACKEND,
        "factory": _FACTORY,
        "worker": _WORKER,
        "allocation": _ALLOCATION,
        "config": {},
        "deferrable": None,
    },
    "0.33.0": {
        "allocator": {**_ALLOCATOR, "discard": ["tags"], "cudagraph_pool": []},
        "backend": {**_BACKEND, "discard": ["tags"]},
        "factory": _FACTORY,
        "worker": _WORKER,
        "allocation": _ALLOCATION,
        "config": {"use_cumem_cudagraph_pool": []},
        "deferrable": ("weights", "kv_cache"),
    },
}

# Where the sources of vLLM have them.
PLACES = {
    "allocator": ("vllm/device_allocator/cumem.py", "CuMemAllocator"),
    "backend": ("vllm/device_allocator/sleep_mode_backend.py", "SleepModeBackend"),
    "factory": ("vllm/device_allocator/sleep_mode_backend.py", "SleepModeBackendFactory"),
    "worker": ("vllm/v1/worker/worker_base.py", "WorkerBase"),
    "config": ("vllm/config/vllm.py", "VllmConfig"),
}
