"""Every name of torch that ebbtide uses and torch does not promise, with the versions that have it.

tests/python/test_torch_names.py checks each row against the installed torch; most of it needs a CUDA build but no GPU.
tests/law/test_names_of_torch.py finds private names in the sources without a row, and rows that nothing uses. A
documented function has a row where its arguments differ between versions, or where ebbtide replaces it.
"""

from dataclasses import dataclass

from ebbtide.torch_support.versions import LEAST_TORCH, LEAST_TORCH_OF_LMS, Version


@dataclass(frozen=True)
class Name:
    """One name.

    Attributes:
        path: below the module torch, as `torch.` is written before it.
        used_for: what ebbtide does with it.
        takes: the arguments that ebbtide gives by position, by kind: "device", "address", "pool", "tensor", or "" for
            anything; None for what is not called.
        keywords: the arguments that it gives by name, where there are any.
        since: the first version that must have it.
        until: the first version that need not; None: the newest has it.
        instead: what is used where it does not exist; "" where every supported version has it.
        is_cuda_only: CPU builds lack it, or have a placeholder.
        is_of_instances: only objects have it, so that it can't be looked up on the class.
    """

    path: str
    used_for: str
    takes: tuple[str, ...] | None = None
    keywords: tuple[str, ...] = ()
    since: Version = LEAST_TORCH
    until: Version | None = None
    instead: str = ""
    is_cuda_only: bool = False
    is_of_instances: bool = False

    def is_expected(self, version: Version, is_cuda: bool) -> bool:
        """Whether a torch of this version and build must have it."""
        is_in_range = self.since <= version and (self.until is None or version < self.until)
        return is_in_range and (is_cuda or not self.is_cuda_only)


@dataclass(frozen=True)
class Header:
    """What the extension `_torch` uses of torch's C++ headers.

    Attributes:
        path: below torch's include/.
        texts: what it must hold, white space apart.
    """

    path: str
    texts: tuple[str, ...]


POOL = ("device", "pool")
NO_LMS = "nothing: LMS needs a newer torch"

