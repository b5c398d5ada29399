"""Weights and gradients that leave the device where memory stays short without them.

While LMS is on, a parameter that a module registers gets memory of a tag of its own; so does one that `model.to` has
made, as soon as its module is done, and one that a module finds at its forward. Calls of modules (calls.py) tell which
weights are about to be used. Backward tells it as it unpacks them. Once memory was so short that such memory had to
leave, a gradient leaves as soon as it is accumulated, beside what backward does next
(csrc/torch/lms/gradient_homes.h). csrc/torch/lms/weights.h has the other moves.
"""

import contextlib
import functools
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.lms import devices, outside
from ebbtide.lms.streaming.host_ranges import GRADIENTS as TAG_OF_GRADIENTS
from ebbtide.lms.streaming.host_ranges import WEIGHTS as TAG
from ebbtide.locks import make_lock
from ebbtide.saver.adoption.storage_movers import Mover, make_mover
from ebbtide.saver.operations.trim import trim_quietly
from ebbtide.saver.pools import backends, captures
from ebbtide.saver.regions.region import region
from ebbtide.torch_support.ranks import has_ranks
from ebbtide.torch_support.torch_names import find

_PART_ON_ITS_WAY = 64  # of the limit, a part in so many: gradients that are copied home beside backward


class _State:
    def __init__(self) -> None:
        self.extension: Any = None  # None: LMS is off
        self.device: devices.Device | None = None  # while there is an extension
        self.registration: Any = None  # torch's handle
        self.layers: Any = None  # a streaming.layers.Layers, while there is an extension
        self.may_return = False  # into free room, as soon as a forward pass wants some that are away
        self.applies: tuple[Any, Any] | None = None  # torch.nn.Module's own `_apply` and ours, while it is wrapped
        self.owners: outside.Owners | None = None  # while there is an extension


_now = _State()
_following = make_lock()  # between the end of LMS and a thread that is about to follow the uses of weights


def install(extension: Any, device: devices.Device) -> None:
    """Adopts and moves weights from now on."""
    from torch.nn.modules import module

    _now.owners = outside.Owners(device)
    _trim()  # what an earlier LMS could not, since it was in use
    from ebbtide.lms.streaming.layers import Layers

    _now.layers, _now.may_return = Layers(device, _is_on_host, extension), True
    _now.extension, _now.device = extension, device
    extension.allow_weight_moves(True)
    extension.forget_weight_shortage()
    extension.allow_gradient_homes(True)
    _now.registration = module.register_module_parameter_registration_hook(_on_registration)
    _follow_conversions()
    _follow_uses(extension)


def remove(extension: Any) -> None:
    """Ends `install`. Weights come back as far as there is room; the others stay on the host, where they can be used.
    Every step can be done again.
    """
    with _following:
        _now.extension = None
        if _now.registration is not None:
            _now.registration.remove()
        if _now.layers is not None:
            _now.layers.restore()
            _now.layers.end_pass()
        extension.follow_uses(False)
        _leave_conversions()
    extension.allow_gradient_homes(False)
    _trim()
    if extension.weight_statistics()["weight_host_bytes"] > 0:
        extension.bring_weights_back(_core.UNLIMITED)
    extension.allow_weight_moves(False)


def forget_shortage() -> None:
    """Under a new limit, weights return if there is room, and gradients stay where they are made."""
    _now.may_return = True
    if (extension := _now.extension) is not None:
        extension.forget_weight_shortage()
        extension.allow_gradient_homes(True)  # anew: without those that there are
        _trim_gradients()


def release_gone() -> None:
    """Releases what torch caches of weights that are gone, as where FSDP2 replaces them by shards, and of homes."""
    extension = _now.extension
    if extension is not None and not captures.is_capturing() and extension.have_weights_gone():
        _trim()


def _trim() -> None:
    with contextlib.suppress(StateError):  # a thread makes a module
        trim_quietly([TAG], missing_ok=True)
    _trim_gradients()


def _trim_gradients() -> None:
    with contextlib.suppress(StateError):  # a thread makes a gradient
        trim_quietly([TAG_OF_GRADIENTS], missing_ok=True)


# --- which weights ---


def _on_registration(module: Any, name: str, parameter: Any) -> None:
    _adopt([parameter])


def _follow_conversions() -> None:
    """`_apply` is what `to`, `cuda`, `half` and their like are made of: it converts the parameters of one module after
    those of its children. So a model that is larger than the limit can be moved to the device.
    """
    import torch

    if _now.applies is not None:
        return
    plain = torch.nn.Module._apply

    @functools.wraps(plain)
    def apply(module: Any, *arguments: Any, **options: Any) -> Any:
        result = plain(module, *arguments, **options)
        if _now.extension is not None and not torch.compiler.is_compiling():
            _adopt([parameter for parameter in vars(module).get("_parameters", {}).values() if parameter is not None])
        return result

    _now.applies = plain, apply
    torch.nn.Module._apply = apply


