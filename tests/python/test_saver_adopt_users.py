"""saver.adopt without force moves a tensor that only torch uses, and each user of the tensor sees the move."""

import copy
import io

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_scans")

WIDTH = 8


def tag_of(tensor):
    info = _core.find(tensor.data_ptr())
    return None if info is None else info.tag


def make_model(device):
    torch.manual_seed(0)
    parts = (torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    return torch.nn.Sequential(*parts).to(device)


def train(model, optimizer, data, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
    return loss


class World:
    """A trained model, and other objects that a test keeps alive."""

    def __init__(self, device, **options):
        self.model = make_model(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.data = torch.randn(4, WIDTH, device=device)
        self.loss = train(self.model, self.optimizer, self.data)
        self.kept = None


def tie(world):
    world.model[2].weight = world.model[0].weight


def share_views(world):
    parameters = list(world.model.parameters())
    return [(p.detach(), p.data, p[1:], p.view(-1)[2:], p.detach().view(torch.int32)) for p in parameters]


def share_views_without_gradients(world):
    with torch.no_grad():
        return [p.unbind(0) for p in world.model.parameters()]


def hook(world):
    weight = world.model[0].weight
    weight.register_hook(lambda gradient: gradient)
    weight.register_post_accumulate_grad_hook(lambda parameter: None)
    world.model.register_forward_hook(lambda *_: None)
    world.model.register_full_backward_hook(lambda *_: None)


def average(world):
    averaged = torch.optim.swa_utils.AveragedModel(world.model)
    averaged.update_parameters(world.model)
    return averaged


def leave_a_graph(world):
    return world.model(world.data)


def leave_a_graph_and_step(world):
    result = world.model(world.data)
    world.optimizer.step()
    return result


def leave_a_graph_with_hooks(world):
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return world.model(world.data)


def leave_a_graph_of_gradients(world):
    return torch.autograd.grad(world.model(world.data).sum(), list(world.model.parameters()), create_graph=True)


def leave_a_checkpoint(world):
    return torch.utils.checkpoint.checkpoint(world.model, world.data, use_reentrant=False)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x * x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def leave_a_function_of_the_user(world):
    return [Squared.apply(p) for p in world.model.parameters()]


def save_and_load(world):
    file = io.BytesIO()
    torch.save(world.model.state_dict(), file)
    file.seek(0)
    world.model.load_state_dict(torch.load(file, map_location=world.data.device))


def call_functionally(world):
    return torch.func.functional_call(world.model, dict(world.model.named_parameters()), world.data)


def lend_and_take_back(world):
    partners = [torch.from_dlpack(p.detach()) for p in world.model.parameters()]
    return sum(float(partner.sum()) for partner in partners)


def compile_it(world):
    compiled = torch.compile(world.model, backend="aot_eager")
    train(compiled, world.optimizer, world.data)
    return compiled


def do_nothing(world):
    pass


def copy_it(world):
    return copy.deepcopy(world.model)


def take_its_state(world):
    return world.model.state_dict()


USES = (
    *(do_nothing, tie, share_views, share_views_without_gradients, hook, average, leave_a_graph),
    *(leave_a_graph_and_step, leave_a_graph_with_hooks, leave_a_graph_of_gradients, leave_a_checkpoint),
    *(leave_a_function_of_the_user, save_and_load, call_functionally, lend_and_take_back, compile_it),
    *(copy_it, take_its_state),
)


def adopt_all(saver, tag, worlds, *more):
    """One call for all, because each call looks at every object of the process."""
    result = saver.adopt([(world.model, world.optimizer) for world in worlds.values()], *more, tag=tag)
    parameters = {name: list(world.model.parameters()) for name, world in worlds.items()}
    elsewhere = {
        name: {tag_of(t) for p in each for t in (p, p.grad) if t is not None} - {tag}
        for name, each in parameters.items()
    }
    assert elsewhere == {name: set() for name in worlds}
    assert {reason: count for reason, count in result.skipped.items() if not reason.startswith("on ")} == {}


def test_models_after_training(saver, tag):
    worlds = {use.__name__: World(saver.device) for use in USES}
    for use, world in zip(USES, worlds.values(), strict=True):
        world.kept = use(world)
    before = {name: [p.detach().cpu().clone() for p in world.model.parameters()] for name, world in worlds.items()}
    shared = worlds["share_views"]
    adopt_all(saver, tag, worlds, shared.kept)
    saver.pause(tag)
    saver.resume(tag)
    for name, world in worlds.items():
        now = [p.detach().cpu() for p in world.model.parameters()]
        assert all(torch.equal(p, old) for p, old in zip(now, before[name], strict=True)), name
    for p, aliases in zip(shared.model.parameters(), shared.kept, strict=True):
        assert {alias.untyped_storage().data_ptr() for alias in aliases} == {p.untyped_storage().data_ptr()}
    for world in worlds.values():
        train(world.model, world.optimizer, world.data)


def test_optimizers_of_every_kind(saver, tag):
    kinds = ({"fused": True}, {"foreach": True}, {"foreach": False}, {"amsgrad": True})
    worlds = {str(options): World(saver.device, **options) for options in kinds}
    adopt_all(saver, tag, worlds)
    for world in worlds.values():
        train(world.model, world.optimizer, world.data)


def test_what_a_graph_saved(saver, tag):
    x = torch.ones(WIDTH, WIDTH, device=saver.device)
    leaf = torch.ones(WIDTH, WIDTH, device=saver.device, requires_grad=True)
    hidden = (x @ leaf).exp()
    result = saver.adopt(x, hidden, leaf, tag=tag)
    assert (result.storages, result.skipped) == (3, {})
    saver.pause(tag)
    saver.resume(tag)
    (hidden * 2).sum().backward()
    assert torch.allclose(leaf.grad, torch.full_like(leaf, 2 * WIDTH * torch.e**WIDTH))


PARALLEL = """
import gc, torch, torch.distributed as dist
from ebbtide import saver
gc.unfreeze()  # what is hidden takes adopt six times as long to find
dist.init_process_group("gloo", init_method=STORE, rank=0, world_size=1)

def make():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))

def steps(model, optimizer, count=3):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()

def check(name, model, lend=None):
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer)
    partner = torch.from_dlpack(lend().detach()) if lend else None
    result = saver.adopt(model, optimizer, tag=name)
    print(name, result.storages > 0, sum(result.skipped.values()))
    del partner
    assert saver.adopt(model, optimizer, tag=name).skipped == {}
    saver.pause(name)
    saver.resume(name)
    steps(model, optimizer)
"""


def run_parallel(run_python, tmp_path, code):
    done = run_python(PARALLEL.replace("STORE", repr(f"file://{tmp_path}/store")) + code, trains=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.sim_only
def test_distributed_data_parallel(run_python, tmp_path):
    code = """
from torch.nn.parallel import DistributedDataParallel as DDP
ways = {"ddp": {}, "views": dict(gradient_as_bucket_view=True), "static": dict(static_graph=True)}
for name, options in ways.items():
    check(name, DDP(make(), **options))
    inner = make()
    check(name + "-lent", DDP(inner, **options), lambda: inner[0].weight)
    check(name + "-lent-gradient", DDP(inner, **options), lambda: inner[0].weight.grad)
"""
    lines = run_parallel(run_python, tmp_path, code)
    assert [line for line in lines if "lent" not in line] == ["ddp True 0", "views True 0", "static True 0"]
    lent = [int(line.split()[-1]) for line in lines if "lent" in line]
    assert len(lent) == 6
    assert all(count >= 1 for count in lent), lines


@pytest.mark.sim_only
def test_fully_sharded_data_parallel(run_python, tmp_path):
    code = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
check("flat", FSDP(make(), device_id=torch.device("cpu")))
check("original", FSDP(make(), device_id=torch.device("cpu"), use_orig_params=True))
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.6 has it elsewhere
    from torch.distributed._composable.fsdp import fully_shard
model = make()
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
check("sharded", model)
"""
    lines = run_parallel(run_python, tmp_path, code)
    assert lines == ["flat True 0", "original True 0", "sharded True 0"]
