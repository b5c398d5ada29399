"""OpenRLHF's functions over ebbtide, on what DeepSpeed's engines look like; neither package is needed."""

import gc
import inspect
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.integrations import openrlhf  # noqa: E402
from ebbtide.integrations.residency import tag_of  # noqa: E402

WIDTH = 1024
SIGNATURES = {
    "offload_deepspeed_states": ["model", "pin_memory=True", "non_blocking=True"],
    "reload_deepspeed_states": ["model", "non_blocking=True"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_arguments_are_those_of_openrlhf(name):
    found = inspect.signature(getattr(openrlhf, name)).parameters.values()
    shown = [each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in found]
    assert shown == SIGNATURES[name]


class Engine(torch.nn.Module):
    """A DeepSpeedEngine around a ZeRO optimizer of stage 3, or of stages 1 and 2."""

    def __init__(self, device, stage, offload=None):
        super().__init__()
        self.module = torch.nn.Linear(WIDTH, WIDTH, device=device)
        self.config = {"zero_optimization": {"stage": stage, "offload_optimizer": offload}}
        flat = torch.nn.Parameter(torch.randn(WIDTH * WIDTH, device=device))
        inner = torch.optim.AdamW([flat])
        flat.grad = torch.ones_like(flat)
        inner.step()
        flat.grad = None
        gradients = torch.full((WIDTH * WIDTH,), 2.0, device=device)
        if stage == 3:
            zero = SimpleNamespace(fp32_partitioned_groups_flat=[flat], grad_partitions_flat_buffer=gradients)
        else:
            zero = SimpleNamespace(single_partition_of_fp32_groups=[flat], averaged_gradients={0: [gradients]})
        zero.optimizer = inner
        self.optimizer = zero
        self.states = [flat, gradients, *(inner.state[flat][name] for name in ("exp_avg", "exp_avg_sq"))]
        self.emptied = 0

    def empty_partition_cache(self):
        self.emptied += 1


def is_away(tensor):
    return _core.is_away(tensor.data_ptr(), tensor.nbytes)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("pin_memory", [True, False])
def test_the_states_leave_and_come_back_and_the_model_stays(saver, stage, pin_memory):
    engine = Engine(saver.device, stage)
    before = [tensor.detach().clone() for tensor in engine.states]
    for _ in range(2):
        openrlhf.offload_deepspeed_states(engine, pin_memory=pin_memory)
        assert all(map(is_away, engine.states)) and not is_away(engine.module.weight)
        kinds = {info.backup for info in _core.allocations(tag_of(engine, "openrlhf.states"))}
        assert kinds == {_core.BACKUP_PINNED if pin_memory else _core.BACKUP_RAM}
        openrlhf.reload_deepspeed_states(engine)
        assert all(torch.equal(now, then) for now, then in zip(engine.states, before, strict=True))
    assert engine.emptied == 2


@pytest.mark.parametrize("is_away_at_the_end", [False, True])
def test_an_engine_that_is_gone_leaves_no_memory_behind(saver, is_away_at_the_end):
    engine = Engine(saver.device, 3)
    openrlhf.offload_deepspeed_states(engine)
    if not is_away_at_the_end:
        openrlhf.reload_deepspeed_states(engine)
    tag = tag_of(engine, "openrlhf.states")
    del engine
    gc.collect()
    openrlhf.offload_deepspeed_states(Engine(saver.device, 3))
    left = saver.tags()[tag]
    assert left.device_bytes == 0 and left.host_bytes == 0, left


def test_states_that_deepspeed_keeps_on_the_cpu_are_left_to_it(saver):
    engine = Engine(saver.device, 3, offload={"device": "cpu"})
    openrlhf.offload_deepspeed_states(engine)
    openrlhf.reload_deepspeed_states(engine)
    assert tag_of(engine, "openrlhf.states") not in saver.tags() and engine.emptied == 0


def test_all_ranks_meet(saver, monkeypatch):
    meetings = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: meetings.append(1))
    engine = Engine(saver.device, 3)
    openrlhf.offload_deepspeed_states(engine)
    openrlhf.reload_deepspeed_states(engine)
    assert len(meetings) == 2