def _leave_conversions() -> None:
    import torch

    # Where another library has wrapped it since, it stays and does nothing.
    if _now.applies is not None and torch.nn.Module._apply is _now.applies[1]:
        torch.nn.Module._apply = _now.applies[0]
        _now.applies = None


def _adopt(parameters: list[Any]) -> None:
    """Gives them memory of the tag, as far as that is LMS's own now and nobody but the parameter may know its address:
    one that has a view, is saved by a graph, or was lent to another library stays.
    """
    extension = _now.extension  # once: another thread may switch LMS off at any moment
    if extension is None or backends.is_forked_child():
        return
    chosen = [parameter for parameter in parameters if _is_to_adopt(parameter, extension)]
    if not chosen:
        return
    release_gone()
    _move(chosen, TAG, make_mover(chosen[0].device.type), trims=True)
    for parameter in chosen:
        _follow_gradient(parameter, extension)
    _follow_uses(extension)


def _follow_gradient(parameter: Any, extension: Any) -> None:
    """Also of one that is frozen now."""
    can_have_one = parameter.is_floating_point() or parameter.is_complex()
    if _is_followed(parameter) or not can_have_one or parameter.is_inference():
        return
    needs_gradient = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses the hook otherwise
    try:
        parameter.register_post_accumulate_grad_hook(_GradientHook(extension))
    finally:
        parameter.requires_grad_(needs_gradient)


def _is_followed(parameter: Any) -> bool:
    """A weak reference in place of this would keep torch.utils.swap_tensors from swapping it."""
    return any(isinstance(hook, _GradientHook) for hook in (parameter._post_accumulate_grad_hooks or {}).values())


def _move(tensors: list[Any], tag: str, mover: Mover, trims: bool) -> None:
    """Tensors that find no room stay where they are."""
    import torch

    assert _now.device is not None
    making = _now.device.making(trims)
    with contextlib.suppress(StateError, torch.OutOfMemoryError), making, region(tag, overflow="split"):
        try:
            for tensor in tensors:
                mover.move(tensor.untyped_storage())
        finally:
            mover.finish()


def _is_to_adopt(parameter: Any, extension: Any) -> bool:
    import torch

    is_parameter = isinstance(parameter, torch.nn.Parameter)
    return is_parameter and extension.may_be_weight(parameter) and _owners().is_parameter_alone(parameter)


# --- gradients ---


class _GradientHook:
    """Of one parameter, and gone with it. Called when its gradient has been accumulated."""

    def __init__(self, extension: Any) -> None:
        self._extension = extension
        self._owner = extension.add_home_owner()

    def __call__(self, parameter: Any) -> None:
        _send_gradient_home(self._owner, parameter)

    def __del__(self) -> None:
        self._extension.remove_home_owner(self._owner)


