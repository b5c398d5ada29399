"""What forbids to recompute a call, as far as torch's state, the module and its arguments tell before it."""

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from ebbtide.lms.recompute.module_states import Subtree  # noqa: E402
from ebbtide.lms.recompute.objections import call_objection, may_decide, module_objection  # noqa: E402
from ebbtide.lms.recompute.structures import Structure  # noqa: E402
from recompute_models import WIDTH, Block  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

# --- the state of torch ---


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class SeesFunctions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


STATES = {
    "no gradients": (torch.no_grad, False),
    "inference": (torch.inference_mode, False),
    "saved-tensor hooks": (lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), False),
    "disabled hooks": (lambda: torch.autograd.graph.disable_saved_tensors_hooks("no"), False),
    "save_on_cpu": (torch.autograd.graph.save_on_cpu, False),
    "dispatch mode": (Sees, False),
    "function mode": (SeesFunctions, False),
    "device": (lambda: torch.device("cpu"), True),
    "autocast": (lambda: torch.autocast("cpu"), True),
    "anomaly": (torch.autograd.detect_anomaly, True),
}


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize("name", STATES)
def test_states(name: str) -> None:
    enter, expected = STATES[name]
    assert may_decide()
    with enter():
        assert may_decide() == expected
    assert may_decide()


def test_default_device() -> None:
    torch.set_default_device("cpu")
    try:
        assert may_decide()
        with SeesFunctions():
            assert not may_decide()
    finally:
        torch.set_default_device(None)


def asked(found: list[bool]) -> Any:
    """A function of one tensor that notes what `may_decide` says."""

    def ask(x: Any) -> Any:
        found.append(may_decide())
        return x * x

    return ask


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpoints_and_running_backwards(is_reentrant: bool) -> None:
    found: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    checkpoint(asked(found), x, use_reentrant=is_reentrant).backward()
    assert found == [False, False]
    y = (x * 2).square()
    y.register_hook(lambda gradient: found.append(may_decide()))
    y.backward()
    assert found[2:] == [False]


def test_transforms_and_tracing() -> None:
    found: list[bool] = []
    ask, x = asked(found), torch.ones(1)
    torch.func.grad(lambda x: ask(x).sum())(x)
    torch.func.vmap(ask)(x)
    torch.jit.trace(ask, x)
    torch.fx.experimental.proxy_tensor.make_fx(ask)(x)
    assert found and not any(found)
    found.clear()
    ask(x)
    assert found == [True]


def test_compiled_code() -> None:
    torch._dynamo.reset()
    said = torch.compile(lambda x: x + may_decide(), backend="eager", fullgraph=True)(torch.zeros(1))
    assert not said.item()


def test_a_captured_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not may_decide()


# --- modules ---


@pytest.fixture
def x() -> Any:
    return torch.ones(1, 2, WIDTH)


def of_call(module: Any, *arguments: Any, **options: Any) -> str:
    return module_objection(Subtree(module)) or call_objection(Subtree(module), Structure(arguments, options, module))


def nothing(*arguments: Any, **options: Any) -> None:
    pass


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_all_modules(kind: str, x: Any) -> None:
    handle = getattr(nn.modules.module, f"register_module_{kind}_hook")(nothing)
    try:
        assert module_objection(Subtree(Block())) == "the program has hooks on all modules"
    finally:
        handle.remove()
    assert module_objection(Subtree(Block())) == ""


