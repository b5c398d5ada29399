"""Which calls of modules are recomputed: what the plan asks for, where it is safe.

A plan (csrc/policy/lms/step_choice.h) names calls of modules whose saved tensors are to be dropped and made again in
backward. Before a kind of module is recomputed for the first time, one of its calls runs twice, beside the tensors that
it saved, and must give the same bits; and its arguments must still be unchanged when its backward begins. A difference
found then costs nothing: later it would be an error, or a wrong gradient.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ebbtide.lms.recompute.module_calls import ModuleCalls
from ebbtide.lms.recompute.objections import may_decide, module_objection, objection
from ebbtide.lms.recompute.second_runs import run, versions
from ebbtide.lms.recompute.structures import tensors_in
from ebbtide.lms.recompute.trials import try_out

_TRIED = "tried in this step"  # until its backward


_current: "Blocks | None" = None  # while LMS is on


def install(extension: Any) -> None:
    """From now on calls of modules may be recomputed."""
    global _current
    _current = Blocks(extension)


def remove() -> None:
    """Ends `install`. Can be called again."""
    global _current
    if _current is not None:
        _current.remove()
        _current = None


def allow(may_recompute: Callable[[Any], bool]) -> None:
    """Which modules the program allows to be recomputed."""
    if _current is not None:
        _current.allow(may_recompute)


def recomputed() -> list[tuple[str, int, float]]:
    """The modules that the latest step's plan recomputes: class, bytes that it drops, seconds that it costs."""
    return [] if _current is None else _current.recomputed()


def reasons() -> dict[str, str]:
    """Why modules can't be recomputed, by class."""
    return {} if _current is None else _current.reasons()


class Blocks:
    """From its construction until `remove`.

    Args:
        extension: `_lms`.
    """

    def __init__(self, extension: Any) -> None:
        self._extension = extension
        self._may_recompute: Callable[[Any], bool] = lambda _: True
        self._classes: dict[int, str] = {}  # of the blocks of plans, by id
        self._calls: ModuleCalls | None = ModuleCalls(self._handle)
        self._reasons: dict[Any, str] = {}  # by kind of module; "": it can be recomputed
        self._kinds: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._forbidden: dict[int, str] = {}  # by id of a module: the reason

    def remove(self) -> None:
        """Calls are torch's own again."""
        if self._calls is not None:
            self._calls.restore()
            self._calls = None

    def allow(self, may_recompute: Callable[[Any], bool]) -> None:
        """Which modules the program allows to be recomputed. Those that were refused before are asked anew."""
        self._may_recompute = may_recompute
        self._forbidden.clear()

    def recomputed(self) -> list[tuple[str, int, float]]:
        """Of the latest plan: class, bytes, seconds."""
        blocks = self._extension.recomputed_blocks()
        return [(self._classes.get(number, "module"), size, seconds) for number, size, seconds in blocks]

    def reasons(self) -> dict[str, str]:
        """Why modules are not recomputed, by their class."""
        return {kind[0].__name__: reason for kind, reason in self._reasons.items() if reason and reason != _TRIED}

    def _handle(self, call: Any, module: Any, arguments: Any, options: Any) -> Any:
        extension = self._extension
        with extension.CallScope(id(module), arguments, options) as told:
            if told:
                if told & extension.NEW_CHOICE:
                    self._check_blocks(module)
                if told & extension.RECOMPUTE and id(module) not in self._forbidden and may_decide():
                    return self._run(call, module, arguments, options)
            return call(module, *arguments, **options)

    def _check_blocks(self, root: Any) -> None:
        """Of a choice that is new: chooses anew without those that can't be recomputed, as far as the modules tell."""
        modules: dict[int, Any] = {}
        for _ in range(8):  # the choice may turn to the modules inside
            blocks = {number for number, _, _ in self._extension.recomputed_blocks()} - self._forbidden.keys()
            modules = modules or {id(module): module for module in root.modules()}
            self._classes.update((number, type(modules[number]).__name__) for number in blocks if number in modules)
            # A program may call its blocks without a module around them: then each is looked at as it is called.
            reasons = {number: self._reason(modules[number]) for number in blocks if number in modules}
            refused = {number: reason for number, reason in reasons.items() if reason}
            for number, reason in refused.items():
                self._forbid(number, reason)
            if not refused:
                return
            self._extension.choose_again()

    def _reason(self, module: Any) -> str:
        if not self._may_recompute(module):
            return "the program forbids it"
        reason = self._reasons.get(self._kind_of(module), "")
        return module_objection(module) or ("" if reason == _TRIED else reason)

    def _forbid(self, number: int, reason: str) -> None:
        self._forbidden[number] = reason
        self._extension.forbid_recomputation(number)

    def _kind_of(self, module: Any) -> Any:
        if (kind := self._kinds.get(module)) is None:
            kind = (type(module), module.training, *((name, type(each)) for name, each in module.named_modules()))
            self._kinds[module] = kind
        return kind

    def _run(self, call: Any, module: Any, arguments: Any, options: Any) -> Any:
        kind = self._kind_of(module)
        options = _without_caches(module, options)
        self._classes[id(module)] = type(module).__name__
        reason = objection(module, arguments, options) if self._may_recompute(module) else "the program forbids it"
        if reason:
            self._forbid(id(module), reason)
            return call(module, *arguments, **options)
        known = self._reasons.get(kind)
        if known == "":
            return run(call, module, arguments, options, self._second_run)
        self._extension.disturb_step()
        if known is None:
            return self._try(kind, call, module, arguments, options)
        if known != _TRIED:
            self._forbid(id(module), known)
        return call(module, *arguments, **options)

    @contextlib.contextmanager
    def _second_run(self) -> Iterator[None]:
        try:
            yield
        finally:  # torch ends a second run by an exception, as soon as all that backward wants is there
            self._extension.note_demand()

    def _try(self, kind: Any, call: Any, module: Any, arguments: Any, options: Any) -> Any:
        before = versions(arguments, options)
        output, reason = try_out(call, module, arguments, options)
        if reason:
            self._reasons[kind] = reason
            self._forbid(id(module), reason)
            return output
        self._reasons[kind] = _TRIED

        def on_backward(_: Any) -> None:
            changed = versions(arguments, options) != before
            self._reasons[kind] = "an argument is changed in place after the call" if changed else ""

        wanted = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for tensor in wanted[:1]:
            tensor.register_hook(on_backward)
        return output


def _without_caches(module: Any, options: dict[str, Any]) -> dict[str, Any]:
    """transformers hands an empty cache of keys and values to each layer in training, too, which adds to it. Its own
    checkpoints leave it out, in these words.
    """
    if not any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__):
        return options
    places = [place for each in module.modules() if isinstance(place := getattr(each, "layer_idx", None), int)]
    changed = dict(options)
    for name in ("past_key_values", "past_key_value", "layer_past"):
        cache = options.get(name)
        if cache is not None and hasattr(cache, "get_seq_length") and cache.get_seq_length(*places[:1]) == 0:
            changed[name] = None
            changed.update({"use_cache": False} if "use_cache" in options else {})
    return changed