class _Departures:
    """Gradients of one backward, and of one device, that are copied home beside what backward does next. torch keeps
    `end` while the backward runs, and drops it without a call if that fails: then they stay.
    """

    def __init__(self) -> None:
        self._departures: deque[tuple[Any, int]] = deque()  # with bytes, the oldest first
        self._bytes = 0

    def add(self, departure: Any, size_bytes: int) -> None:
        assert _now.device is not None
        self._departures.append((departure, size_bytes))
        self._bytes += size_bytes
        self._arrive(_now.device.allowed_bytes() // _PART_ON_ITS_WAY)

    def end(self) -> None:
        self._arrive(0)

    def _arrive(self, most_bytes: int) -> None:
        """The oldest ones, until at most so much is on its way."""
        while self._bytes > most_bytes:
            departure, size_bytes = self._departures.popleft()
            self._bytes -= size_bytes
            _arrive(departure)


_departures: WeakValueDictionary[tuple[int, Any], _Departures] = WeakValueDictionary()  # by backward and device


def _send_gradient_home(owner: int, parameter: Any) -> None:
    import torch

    extension = _now.extension
    if torch.compiler.is_compiling() or extension is None or not extension.is_short():
        return
    if backends.is_forked_child() or captures.is_capturing():
        return
    gradient = parameter.grad
    if gradient is None or not extension.may_be_weight(gradient) or not _owners().is_gradient_alone(gradient):
        return
    if (departure := extension.depart_gradient(owner, gradient)) is not None:
        _follow(departure, gradient, can_wait=not _may_be_changed(extension, parameter))
        return
    release_gone()
    # Nobody else knows it, so the order of this stream is enough: no wait for the device.
    address = gradient.data_ptr()
    _move([gradient], TAG_OF_GRADIENTS, make_mover(gradient.device.type, waits=False), trims=False)
    if gradient.data_ptr() != address:
        extension.keep_gradient(owner, gradient)


def _may_be_changed(extension: Any, parameter: Any) -> bool:
    """Whether somebody may write the gradient before the backward ends, past what torch notes of writes."""
    has_hooks = len(parameter._post_accumulate_grad_hooks) > 1 or extension.has_accumulation_hooks(parameter)
    return has_hooks or has_ranks()


def _follow(departure: Any, gradient: Any, can_wait: bool) -> None:
    import torch

    backward = find("_C._current_graph_task_id")()
    if not can_wait or backward == -1:  # somebody calls the node by hand, and tells no end
        _arrive(departure)
        return
    if (departures := _departures.get(key := (backward, gradient.device))) is None:
        departures = _Departures()
        torch.autograd.Variable._execution_engine.queue_callback(departures.end)
        _departures[key] = departures
    departures.add(departure, gradient.nbytes)


def _arrive(departure: Any) -> None:
    gradient = departure.arrive()
    if gradient is not None and _now.extension is not None and _owners().is_gradient_alone(gradient):
        departure.move_home(gradient)


# --- who uses them ---


def are_none_used(extension: Any, module: Any) -> bool:
    """Whether a module inside another one has no weights of its own: most of those that are called."""
    attributes = vars(module)
    has_any = attributes.get("_parameters") or attributes.get("_compiled_call_impl") is not None
    is_wrapper = "_orig_mod" in (attributes.get("_modules") or ())
    return not has_any and not is_wrapper and extension.module_depth() > 0


def _follow_uses(extension: Any) -> None:
    """Once there are weights that may move: torch calls a module faster otherwise."""
    if _core.query_tag(TAG) is not None:
        with _following:
            if _now.extension is extension:  # another thread may have ended LMS
                _layers().replace()
                extension.follow_uses(True)


@contextlib.contextmanager
def used_by(extension: Any, module: Any) -> Iterator[None]:
    """The module's weights are used within, as by a call."""
    if not extension.wanted_of_call(module) & extension.USES:
        yield
        return
    try:
        with extension.ModuleUse() as use:
            before_call(use, module)
            yield
    finally:
        after_call(extension)


def before_call(use: Any, module: Any) -> None:
    """The module's weights come to the device, and stay while it is called.

    Args:
        use: the extension's ModuleUse, which has been entered.
    """
    import torch

    extension = _now.extension
    if extension is None or backends.is_forked_child():
        return
    parameters, modules = vars(module).get("_parameters"), vars(module).get("_modules")
    if not isinstance(parameters, dict) or not isinstance(modules, dict):
        return  # TorchScript's, whose parameters are not seen
    is_outermost = extension.module_depth() == 0
    if is_outermost:
        _layers().end_pass()  # one that an interrupt has left
        release_gone()  # before the memory is missed
    compiled = module if vars(module).get("_compiled_call_impl") is not None else modules.get("_orig_mod")
    if compiled is not None:  # the calls inside are not seen
        parameters = dict(compiled.named_parameters())
        if is_outermost:
            outside.note(extension, outside.COMPILED, module, Counter({outside.WHOLE: 0}))
    uses_copies = compiled is None and not torch.is_grad_enabled() and _layers().serve(module)
    if others := use.begin(parameters, not uses_copies):
        _adopt(others)
    if others or outside.has(module):
        outside.note(extension, outside.WEIGHTS, module, _owners().sort(others, TAG))
    else:
        extension.note_told(module)
    if uses_copies and _now.may_return and _is_on_host(parameters["weight"]) and not captures.is_capturing():
        _now.may_return = False  # once for each limit: what finds no room would only leave again
        assert _now.device is not None
        _now.device.trim()
        extension.bring_weights_back(_core.UNLIMITED)


def after_call(extension: Any) -> None:
    """A pass ends with the outermost module."""
    if extension.module_depth() == 0 and _now.layers is not None:
        _now.layers.end_pass()


def _owners() -> outside.Owners:
    assert _now.owners is not None
    return _now.owners


def _layers() -> Any:
    assert _now.layers is not None
    return _now.layers


def _is_on_host(parameter: Any) -> bool:
    extension = _now.extension
    return extension is not None and not backends.is_forked_child() and extension.is_on_host(parameter)
