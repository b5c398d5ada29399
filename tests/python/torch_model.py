"""A model of the pools of torch's CUDA allocator, without a GPU."""

import threading

import torch


class TorchModel:
    """The pool functions of torch.cuda in one version, for two devices: use counts, routes, and the names that
    exist."""

    def __init__(self, version):
        self.by_thread = version >= (2, 8)
        self.newest_first = version >= (2, 11)
        self.may_die_in_use = version >= (2, 10)
        self.use_counts = {}
        self.recording = {0: [], 1: []}
        self.device = 0
        self.contexts_made = {0}
        self.active = threading.local()
        self.next_id = 1
        self.bare_ids = set()
        self.bare_pools = set()  # without an object, so that no MemPoolContext can name them
        self.freeable = set()  # torch frees the free segments of these at any time
        self.deadly_ends = []

    def install(self, monkeypatch):
        def set_name(owner, name, value):
            monkeypatch.setattr(owner, name, value, raising=False)

        bindings = torch._C
        set_name(bindings, "_cuda_beginAllocateToPool", lambda device, key: self.begin(device, key, None))
        if self.by_thread:
            set_name(
                bindings,
                "_cuda_beginAllocateCurrentThreadToPool",
                lambda device, key: self.begin(device, key, threading.get_ident()),
            )
            set_name(bindings, "_cuda_endAllocateToPool", self.end)
            # The installed torch may be older and have these names.
            monkeypatch.delattr(bindings, "_cuda_endAllocateCurrentStreamToPool", raising=False)
            monkeypatch.delattr(torch.cuda, "MemPoolContext", raising=False)
        else:
            monkeypatch.delattr(bindings, "_cuda_beginAllocateCurrentThreadToPool", raising=False)
            monkeypatch.delattr(bindings, "_cuda_endAllocateToPool", raising=False)
            set_name(bindings, "_cuda_endAllocateCurrentStreamToPool", self.end)
            set_name(bindings, "_MemPoolContext", lambda pool: ModelContext(self, pool))
        self.covered = (0, 1) if self.by_thread else (0,)
        set_name(bindings, "_cuda_releasePool", self.release)
        set_name(bindings, "_cuda_customAllocator", lambda malloc, free: (malloc, free))
        set_name(bindings, "_cuda_maybeExchangeDevice", lambda device: setattr(self, "device", device))
        set_name(bindings, "_cuda_setDevice", lambda device: setattr(self, "device", device))

        class MemPool(ModelPool):
            def __init__(pool, allocator):  # noqa: N805 - self is the model
                super().__init__(self, allocator)

        set_name(torch.cuda, "MemPool", MemPool)
        set_name(torch.cuda, "graph_pool_handle", self.make_bare_id)
        set_name(torch.cuda, "current_device", lambda: self.device)
        set_name(torch.cuda, "device_count", lambda: 2)
        set_name(torch.cuda, "init", lambda: None)

    def begin(self, device, key, thread):
        if key in self.bare_ids:
            self.bare_ids.remove(key)
            self.bare_pools.add(key)
            self.use_counts[key] = 0
        else:
            assert self.use_counts.get(key, 0) > 0, "a pool whose use count fell to zero cannot be entered again"
        assert all(other != key for other, _ in self.recording[device]), "already recording to mempool_id"
        self.use_counts[key] += 1
        self.recording[device].append((key, thread))

    def end(self, device, key):
        entry = next(entry for entry in self.recording[device] if entry[0] == key)
        self.recording[device].remove(entry)

    def release(self, device, key):
        self.use_counts[key] -= 1
        if self.use_counts[key] == 0:
            self.freeable.add(key)

    def make_bare_id(self):
        """As torch.cuda.graph_pool_handle: an id without a pool object. The pool is made where it is first entered."""
        self.bare_ids.add((self.next_id, 0))
        self.next_id += 1
        return self.next_id - 1, 0

    def route(self, device=0):
        """The pool of this thread's next allocation."""
        order = reversed(self.recording[device]) if self.newest_first else self.recording[device]
        key = next((key for key, thread in order if thread in (None, threading.get_ident())), None)
        if key is not None and not self.by_thread and key not in self.bare_pools:
            assert self.active.stack[-1].id == key, "MemPoolContext and recording are out of step"
        return key


class ModelPool:
    def __init__(self, model, allocator):
        self.allocator = allocator
        self.id = (0, model.next_id)
        self.made_on = model.device
        model.next_id += 1
        self.model = model
        model.use_counts[self.id] = 1

    def use_count(self):
        return self.model.use_counts[self.id]

    def __del__(self):
        # Torch has an assertion for this in a destructor.
        is_refused = self.use_count() != 1 and not self.model.may_die_in_use
        self.model.release(self.made_on, self.id)
        if is_refused or self.id in self.model.freeable:
            # Freeing the last use waits for events, which fails while any pool is open.
            self.model.deadly_ends.append(self.id)


class ModelContext:
    def __init__(self, model, pool):
        self.model, self.pool = model, pool
        model.active.__dict__.setdefault("stack", []).append(pool)

    def __del__(self):
        self.model.active.__dict__.get("stack", [self.pool]).remove(self.pool)
