"""Programs that pause memory, from their own sources, on ebbtide: SGLang, AReaL, slime, miles, NeMo-RL and verl.

`make programs` downloads the wheels of requirements/programs.txt into build/programs, and EBBTIDE_PROGRAMS names
another folder. slime, miles and NeMo-RL have no wheels: checkouts of them in that folder, by the names `slime`, `miles`
and `nemo_rl`, are tried by hand. The files named as `real` run unmodified. What they import besides is made up
(program_sources.py): no engine starts, no model is loaded, and no GPU is needed.
"""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import test_tms_callers  # noqa: E402
from checks.program_wheels import NOT_THERE, unpack  # noqa: E402
from ebbtide.integrations import verl  # noqa: E402

HERE = Path(__file__).parent
pytestmark = NOT_THERE

start = test_tms_callers.start

SERVE = """
import os, sys
sys.path.append(os.environ["TESTS"])
from types import SimpleNamespace
import program_sources
def nothing(*_, **__): return None
"""

# --- SGLang: its adapter, which starts the scheduler, and what release_memory_occupation does there ---

SERVE_SGLANG = (
    SERVE
    + """
program_sources.serve("sglang", os.environ["SOURCES"], real=[
    "sglang.srt.constants",
    "sglang.srt.utils.torch_memory_saver_adapter",
    "sglang.srt.managers.scheduler_components.weight_updater",
], given={
    "sglang.srt.runtime_context": {"get_model": lambda: SimpleNamespace(weight_cache_mode="off")},
})
"""
)

SGLANG = (
    SERVE_SGLANG
    + """
import multiprocessing
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

def scheduler():
    import torch, scheduler_code

if __name__ == "__main__":
    adapter = TorchMemorySaverAdapter.create(enable=True)
    before = os.environ.get("LD_PRELOAD")
    with adapter.configure_subprocess():
        process = multiprocessing.get_context("spawn").Process(target=scheduler)
        process.start()
    assert os.environ.get("LD_PRELOAD") == before
    process.join()
    sys.exit(process.exitcode)
"""
)

SGLANG_SCHEDULER = """
import warnings
from sglang.srt.constants import GPU_MEMORY_TYPE_CUDA_GRAPH, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

adapter = TorchMemorySaverAdapter.create(enable=True)
assert adapter.enabled and not TorchMemorySaverAdapter.create(enable=False).enabled
torch.distributed.barrier = nothing
with adapter.region(GPU_MEMORY_TYPE_WEIGHTS, enable_cpu_backup=False):
    model = torch.nn.Linear(2048, 2048, device=saver.device)
    model.register_buffer("scale", torch.full((MIB,), 3.0, device=saver.device))
    model.table = [full(7)]  # nothing loads it again
with adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
    cache = full(2)
with adapter.region("draft", enable_cpu_backup=True):
    draft = full(5)
with adapter.disable() if IS_GPU else nullcontext():
    outside = full(6)
flushes = []
worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
manager = SchedulerWeightUpdaterManager(
    tp_worker=worker, draft_worker=None, memory_saver_adapter=adapter,
    flush_cache=lambda *_, **__: flushes.append(1) or True, is_fully_idle=lambda *_, **__: True,
)
addresses, before = (model.weight.data_ptr(), cache.data_ptr()), held()
for turn in range(2):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        manager.release_memory_occupation(SimpleNamespace(tags=None))
    said = [str(each.message) for each in said if "come back as zeros" in str(each.message)]
    assert len(said) == 1 - turn and ("Linear.table[0] (8.0 MiB)" in said[0] if said else turn)
    assert is_away(model.weight) and is_away(cache) and not is_away(draft) and before - held() >= 32 * MIB
    manager.resume_memory_occupation(SimpleNamespace(tags=[GPU_MEMORY_TYPE_WEIGHTS]))
    assert is_away(cache) and not model.weight.any() and bool((model.scale == 3).all())
    model.weight.data.fill_(turn + 1)  # the trainer's
    manager.resume_memory_occupation(SimpleNamespace(tags=[GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_CUDA_GRAPH]))
    assert (model.weight.data_ptr(), cache.data_ptr()) == addresses and bool((model.weight == turn + 1).all())
    assert not cache.any() and bool((draft == 5).all()) and bool((outside == 6).all())
assert len(flushes) == 2
print("done")
"""

# --- AReaL: the environment of its workers, and how its engine leaves and comes back ---

SERVE_AREAL = (
    SERVE
    + """
real = ["areal.utils.offload", "areal.engine.fsdp_engine"]
program_sources.serve("areal", os.environ["SOURCES"], real=real)
"""
)
AREAL = (
    SERVE_AREAL
    + """
from areal.utils.offload import get_tms_env_vars, is_tms_enabled
assert not is_tms_enabled()
os.environ.update(get_tms_env_vars())
os.execv(sys.executable, [sys.executable, "-c", "import scheduler_code"])
"""
)
AREAL_ENGINE = """
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.offload import is_tms_enabled
assert is_tms_enabled()
import areal.engine.fsdp_engine as module
assert module.torch_memory_saver is torch_memory_saver
torch.distributed.barrier = nothing
log = SimpleNamespace(log=nothing)
engine = SimpleNamespace(get_device_stats=lambda: log, cpu_group=None, is_offload=False)
with whole_program():
    model = full(5)
address, before = model.data_ptr(), held()
for _ in range(3):
    FSDPEngine.offload(engine)
    assert engine.is_offload and before - held() >= 8 * MIB and is_away(model)
    FSDPEngine.onload(engine)
    assert not engine.is_offload and bool((model == 5).all()) and model.data_ptr() == address
print("done")
"""

