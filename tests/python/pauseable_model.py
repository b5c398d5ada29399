"""A pauseable program on the simulator, with a model of its torch. As with the preload library, everything that this
torch requests from the driver has the program's tag."""

import ctypes
import threading

import torch
from ebbtide import _core, driver_choice
from ebbtide.saver.pools import backends, bypass, captures, cuda_pools, region_pools
from ebbtide.saver.regions import entry, startup
from ebbtide.saver.state import program
from torch_model import TorchModel

MIB = 1 << 20
RAM = 1
DEFAULT = bypass.DEFAULT_POOL


class CachingTorch(TorchModel):
    """The torch model with memory: segments of the program's tag, never split, and a cache of free ones in each
    pool."""

    def __init__(self, tag):
        super().__init__((2, 13))
        self.tag = tag
        self.pool_of = {}
        self.size_of = {}
        self.free_in = {}
        self.cleared_workspaces = 0

    def install(self, monkeypatch):
        super().install(monkeypatch)
        monkeypatch.setattr(driver_choice, "_chosen", "cuda")
        monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", self.snapshot)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear_workspaces, raising=False)

    def clear_workspaces(self):
        self.cleared_workspaces += 1

    def malloc(self, mib):
        pool = self.route() or DEFAULT
        cached = self.free_in.setdefault(pool, [])
        address = next((one for one in cached if self.size_of[one] == mib * MIB), None)
        if address is None:
            address = _core.alloc(self.tag, mib * MIB, 0, RAM)
            self.pool_of[address], self.size_of[address] = pool, mib * MIB
        else:
            cached.remove(address)
        return address

    def free(self, address):
        self.free_in.setdefault(self.pool_of[address], []).append(address)

    def empty_cache(self):
        idle = {key for key, count in self.use_counts.items() if count == 0}
        if not self.recording[0]:
            idle.add(DEFAULT)
        for pool in idle:
            for address in self.free_in.pop(pool, []):
                _core.free(address)
                del self.pool_of[address], self.size_of[address]

    def snapshot(self, mempool_id=None, include_traces=True):
        assert not include_traces
        return [self._segment(address, pool) for address, pool in self.pool_of.items()]

    def _segment(self, address, pool):
        is_free = address in self.free_in.get(pool, ())
        size = self.size_of[address]
        block = {"address": address, "size": size, "state": "inactive" if is_free else "active_allocated"}
        return {"address": address, "total_size": size, "blocks": [block], "segment_pool_id": pool}


class PauseableProgram:
    def __init__(self, saver, tag, model):
        self.saver, self.tag, self.model = saver, tag, model
        self.live = {}

    def make(self, mib, byte):
        address = self.model.malloc(mib)
        assert not _core.is_away(address, mib * MIB)
        ctypes.memset(address, byte, mib * MIB)
        self.live[address] = bytes([byte]) * 64
        return address

    def drop(self, address):
        del self.live[address]
        self.model.free(address)

    def check(self):
        for address, want in self.live.items():
            if not _core.is_away(address, 64):
                assert ctypes.string_at(address, 64) == want

    def end(self):
        self.saver.resume(self.tag)
        assert self.model.recording == {0: [], 1: []}
        assert not bypass._open
        for address in list(self.live):
            self.drop(address)
        self.model.empty_cache()
        assert not self.model.pool_of


def start(saver, monkeypatch, tag):
    """Makes this process the program; its saver then acts as the saver of a pauseable program."""
    model = CachingTorch(tag)
    model.install(monkeypatch)
    monkeypatch.setattr(backends, "_backend", cuda_pools.CudaPools((2, 13)))
    monkeypatch.setattr(entry, "registry", region_pools.RegionPools())
    monkeypatch.setattr(captures, "install", lambda: None)
    monkeypatch.setattr(program, "_own", program.Program(tag, RAM))
    monkeypatch.setattr(bypass, "_closed", set())
    startup.introduce_program()
    return PauseableProgram(saver, tag, model)


def routes_of_threads(model):
    """The pool of another thread's allocations."""
    seen = []
    thread = threading.Thread(target=lambda: seen.append(model.route()))
    thread.start()
    thread.join(30)
    return seen[0]