HOOKS = {
    "forward hook": lambda block: block.register_forward_hook(nothing),
    "forward hook with keywords": lambda block: block.register_forward_hook(nothing, with_kwargs=True),
    "forward hook always called": lambda block: block.register_forward_hook(nothing, always_call=True),
    "forward pre-hook": lambda block: block.register_forward_pre_hook(nothing),
    "forward pre-hook with keywords": lambda block: block.register_forward_pre_hook(nothing, with_kwargs=True),
    "backward hook": lambda block: block.register_full_backward_hook(nothing),
    "backward pre-hook": lambda block: block.register_full_backward_pre_hook(nothing),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks(name: str, x: Any) -> None:
    block = Block()
    assert of_call(block, x) == ""
    kind = " ".join(name.split()[:2])
    handle = HOOKS[name](block)
    assert of_call(block, x) == f"it has a {kind}"
    handle.remove()
    assert of_call(block, x) == ""
    handle = HOOKS[name](block.mlp[0])
    assert of_call(block, x) == f"it has a {kind} (mlp.0)"
    handle.remove()


@pytest.mark.parametrize("kind", [torch.Generator, random.Random, "numpy"])
def test_generators(kind: Any, x: Any) -> None:
    block = Block()
    generator = pytest.importorskip("numpy").random.default_rng() if kind == "numpy" else kind()
    block.drop.source = generator
    assert of_call(block, x) == f"it holds a {type(generator).__name__} of its own (drop)"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript(x: Any) -> None:
    assert of_call(torch.jit.script(nn.Linear(WIDTH, WIDTH)), x) == "it is a TorchScript module"
    inside = nn.Sequential(torch.jit.trace(nn.Linear(WIDTH, WIDTH), (x,)))
    assert of_call(inside, x) == "it is a TorchScript module (0)"


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_parameters(x: Any) -> None:
    lazy = nn.LazyLinear(2)
    assert "hook" in of_call(lazy, x)  # with which it makes them
    lazy._forward_pre_hooks.clear()
    assert of_call(lazy, x) == "it has parameters that are made in its first call"
    made = nn.LazyLinear(2)
    made(x)
    assert of_call(made, x) == ""


def test_wrappers(x: Any, one_rank: None) -> None:
    from torch.distributed import device_mesh
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    assert of_call(nn.Sequential(checkpoint_wrapper(Block())), x) == "it is checkpointed by the program (0)"
    wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(Block()))
    assert of_call(wrapped, x) == "it synchronises its parameters with other ranks (0)"
    mesh = device_mesh.init_device_mesh("cpu", (1,))
    sharded = nn.Sequential(fully_shard(Block(), mesh=mesh))
    assert of_call(sharded, x) == "it gathers its parameters from other ranks (0)"


def test_checkpoints_of_transformers(x: Any) -> None:
    class GradientCheckpointingLayer(Block):
        gradient_checkpointing = False

    layer = GradientCheckpointingLayer()
    assert of_call(layer, x) == ""
    layer.gradient_checkpointing = True
    assert of_call(nn.Sequential(layer), x) == "it is checkpointed by the program (0)"
    assert of_call(layer.eval(), x) == ""


# --- arguments ---


class Cache:
    """As transformers' key and value caches."""


class Words(dict):
    pass


@pytest.mark.parametrize("value", [Cache(), Words(), {1, 2}, object(), iter([1]), lambda: None, nn.Identity()])
def test_objects_that_may_change(value: Any, x: Any) -> None:
    name = type(value).__name__
    assert of_call(Block(), x, past_key_values=value) == f"its argument past_key_values is or holds a {name}"
    assert of_call(Block(), x, [{"deep": value}]) == f"its argument 1 is or holds a {name}"


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 2.5, 1j, "text", b"bytes", ..., slice(1), range(3), int, (1, [2, {"a": None}])),
        *(torch.float16, torch.device("cpu"), torch.strided, torch.Size([2]), torch.preserve_format),
    ],
)
def test_values_that_stay(value: Any, x: Any) -> None:
    assert of_call(Block(), x, past_key_values=value) == ""
    structure = Structure((value,), {})
    assert structure.fill([]) == ([value], {}) and type(structure.fill([])[0][0]) is type(value)


def test_a_list_that_holds_itself(x: Any) -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert of_call(Block(), x, endless) == "its argument 1 is or holds a list"


def test_nothing_to_save(x: Any) -> None:
    block = Block().requires_grad_(False)
    assert of_call(block, x) == "it needs no gradient"
    assert of_call(block, x, mask={"a": [x.clone().requires_grad_()]}) == ""
    block.norm.requires_grad_(True)
    assert of_call(block, x) == ""


def test_inference_tensors(x: Any) -> None:
    with torch.inference_mode():
        made = torch.ones(1)
    assert of_call(Block(), x, made) == "it uses a tensor of torch.inference_mode"