# --- slime and miles: the environment of their actors, DeepEP's buffers, sleep and wake_up, reads of backups ---

SERVE_SLIME = (
    SERVE
    + """
class Buffer:
    made = []
    def __init__(self, make): self.made.append(make())
seen = {}
def remote(**options):
    seen.update(options)
    return lambda kind: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=nothing))
program_sources.serve("slime", os.environ["SOURCES"], real=[
    "slime.ray.actor_group", "slime.backends.megatron_utils", "slime.backends.megatron_utils.actor",
    "slime.backends.megatron_utils.update_weight.common",
], given={
    "ray": {"remote": remote},
    "slime.ray.utils": {"add_default_ray_env_vars": dict, "NOSET_VISIBLE_DEVICES_ENV_VARS_LIST": []},
    "slime.utils.accelerator": {"initialize_accelerator": nothing},
    "deep_ep": {"Buffer": Buffer},
})
"""
)
SLIME = (
    SERVE_SLIME
    + """
from slime.ray.actor_group import RayTrainGroup
arguments = SimpleNamespace(
    offload_train=True, train_backend="megatron", train_env_vars={}, use_routing_replay=False, rollout_data_transport=""
)
group = SimpleNamespace(
    args=arguments, _num_nodes=0, _num_gpus_per_node=0, role="actor", _actor_cls=object, _actor_handlers=[]
)
RayTrainGroup._allocate_gpus_for_actor(group, (None, [], []), 1)
os.environ.update(seen["runtime_env"]["env_vars"])
assert os.environ["TMS_INIT_ENABLE"] == "1", seen
os.execv(sys.executable, [sys.executable, "-c", "import scheduler_code"])
"""
)
SLEEPING_ACTOR = """
actor = SimpleNamespace(args=arguments, role="actor", weight_updater=None, _asleep=False, _switch_model=nothing)
if not IS_GPU:
    torch.cuda.synchronize = nothing
with whole_program():
    model = [full(1), full(2, 1000)]
deep_ep.Buffer(lambda: full(9, 64 * MIB))  # before the first use of the saver
torch_memory_saver._ensure_initialized()
deep_ep.Buffer(lambda: full(9, 64 * MIB))
buffer = deep_ep.Buffer.made[1]
assert torch_memory_saver._impl._binary_wrapper.cdll.tms_get_interesting_region()
assert _core.find(buffer.data_ptr()) is None
addresses = [each.data_ptr() for each in model]
for turn in range(2):
    MegatronTrainRayActor.sleep(actor)
    assert all(map(is_away, model)) and not is_away(buffer)
    with torch_memory_saver.disable():
        backups = [torch_memory_saver.get_cpu_backup(each, zero_copy=True) for each in model]
        assert [int(each[-1]) for each in backups] == [1 + turn, 2 + turn]
        assert read_backup is None or [int(read_backup(each)[-1]) for each in model] == [1 + turn, 2 + turn]
        del backups
    MegatronTrainRayActor.wake_up(actor)
    assert [each.data_ptr() for each in model] == addresses and bool((buffer == 9).all())
    assert [int(each[-1]) for each in model] == [1 + turn, 2 + turn]
    for each in model:
        each.add_(1)
print("done")
"""
SLIME_ACTOR = (
    """
import deep_ep
from slime.backends.megatron_utils.actor import MegatronTrainRayActor
from slime.backends.megatron_utils.update_weight.common import _maybe_get_cpu_backup as read_backup
arguments = SimpleNamespace(offload_train=True, use_critic=False, colocate=True)
"""
    + SLEEPING_ACTOR
)

SERVE_MILES = SERVE_SLIME.replace("slime", "miles").replace(
    '"miles.ray.actor_group", "miles.backends.megatron_utils", "miles.backends.megatron_utils.actor",\n'
    '    "miles.backends.megatron_utils.update_weight.common",',
    '"miles.ray.train.actor_factory", "miles.backends.megatron_utils", "miles.backends.megatron_utils.actor",',
)
MILES = (
    SERVE_MILES
    + """
import miles.ray.train.actor_factory as actor_factory
arguments = SimpleNamespace(
    offload_train=True, train_backend="megatron", train_env_vars={}, use_routing_replay=False, offload_train_target="",
    dumper_source_patcher_config_train="", use_fault_tolerance=False,
)
actor_factory.allocate_gpus_for_actor(arguments, 0, (None, [], []), 1, "", "actor", 0)
os.environ.update({name: value for name, value in seen["runtime_env"]["env_vars"].items() if isinstance(value, str)})
assert os.environ["TMS_INIT_ENABLE"] == "1", seen
os.execv(sys.executable, [sys.executable, "-c", "import scheduler_code"])
"""
)
MILES_ACTOR = (
    """
import deep_ep
from miles.backends.megatron_utils.actor import MegatronTrainRayActor
arguments = SimpleNamespace(offload_train=True, rematerialize_param_from_master_weight=False)
read_backup = None
"""
    + SLEEPING_ACTOR
)

