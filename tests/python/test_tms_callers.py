"""Callers of torch_memory_saver, imitated in the order of their calls: SGLang, slime, miles, Megatron-LM.
test_program_sources.py runs the sources of SGLang and AReaL.

Each starts its workers as those do, with the preload library found by their rule, and drives a model through a cycle.
What torch allocates outside regions is tagged on a GPU alone: on the simulated device it is CPU memory. So there a
worker's default memory stays.
"""

import os
import subprocess
import sys
import textwrap

import ebbtide
import pytest
from ebbtide.launch import preloading

pytest.importorskip("torch")

# What the workers share. `mine` is what a whole-program pause takes: on a GPU everything that torch allocates.
WORKER = """
import multiprocessing, os, sys
from contextlib import nullcontext
import torch
from ebbtide import _core, saver
from torch_memory_saver import torch_memory_saver
import engine_code
MIB = 1 << 20
IS_GPU = saver.device == "cuda"
assert "torch_memory_saver" in _core.loaded_library(), _core.loaded_library()
def full(value, count=8 * MIB): return torch.full((count,), value, dtype=torch.uint8, device=saver.device)
def held(): return _core.stats()["device_bytes"]
def is_away(tensor): return _core.is_away(tensor.data_ptr(), tensor.nbytes)
def whole_program():
    return nullcontext() if IS_GPU else torch_memory_saver.region(enable_cpu_backup=True)
class Engine:
    # Another program, without the hooks.
    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.queue, self.answers = context.Queue(), context.Queue()
        hooks = os.environ.pop("LD_PRELOAD")
        self.process = context.Process(target=engine_code.read, args=(self.queue, self.answers))
        self.process.start()
        os.environ["LD_PRELOAD"] = hooks
    def sum_of(self, tensor):
        self.queue.put(tensor)
        return self.answers.get(timeout=100)
    def end(self):
        self.queue.put(None)
        self.process.join(100)
        assert self.process.exitcode == 0
"""

ENGINE = """
def read(queue, answers):
    while (tensor := queue.get()) is not None:
        answer = int(tensor.sum())
        del tensor
        answers.put(answer)
"""

SGLANG = """
import multiprocessing, os, sys
import torch_memory_saver
_memory_saver = torch_memory_saver.torch_memory_saver

def scheduler():
    import torch, scheduler_code

if __name__ == "__main__":
    before = os.environ.get("LD_PRELOAD")
    with torch_memory_saver.configure_subprocess():
        process = multiprocessing.get_context("spawn").Process(target=scheduler)
        process.start()
    assert os.environ.get("LD_PRELOAD") == before
    process.join()
    sys.exit(process.exitcode)
"""

SGLANG_SCHEDULER = """
class Adapter:
    enabled = True
    def region(self, tag, enable_cpu_backup=False):
        return torch_memory_saver.region(tag=tag, enable_cpu_backup=enable_cpu_backup)
    def cuda_graph(self, **kwargs): return torch_memory_saver.cuda_graph(**kwargs)
    def disable(self): return torch_memory_saver.disable()
    def pause(self, tag): return torch_memory_saver.pause(tag=tag)
    def resume(self, tag): return torch_memory_saver.resume(tag=tag)

adapter = Adapter()
assert not torch_memory_saver._ensure_initialized()._binary_wrapper.cdll.tms_get_interesting_region()
with adapter.region("weights", enable_cpu_backup=True):
    weights = full(1)
with adapter.region("kv_cache"):
    cache = full(2)
pool = torch.cuda.graph_pool_handle() if IS_GPU else None
graphs, outputs = [], []
for size in (4, 2) if IS_GPU else ():
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with adapter.cuda_graph(cuda_graph=graph, pool=pool, stream=stream, tag="cuda_graph"):
        outputs.append(weights[: size * MIB].float().mul(cache[0].float() + 1))
    graphs.append(graph)
addresses = weights.data_ptr(), cache.data_ptr()
before = held()

# release_memory_occupation, all tags: the cache first.
for tag in ("kv_cache", "weights", "cuda_graph"):
    adapter.pause(tag)
assert before - held() >= 16 * MIB and is_away(weights) and is_away(cache)
if IS_GPU:
    assert is_away(outputs[0]) and saver.tags()["cuda_graph"].resident_bytes == 0

# resume_memory_occupation for the weights, their update, then the rest.
adapter.resume("weights")
assert bool((weights == 1).all())
weights.fill_(3)
adapter.resume("cuda_graph")
adapter.resume("kv_cache")
assert (weights.data_ptr(), cache.data_ptr()) == addresses and not cache.any()
cache.fill_(4)
for graph, output in zip(graphs, outputs):
    graph.replay()
    torch.cuda.synchronize()
    assert bool((output == 15).all())
print("done")
"""

