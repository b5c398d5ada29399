"""ebbtide's functions for verl in verl's own engine, around Megatron-LM's own model and optimizer.

`make programs` downloads both (test_program_sources.py). Megatron-LM runs on the CPU, as one rank.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checks.program_wheels import NOT_THERE, unpack

pytest.importorskip("torch")

HERE = Path(__file__).parent
pytestmark = [pytest.mark.sim_only, NOT_THERE]

PROGRAM = """
import os, sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = [os.environ["TESTS"], os.environ["MEGATRON"]]
from types import SimpleNamespace
import torch
from torch.overrides import TorchFunctionMode

class OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if function is torch.Tensor.type and len(args) == 1:  # Megatron asks for "torch.cuda.BFloat16Tensor"
            return function(*args).replace("torch.", "torch.cuda.")
        return args[0] if function is torch.Tensor.cuda else function(*args, **kwargs)

mode = OnTheCpu()
mode.__enter__()
torch.cuda.current_device = lambda: "cpu"
os.environ["LOCAL_RANK"] = "0"
torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
parallel_state.initialize_model_parallel()

def make():
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=1024, num_attention_heads=1, params_dtype=torch.bfloat16, bf16=True
    )
    module = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(2)))
    module[0].requires_grad_(False)  # as a base model below LoRA
    how = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, how, module)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    return model, get_megatron_optimizer(settings, [model])

def step(model, optimizer):
    model.zero_grad_buffer()
    model(torch.ones(4, 1024, dtype=torch.bfloat16)).float().square().mean().backward()
    model.finish_grad_sync()
    assert optimizer.step()[0]

from ebbtide import _core
from ebbtide.integrations import verl as ours
import program_sources
program_sources.serve("verl", os.environ["SOURCES"], real=[
    "verl.workers.engine.base", "verl.workers.engine.megatron.transformer_impl",
], given={
    "verl.utils.megatron_utils": vars(ours),
    "verl.utils.device": {"get_device_name": lambda: "cuda", "get_device_id": lambda: 0},
})
from verl.workers.engine.megatron.transformer_impl import MegatronEngine

def is_away(tensor): return _core.is_away(tensor.data_ptr(), tensor.nbytes)

plain, plain_optimizer = make()
model, optimizer = make()
engine = MegatronEngine.__new__(MegatronEngine)
engine.engine_config = SimpleNamespace(forward_only=False)
engine.module, engine.optimizer = [model], optimizer
for turn in range(3):
    step(plain, plain_optimizer)
    step(model, optimizer)
    ((buffer,), (inner,)) = (model.buffers, optimizer.chained_optimizers)
    ((shard,),) = inner.shard_fp32_from_float16_groups
    moments = [inner.optimizer.state[shard][name] for name in ("exp_avg", "exp_avg_sq")]
    frozen = model.module[0].weight
    everything = [buffer.param_data, buffer.grad_data, frozen, shard, *moments]
    MegatronEngine.to(engine, "cpu")
    addresses = [each.data_ptr() for each in everything]
    assert all(map(is_away, everything)), [is_away(each) for each in everything]
    MegatronEngine.to(engine, "cuda", optimizer=False)
    assert [is_away(each) for each in everything] == [False] * 3 + [True] * 3
    MegatronEngine.to(engine, "cuda")
    assert not any(map(is_away, everything)) and not buffer.grad_data.any()
    assert [each.data_ptr() for each in everything] == addresses
for one, other in zip(model.parameters(), plain.parameters(), strict=True):
    assert torch.equal(one, other)
print("done")
"""


def test_megatrons_model_and_optimizer_train_the_same_with_cycles(tmp_path):
    folders = {name: unpack(name, tmp_path / name) for name in ("verl", "megatron_core")}
    (tmp_path / "program.py").write_text(PROGRAM)
    variables = {"SOURCES": str(folders["verl"]), "MEGATRON": str(folders["megatron_core"]), "TESTS": str(HERE)}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, **variables, "EBBTIDE_DRIVER": "sim"}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stdout + done.stderr