# --- NeMo-RL: a Megatron model for generation beside the one in training; nothing is preloaded ---

SERVE_NEMO_RL = (
    SERVE
    + """
program_sources.serve("nemo_rl", os.environ["SOURCES"], real=["nemo_rl.models.megatron.memory_saver"])
"""
)
NEMO_RL = """
import nemo_rl.models.megatron.memory_saver as memory_saver
assert memory_saver.HAVE_TORCH_MEMORY_SAVER and memory_saver.torch_memory_saver is torch_memory_saver
with memory_saver.inference_model_alloc_region():
    model = full(7)
training = full(8)
for _ in range(2):
    memory_saver.pause_inference_weights()
    assert is_away(model) and not is_away(training)
    memory_saver.resume_inference_weights()
    assert bool((model == 7).all())
print("done")
"""


@pytest.fixture
def sources(tmp_path):
    """Where the Python files of a program are; skips where it is not at hand."""

    def find(name):
        return str(unpack(name, tmp_path / name))

    return find


@pytest.mark.parametrize(
    ("name", "serve", "launcher", "worker"),
    [
        ("sglang", SERVE_SGLANG, SGLANG, SGLANG_SCHEDULER),
        ("areal", SERVE_AREAL, AREAL, AREAL_ENGINE),
        ("slime", SERVE_SLIME, SLIME, SLIME_ACTOR),
        ("miles", SERVE_MILES, MILES, MILES_ACTOR),
        ("nemo_rl", SERVE_NEMO_RL, "import scheduler_code", NEMO_RL),
    ],
)
def test_a_program_for_torch_memory_saver(start, sources, name, serve, launcher, worker):
    preload = {} if name == "nemo_rl" else {"LD_PRELOAD": ""}
    start(launcher, serve + worker, SOURCES=sources(name), TESTS=str(HERE), **preload)


def functions_of(source):
    """The parameters of the functions of a source, as `inspect` shows them without their types."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            defaults = [None] * (len(node.args.args) - len(node.args.defaults)) + node.args.defaults
            pairs = zip(node.args.args, defaults, strict=True)
            found[node.name] = [each.arg + (f"={ast.unparse(value)}" if value else "") for each, value in pairs]
    return found


def test_the_functions_for_verl_have_the_arguments_of_verls(sources):
    folder = Path(sources("verl"))
    theirs = {}
    for file in ("fsdp_utils.py", "megatron_utils.py"):
        theirs.update(functions_of((folder / "verl" / "utils" / file).read_text()))
    ours = [name for name, _ in inspect.getmembers(verl, inspect.isfunction) if name in theirs]
    assert len(ours) == 12
    for name in ours:
        found = inspect.signature(getattr(verl, name)).parameters.values()
        assert [each.name + ("" if each.default is each.empty else f"={each.default}") for each in found] == theirs[
            name
        ]


VERL = (
    SERVE
    + """
import torch
from ebbtide import _core, saver
from ebbtide.integrations import verl as ours
program_sources.serve("verl", os.environ["SOURCES"], real=[
    "verl.workers.engine.base", "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.engine.megatron.transformer_impl",
], given={
    "verl.utils.fsdp_utils": vars(ours),
    "verl.utils.megatron_utils": vars(ours),
    "verl.utils.device": {"get_device_name": lambda: "cuda", "get_device_id": lambda: 0},
})
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine.megatron.transformer_impl import MegatronEngine
def away(tensors): return [_core.is_away(each.data_ptr(), each.nbytes) for each in tensors]
for kind in (FSDPEngine, MegatronEngine):
    module = torch.nn.Linear(1024, 1024, device=saver.device)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4, 1024, device=saver.device)).sum().backward()
    optimizer.step()
    engine = kind.__new__(kind)
    engine.engine_config = SimpleNamespace(forward_only=False)
    engine.module = module if kind is FSDPEngine else [module]
    engine.optimizer = optimizer if kind is FSDPEngine else None
    want, moments = module.weight.detach().clone(), [optimizer.state[module.weight]["exp_avg"]]
    for _ in range(2):
        kind.to(engine, "cpu")
        assert all(away([module.weight])) and all(away(moments)) == (kind is FSDPEngine)
        kind.to(engine, "cuda", optimizer=False)
        assert torch.equal(module.weight, want) and all(away(moments)) == (kind is FSDPEngine)
        kind.to(engine, "cuda")
        assert not any(away(moments))
print("done")
"""
)


def test_verls_engines_move_by_ebbtides_functions(sources, tmp_path):
    (tmp_path / "program.py").write_text(VERL)
    variables = {"SOURCES": sources("verl"), "TESTS": str(HERE)}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stdout + done.stderr