SLIME = """
import os, sys
def find_library():
    import torch_memory_saver
    for cuda in ("_cu13", "_cu12", ""):
        name = f"torch_memory_saver_hook_mode_preload{cuda}.abi3.so"
        path = os.path.join(os.path.dirname(os.path.dirname(torch_memory_saver.__file__)), name)
        if os.path.exists(path):
            return path
os.environ.update(LD_PRELOAD=find_library(), TMS_INIT_ENABLE="1", TMS_INIT_ENABLE_CPU_BACKUP="1", NCCL_CUMEM_ENABLE="0")
os.execv(sys.executable, [sys.executable, "-c", "import scheduler_code"])
"""

SLIME_ACTOR = """
with whole_program():
    model = [full(1), full(2, 1000)]

# DeepEP's buffers, made with tagging off, before and after the first use of the saver.
def make_buffer():
    implementation = torch_memory_saver._impl
    if implementation is None:
        return full(9)
    cdll = implementation._binary_wrapper.cdll
    original = cdll.tms_get_interesting_region()
    cdll.tms_set_interesting_region(False)
    try:
        return full(9, 64 * MIB)
    finally:
        cdll.tms_set_interesting_region(original)
cdll = torch_memory_saver._ensure_initialized()._binary_wrapper.cdll
assert cdll.tms_get_interesting_region() and cdll.tms_get_enable_cpu_backup()
assert (cdll.tms_get_current_tag(), cdll.tms_get_cpu_backup_backend()) == (b"default", b"pinned")
buffer = make_buffer()
assert cdll.tms_get_interesting_region() and _core.find(buffer.data_ptr()) is None

addresses = [each.data_ptr() for each in model]
engine = Engine()
for turn in range(2):
    # sleep
    torch_memory_saver.pause()
    assert all(map(is_away, model)) and not is_away(buffer)

    # update_weights, from the backups, to another process
    with torch_memory_saver.disable():
        copies = [torch_memory_saver.get_cpu_backup(each, zero_copy=True) for each in model]
        assert [int(copy[-1]) for copy in copies] == [1 + turn, 2 + turn]
        bucket = copies[1].to(saver.device, copy=True)
        assert engine.sum_of(bucket) == 1000 * (2 + turn)
        assert torch_memory_saver.get_cpu_backup(bucket) is None
        del bucket, copies

    # wake_up, and a step of training
    torch_memory_saver.resume()
    assert [each.data_ptr() for each in model] == addresses
    assert bool((buffer == 9).all())
    assert [int(each[-1]) for each in model] == [1 + turn, 2 + turn]
    assert all(torch_memory_saver.get_cpu_backup(each) is None for each in model)
    for each in model:
        each.add_(1)
engine.end()
print("done")
"""

MILES = """
import os, sys
from pathlib import Path
from torch_memory_saver.utils import get_binary_path_from_package
library = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
assert b"TMS_INIT_ENABLE_DISK_BACKUP" in Path(library).read_bytes()
os.environ.update(LD_PRELOAD=library, TMS_INIT_ENABLE="1", TMS_INIT_ENABLE_CPU_BACKUP="0")
os.environ.update(TMS_INIT_ENABLE_DISK_BACKUP="1", TMS_DISK_BACKUP_CHUNK_MB="8")
os.environ.update(TMS_DISK_BACKUP_DIR=os.path.join(os.environ["DISK"], "cell0_rank0"))
os.execv(sys.executable, [sys.executable, "-c", "import scheduler_code"])
"""