NAMES: tuple[Name, ...] = (
    # Pools of torch's CUDA allocator.
    Name("_C._cuda_customAllocator", "a pool's entry points", ("address", "address"), is_cuda_only=True),
    Name("_C._cuda_beginAllocateToPool", "opens a pool for all threads", POOL, is_cuda_only=True),
    Name(
        "_C._cuda_beginAllocateCurrentThreadToPool",
        "opens a pool for one thread",
        POOL,
        since=(2, 8),
        instead="_C._cuda_beginAllocateToPool, for all threads",
        is_cuda_only=True,
    ),
    Name(
        "_C._cuda_endAllocateToPool",
        "closes a pool",
        POOL,
        since=(2, 8),
        instead="_C._cuda_endAllocateCurrentStreamToPool",
        is_cuda_only=True,
    ),
    Name(
        "_C._cuda_endAllocateCurrentStreamToPool",
        "closes a pool",
        POOL,
        until=(2, 8),
        instead="_C._cuda_endAllocateToPool",
        is_cuda_only=True,
    ),
    Name("_C._cuda_releasePool", "ends a use of a pool", POOL, is_cuda_only=True),
    Name("_C._cuda_maybeExchangeDevice", "a device without making its context", ("",), is_cuda_only=True),
    Name("_C._cuda_setDevice", "the device that was current before", ("",), is_cuda_only=True),
    Name("cuda.MemPool", "a pool", ("",), is_cuda_only=True),
    Name("cuda.MemPool.id", "what torch calls a pool", is_cuda_only=True),
    Name("cuda.MemPool.use_count", "whether somebody else uses a pool", (), is_cuda_only=True),
    Name(
        "_C._MemPoolContext",
        "makes a pool the thread's active one",
        ("",),
        until=(2, 8),
        instead="nothing: an open pool is active",
        is_cuda_only=True,
    ),
    Name("cuda.memory_snapshot", "segments of all pools", (), is_cuda_only=True),
    Name(
        "cuda.memory_snapshot",
        "segments of one pool",
        ("pool",),
        since=(2, 9),
        instead="nothing: free blocks are copied",
        is_cuda_only=True,
    ),
    Name("cuda.memory._snapshot", "whether expandable segments are on", ()),
    Name(
        "_C._accelerator_setAllocatorSettings",
        "switches expandable segments off",
        ("",),
        since=(2, 13),
        instead="the older name",
    ),
    Name(
        "_C._cuda_cudaCachingAllocator_set_allocator_settings",
        "switches expandable segments off",
        ("",),
        until=(2, 9),
        instead="the newer name",
        is_cuda_only=True,
    ),
    Name("_C._cuda_clearCublasWorkspaces", "empties the map of cuBLAS workspaces", (), is_cuda_only=True),
    # Graph captures, which ebbtide wraps.
    Name("cuda.CUDAGraph.capture_begin", "tells where a capture begins", ("pool",), ("capture_error_mode",)),
    Name("cuda.CUDAGraph.capture_end", "tells where a capture ends", ()),
    Name("cuda.graph", "a capture into a tag's pool", ("",), ("pool", "stream", "capture_error_mode")),
    # EBBTIDE_CHECK=1 is a dispatch mode below the thread's others.
    Name("_C._len_torch_dispatch_stack", "how many modes are on", ()),
    Name("_C._get_dispatch_stack_at", "the mode on top"),
    Name("_C._pop_torch_dispatch_stack", "takes a mode out", ("",)),
    Name("_C._push_on_torch_dispatch_stack", "puts a mode back", ("",)),
    Name("utils._python_dispatch.TorchDispatchMode", "the mode"),
    Name("_subclasses.fake_tensor.FakeTensorMode._mode_key", "tells torch's own modes", is_of_instances=True),
    Name("utils._python_dispatch.is_traceable_wrapper_subclass", "tells tensors that wrap others", ("tensor",)),
    Name("_C._disabled_torch_dispatch_impl", "tells subclasses whose operations are their own"),
    Name("_C._has_storage", "tells tensors without memory of their own", ("tensor",)),
    Name("_C._data_address", "an address that leaves a copy-on-write tensor as it is", ("tensor",)),
    Name("_C.DispatchKey.CompositeImplicitAutograd", "tells views that may copy"),
    Name("_ops.OpOverload.has_kernel_for_dispatch_key", "tells views that may copy", ("",)),
    Name("_ops.OpOverload._schema", "an operation's name and arguments", is_of_instances=True),
    Name("_C._autograd._saved_tensors_hooks_is_enabled", "tells transforms of torch.func", ()),
    Name("_C._autograd._profiler_enabled", "whether second runs get a range of their own", ()),
    Name("_C._FunctionBase", "what a custom function reads in backward"),
    # Tensors, storages and modules.
    Name("UntypedStorage._new_with_weak_ptr", "a storage that others may ask for, while it lives"),
    Name("UntypedStorage._share_cuda_", "replaced, for torch's queues", is_cuda_only=True),
    Name("UntypedStorage._new_shared_cuda", "replaced, for torch's queues", is_cuda_only=True),
    Name("UntypedStorage._release_ipc_counter_cuda", "replaced, for torch's queues", is_cuda_only=True),
    Name("multiprocessing.reductions.reduce_storage", "called by what replaces it, for torch's queues", ("",)),
    Name("multiprocessing.reductions.StorageWeakRef", "a storage that others may ask for, while it lives", ("",)),
    Name("UntypedStorage._cdata", "the address of a storage's C++ object", is_of_instances=True),
    Name("Tensor._post_accumulate_grad_hooks", "whether a parameter's gradients are followed"),
    Name("Tensor._indices", "a part of a sparse tensor", ()),
    Name("Tensor._values", "a part of a sparse tensor", ()),
    Name("Tensor._neg_view", "the negative of a backup's bytes", ()),
    Name("Tensor._base", "what a view is of", is_of_instances=True),
    Name("Tensor._is_view", "tells views", ()),
    Name("Tensor._use_count", "how many hold a tensor", ()),
    Name("nn.Conv2d._conv_forward", "a convolution with another weight", ("", "", "")),
    Name("optim.Optimizer.profile_hook_step", "torch's wrapper of a step, which runs its hooks", ("",)),
    Name("_C._storage_Use_Count", "how many hold a storage", ("",)),
    Name("_C._autograd.SavedTensor", "what a graph has saved"),
    Name("_C.DisableTorchFunction", "lets subclasses be looked at"),
    Name("_C._functorch.is_functorch_wrapped_tensor", "tells tensors of functorch", ("tensor",)),
    Name("_is_functional_tensor", "tells functional tensors", ("tensor",)),
    Name("nn.Module._parameters", "a module's own parameters", is_of_instances=True),
    Name("nn.Module._buffers", "a module's own buffers", is_of_instances=True),
    Name("nn.Module._apply", "tells when a module's parameters have been converted", ("",)),
    Name("nn.Module._call_impl.__code__", "what calls a module, to find its calls on the stack"),
    # Calls of modules that are recomputed.
    Name("nn.Module.__call__", "replaced, to decide for each call of a module", ("",)),
    Name("nn.Module._compiled_call_impl", "tells modules that compile themselves"),
    Name("nn.Module._modules", "a module's own children", is_of_instances=True),
    Name("nn.Module._forward_hooks", "hooks that would run twice", is_of_instances=True),
    Name("nn.Module._forward_pre_hooks", "hooks that would run twice", is_of_instances=True),
    Name("nn.Module._backward_hooks", "hooks that would run twice", is_of_instances=True),
    Name("nn.Module._backward_pre_hooks", "hooks that would run twice", is_of_instances=True),
    Name("Tensor._version", "tells changes in place"),
    Name("_C._dynamo.eval_frame.get_eval_frame_callback", "tells calls in compiled models", ()),
    Name("_C._dynamo.eval_frame._FrameAction", "dynamo skips our call", since=LEAST_TORCH_OF_LMS, instead=NO_LMS),
    Name("_C._dynamo.eval_frame._FrameExecStrategy", "dynamo skips our call", since=LEAST_TORCH_OF_LMS, instead=NO_LMS),
    Name(
        "_C._dynamo.eval_frame.set_code_exec_strategy",
        "dynamo skips our call",
        since=LEAST_TORCH_OF_LMS,
        instead=NO_LMS,
    ),
    Name("_C._autograd._top_saved_tensors_default_hooks", "tells hooks and checkpoints in force", ("",)),
    Name("_C._current_graph_task_id", "tells a running backward", ()),
    Name("autograd.Variable._execution_engine.queue_callback", "tells that a backward came to its end", ("",)),
    Name("nn.modules.module._global_forward_hooks", "tells hooks of all modules"),
    Name("nn.modules.module._global_forward_pre_hooks", "tells hooks of all modules"),
    Name("nn.modules.module._global_backward_hooks", "tells hooks of all modules"),
    Name("nn.modules.module._global_backward_pre_hooks", "tells hooks of all modules"),
    Name("_C._functorch.peek_interpreter_stack", "tells transforms of torch.func", ()),
    Name("_C._len_torch_function_stack", "how many function modes are on", ()),
    Name("_C._get_function_stack_at", "one of the function modes"),
    Name("utils._device.DeviceContext", "the function mode that a checkpoint restores"),
    Name(
        "utils._python_dispatch.TorchDispatchMode.ignore_compile_internals",
        "compiled functions stay compiled under a mode",
        since=LEAST_TORCH_OF_LMS,
        instead=NO_LMS,
    ),
    Name(
        "_C._get_sdp_priority_order", "the order of attention's backends", (), since=LEAST_TORCH_OF_LMS, instead=NO_LMS
    ),
    Name(
        "_C._set_sdp_priority_order",
        "the order of attention's backends",
        ("",),
        since=LEAST_TORCH_OF_LMS,
        instead=NO_LMS,
    ),
    # How `_torch` is compiled.
    Name("_C._GLIBCXX_USE_CXX11_ABI", "torch's C++ ABI"),
    Name("version.git_version", "a part of the cache's key"),
)

HEADERS: tuple[Header, ...] = (
    Header(
        "c10/core/Allocator.h",
        (
            "virtual DataPtr allocate(size_t n) = 0;",
            "virtual DeleterFnPtr raw_deleter() const",
            "virtual void copy_data(void* dest, const void* src, std::size_t count) const = 0;",
        ),
    ),
    Header(
        "c10/core/CPUAllocator.h",
        (
            "SetCPUAllocator(at::Allocator* alloc, uint8_t priority = 0);",
            "GetCPUAllocator();",
            "profiledCPUMemoryReporter();",
            "void New(void* ptr, size_t nbytes);",
            "void Delete(void* ptr);",
            "void OutOfMemory(size_t nbytes);",
        ),
    ),
    Header("c10/core/StorageImpl.h", ("at::DataPtr set_data_ptr(at::DataPtr&& data_ptr)", "mutable_data_ptr()")),
)
