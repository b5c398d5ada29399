"""verl's functions over ebbtide, on plain modules, FSDP 2 and what Megatron's classes look like; verl is not needed."""

import gc
import inspect
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import OutOfMemoryError  # noqa: E402
from ebbtide.integrations import verl  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_scans")

WIDTH = 1024
SIGNATURES = {
    "offload_fsdp_model_to_cpu": ["model", "empty_cache=True"],
    "offload_fsdp2_model_to_cpu": ["model", "empty_cache=True"],
    "load_fsdp_model_to_gpu": ["model"],
    "load_fsdp2_model_to_gpu": ["model"],
    "offload_fsdp_optimizer": ["optimizer"],
    "load_fsdp_optimizer": ["optimizer", "device_id"],
    "offload_megatron_model_to_cpu": ["models"],
    "load_megatron_model_to_gpu": ["models", "load_grad=True", "load_frozen_params=True"],
    "offload_megatron_copy_params": ["optimizers"],
    "load_megatron_copy_params": ["optimizers"],
    "offload_megatron_optimizer": ["optimizers"],
    "load_megatron_optimizer": ["optimizers"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_arguments_are_those_of_verl(name):
    found = inspect.signature(getattr(verl, name)).parameters.values()
    shown = [each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in found]
    assert shown == SIGNATURES[name]


def step(model, optimizer, device):
    """One step, the same for the same weights."""
    torch.manual_seed(1)
    model(torch.randn(8, WIDTH, device=device)).square().mean().backward()
    optimizer.step()


def make(device, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH)).to(device)
    return model, torch.optim.AdamW(model.parameters())


def cycle(model, optimizer):
    verl.offload_fsdp_model_to_cpu(model)
    verl.offload_fsdp_optimizer(optimizer)
    verl.load_fsdp_model_to_gpu(model)
    verl.load_fsdp_optimizer(optimizer, 0)


def test_training_with_cycles_is_training_without(saver):
    plain, plain_optimizer = make(saver.device)
    model, optimizer = make(saver.device)
    for _ in range(3):
        step(plain, plain_optimizer, saver.device)
        step(model, optimizer, saver.device)
        cycle(model, optimizer)
    for ours, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_parameters_buffers_gradients_and_states_leave(saver):
    model, optimizer = make(saver.device)
    step(model, optimizer, saver.device)
    verl.offload_fsdp_model_to_cpu(model)
    verl.offload_fsdp_optimizer(optimizer)
    away = [*model.parameters(), *model.buffers(), *(parameter.grad for parameter in model.parameters())]
    away += [
        value for state in optimizer.state.values() for value in state.values() if value.device.type == saver.device
    ]
    assert all(_core.is_away(tensor.data_ptr(), tensor.nbytes) for tensor in away)
    addresses = [tensor.data_ptr() for tensor in away]
    verl.load_fsdp_model_to_gpu(model)
    verl.load_fsdp_optimizer(optimizer, 0)
    assert [tensor.data_ptr() for tensor in away] == addresses
    assert not any(_core.is_away(tensor.data_ptr(), tensor.nbytes) for tensor in away)


def test_repeated_calls_do_nothing(saver):
    model, optimizer = make(saver.device)
    step(model, optimizer, saver.device)
    weight = model[0].weight.detach().clone()
    for _ in range(2):
        verl.offload_fsdp2_model_to_cpu(model, empty_cache=False)
        verl.offload_fsdp_optimizer(optimizer)
    for _ in range(2):
        verl.load_fsdp2_model_to_gpu(model)
        verl.load_fsdp_optimizer(optimizer, 0)
    assert torch.equal(model[0].weight, weight)


def test_each_model_has_a_tag_of_its_own(saver):
    one, _ = make(saver.device)
    other, _ = make(saver.device, seed=2)
    verl.offload_fsdp_model_to_cpu(one)
    assert other(torch.ones(8, WIDTH, device=saver.device)).isfinite().all()
    verl.load_fsdp_model_to_gpu(one)
    assert verl._tag_of(one, "model") != verl._tag_of(other, "model")


def test_an_optimizer_without_states_and_objects_never_offloaded_are_left_alone(saver):
    model, optimizer = make(saver.device)
    verl.offload_fsdp_optimizer(optimizer)
    assert verl._tag_of(optimizer, "optimizer") not in saver.tags()
    verl.load_fsdp_optimizer(optimizer, 0)
    verl.load_fsdp_model_to_gpu(model)
    assert verl._tag_of(model, "model") not in saver.tags()


def test_a_load_without_room_can_be_repeated(saver):
    saver.trim()  # what other tests have cached would make room
    model, optimizer = make(saver.device)
    step(model, optimizer, saver.device)
    weight = model[0].weight.detach().clone()
    verl.offload_fsdp_model_to_cpu(model)
    saver.configure(device_limit=_core.query_device(0).held_bytes + (1 << 20))
    with pytest.raises(OutOfMemoryError):
        verl.load_fsdp_model_to_gpu(model)
    saver.configure(device_limit=None)
    verl.load_fsdp_model_to_gpu(model)
    assert torch.equal(model[0].weight, weight)


def test_states_from_a_checkpoint_on_another_device_move(saver, monkeypatch):
    moved = []

    class State(torch.Tensor):
        @property
        def device(self):
            return SimpleNamespace(type="elsewhere")

        def to(self, device, non_blocking):
            moved.append((device, non_blocking))
            return torch.ones(1)

    model, optimizer = make(saver.device)
    step(model, optimizer, saver.device)
    state = optimizer.state[model[0].weight]
    state["exp_avg"] = state["exp_avg"].as_subclass(State)
    verl.load_fsdp_optimizer(optimizer, 7)
    assert moved == [(7, True)] and torch.equal(state["exp_avg"], torch.ones(1))


@pytest.mark.parametrize("kind", [None, "capturable", "fused"])
def test_step_counts_move_only_where_torch_wants_them_on_the_device(saver, monkeypatch, kind):
    model, optimizer = make(saver.device)
    step(model, optimizer, saver.device)
    if kind is not None:
        optimizer.param_groups[0][kind] = True
    monkeypatch.setattr(verl, "saver", SimpleNamespace(device="elsewhere", resume=lambda *_, **__: None))
    verl.load_fsdp_optimizer(optimizer, "meta")
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].is_meta
    assert state["step"].device.type == ("cpu" if kind is None else "meta")