MILES_ACTOR = """
import shutil
torch_memory_saver.memory_margin_bytes = MIB
folder = os.environ["TMS_DISK_BACKUP_DIR"]
assert os.path.isdir(folder) or not IS_GPU  # made when the hooks began
shutil.rmtree(folder, ignore_errors=True)  # what an earlier run left
os.makedirs(folder)
with nullcontext() if IS_GPU else torch_memory_saver.region(enable_disk_backup=True):
    weights = full(1)
with torch_memory_saver.region(tag="grad_buffer", enable_cpu_backup=False):
    grads = full(2)
with torch_memory_saver.region(tag="param_buffer", enable_cpu_backup=False):
    params = full(3)
for turn in range(2):
    torch_memory_saver.pause(tag="grad_buffer")
    torch_memory_saver.pause(tag="default")
    assert len(os.listdir(folder)) >= 1  # completing the run is only half of what miles checks
    assert is_away(weights) and is_away(grads) and not is_away(params)
    with torch_memory_saver.disable():
        assert int(full(4).sum()) == 32 * MIB
    torch_memory_saver.pause(tag="param_buffer")
    torch_memory_saver.resume(tag=None)
    assert bool((weights == 1).all()) and not grads.any() and not params.any()
    grads.fill_(2), params.fill_(3)
print("done")
"""

# Megatron-LM: two modules import the saver and choose the mode, and nothing is preloaded by it.
MEGATRON = """
torch_memory_saver.hook_mode = "torch"
with torch_memory_saver.region(tag="rl_inference_model", enable_cpu_backup=True):
    model = full(1)
torch_memory_saver.hook_mode = "torch"
with torch_memory_saver.region(tag="inference_context", enable_cpu_backup=False):
    cache = full(2)
for _ in range(2):
    torch_memory_saver.pause("inference_context")
    torch_memory_saver.pause("rl_inference_model")
    assert is_away(model) and is_away(cache)
    torch_memory_saver.resume("rl_inference_model")
    assert bool((model == 1).all()) and is_away(cache)
    torch_memory_saver.resume("inference_context")
    assert not cache.any()
print("done")
"""


@pytest.fixture
def start(tmp_path):
    """Runs a launcher with `--compat tms` in its environment; `scheduler_code` is the module of its worker.

    path: what replaces PYTHONPATH, as Ray's runtime environments do; None leaves it.
    """

    def run(launcher, worker, python=sys.executable, path=None, **variables):
        (tmp_path / "scheduler_code.py").write_text(WORKER + worker)
        (tmp_path / "engine_code.py").write_text(ENGINE)
        (tmp_path / "launcher.py").write_text(textwrap.dedent(launcher))
        added = ebbtide.env(compat="tms")
        environment = {**os.environ, **added, **variables}
        environment["PYTHONPATH"] = f"{added['PYTHONPATH'] if path is None else path}:{tmp_path}"
        if variables.get("LD_PRELOAD") == "":
            del environment["LD_PRELOAD"]
        done = subprocess.run(
            [python, str(tmp_path / "launcher.py")],
            env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def replaced_path(request, environment):
    """A Python with another torch_memory_saver installed, and the PYTHONPATH of a run script: the two ways in that
    docs/migrate/torch_memory_saver.md gives for launchers that replace it."""
    environment.add_wheel()
    if request.param == "start-up file":
        environment.ebbtide("compat", "install", "tms")
        return {"python": environment.python, "path": "/path/to/Megatron-LM/"}
    folder = environment.ebbtide("compat", "path", "tms").strip()
    assert folder == str(preloading.compat_path())
    return {"python": environment.python, "path": f"{folder}:/path/to/Megatron-LM/"}


def test_sglang(start):
    """Its launcher is not preloaded. What one that is preloaded gives to its workers: test_tms_ways_in.py."""
    start(SGLANG, SGLANG_SCHEDULER, LD_PRELOAD="")


@pytest.mark.parametrize("replaced_path", ["start-up file"], indirect=True)
def test_slime(start, replaced_path):
    start(SLIME, SLIME_ACTOR, LD_PRELOAD="", **replaced_path)


@pytest.mark.parametrize("replaced_path", ["PYTHONPATH"], indirect=True)
def test_miles_with_backups_on_disk(start, tmp_path, replaced_path):
    start(MILES, MILES_ACTOR, LD_PRELOAD="", DISK=str(tmp_path), **replaced_path)


def test_megatron_lm(start):
    start("import scheduler_code", MEGATRON)