def test_a_model_from_another_device_moves(saver, monkeypatch):
    model, _ = make(saver.device)
    moved = []
    monkeypatch.setattr(model, "to", lambda device: moved.append(device))
    verl.load_fsdp_model_to_gpu(model)
    assert moved == []
    monkeypatch.setattr(torch.nn.Module, "parameters", lambda self: [SimpleNamespace(device=SimpleNamespace(type="x"))])
    verl.load_fsdp_model_to_gpu(model)
    assert moved == [saver.device]


# --- FSDP 2 ---


def make_sharded(device):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh(device, (1,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)).to(
        device
    )
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def test_the_shards_of_fsdp2_leave_and_train_the_same(saver, one_rank):
    plain, plain_optimizer = make_sharded(saver.device)
    model, optimizer = make_sharded(saver.device)
    for _ in range(2):
        step(plain, plain_optimizer, saver.device)
        step(model, optimizer, saver.device)
        cycle(model, optimizer)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())
    optimizer.zero_grad()
    verl.offload_fsdp_model_to_cpu(model)
    verl.offload_fsdp_optimizer(optimizer)
    shards = [parameter.to_local() for parameter in model.parameters()]
    shards += [state[name].to_local() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert all(_core.is_away(shard.data_ptr(), shard.nbytes) for shard in shards)
    verl.load_fsdp_model_to_gpu(model)
    verl.load_fsdp_optimizer(optimizer, 0)
    assert not any(_core.is_away(shard.data_ptr(), shard.nbytes) for shard in shards)
    del shards
    gc.collect()


# --- what Megatron's classes look like ---


class Chunk(torch.nn.Module):
    """DistributedDataParallel of Megatron: parameters are views of buffers, and `buffers` is a list."""

    def __init__(self, device):
        super().__init__()
        flat = torch.arange(WIDTH * WIDTH, dtype=torch.float32, device=device)
        buffer = SimpleNamespace(param_data=flat, grad_data=torch.ones_like(flat))
        self.module = torch.nn.Module()
        self.module.weight = self.weight = torch.nn.Parameter(flat.view(WIDTH, WIDTH))
        self.module.base = torch.nn.Parameter(torch.full((WIDTH, WIDTH), 5.0, device=device), requires_grad=False)
        self.weight.main_grad = buffer.grad_data.view(WIDTH, WIDTH)
        self.__dict__["buffers"] = [buffer]
        self.__dict__["expert_parallel_buffers"] = []


def test_a_megatron_chunk_keeps_its_parameters_and_drops_its_gradients(saver):
    chunk, reference = Chunk(saver.device), torch.nn.Linear(WIDTH, WIDTH, device=saver.device)
    weight, reference_weight = chunk.weight.detach().clone(), reference.weight.detach().clone()
    (buffer,) = chunk.buffers
    verl.offload_megatron_model_to_cpu([chunk, reference])
    frozen = chunk.module.base
    for tensor in (buffer.param_data, buffer.grad_data, reference.weight, frozen):
        assert _core.is_away(tensor.data_ptr(), tensor.nbytes)
    verl.load_megatron_model_to_gpu([chunk, reference], load_grad=False, load_frozen_params=False)
    assert _core.is_away(frozen.data_ptr(), frozen.nbytes)
    verl.load_megatron_model_to_gpu([chunk, reference], load_grad=False)
    assert (frozen == 5.0).all()
    assert torch.equal(chunk.weight, weight) and torch.equal(reference.weight, reference_weight)
    assert _core.is_away(buffer.grad_data.data_ptr(), buffer.grad_data.nbytes)
    verl.load_megatron_model_to_gpu([chunk, reference])
    assert not buffer.grad_data.any()
    buffer.grad_data.fill_(3.0)
    verl.load_megatron_model_to_gpu([chunk, reference])  # they are there, and stay as they are
    assert (chunk.weight.main_grad == 3.0).all()


class Distributed:
    """DistributedOptimizer of Megatron: fp32 shards of parameters beside an optimizer over them."""

    def __init__(self, device, has_parameters=True):
        shard = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
        self.shard_fp32_from_float16_groups = [[shard, None]]  # None: a precision-aware optimizer keeps the copy itself
        self.optimizer = torch.optim.AdamW([shard]) if has_parameters else None
        if has_parameters:
            shard.grad = torch.ones_like(shard)
            self.optimizer.step()
            shard.grad = None

    def tensors(self):
        ((shard, _),) = self.shard_fp32_from_float16_groups
        state = self.optimizer.state[shard]
        return [shard, state["exp_avg"], state["exp_avg_sq"]]


def test_a_megatron_optimizer_leaves_with_its_copies(saver):
    """Here several in a chain; test_a_hybrid_optimizer_gives_the_states_of_its_parts has one without."""
    one = Distributed(saver.device)
    empty = Distributed(saver.device, has_parameters=False)
    optimizers = SimpleNamespace(chained_optimizers=[one, empty])
    before = [tensor.detach().clone() for tensor in one.tensors()]
    verl.offload_megatron_optimizer(optimizers)
    assert all(_core.is_away(tensor.data_ptr(), tensor.nbytes) for tensor in one.tensors())
    verl.load_megatron_optimizer(optimizers)
    assert all(torch.equal(now, then) for now, then in zip(one.tensors(), before, strict=True))


def test_the_copies_of_a_megatron_optimizer_leave_alone(saver):
    one = Distributed(saver.device)
    verl.offload_megatron_copy_params(one)
    shard, exp_avg, _ = one.tensors()
    assert _core.is_away(shard.data_ptr(), shard.nbytes)
    assert not _core.is_away(exp_avg.data_ptr(), exp_avg.nbytes)
    verl.load_megatron_copy_params(one)
    assert not _core.is_away(shard.data_ptr(), shard.nbytes)


def test_a_hybrid_optimizer_gives_the_states_of_its_parts(saver):
    parts = [Distributed(saver.device) for _ in range(2)]
    hybrid = SimpleNamespace(sub_optimizers=[part.optimizer for part in parts])

    class Outer:
        optimizer = hybrid

    outer = Outer()
    verl.offload_megatron_optimizer(outer)
    states = [tensor for part in parts for tensor in part.tensors()[1:]]
    assert all(_core.is_away(tensor.data_ptr(), tensor.nbytes) for tensor in states)
    verl.load_megatron_optimizer(outer)
    assert not any(_core.is_away(tensor.data_ptr(), tensor.nbytes) for tensor in states)


def test_all_of_it_does_nothing_where_ebbtide_is_off(run_python):
    done = run_python(
        """
        import torch
        from ebbtide import saver
        from ebbtide.integrations import verl
        model = torch.nn.Linear(3, 3, device=saver.device)
        before = model.weight.detach().clone()
        verl.offload_fsdp_model_to_cpu(model)
        verl.load_fsdp_model_to_gpu(model)
        assert torch.equal(model.weight, before)
        print("same")
        """,
        EBBTIDE_DRIVER="off",
    )
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr
