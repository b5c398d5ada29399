"""What LMS does around each call of a module: it names the call for plans, brings its weights, and may recompute it.

A plan (csrc/policy/lms/step_choice.h) names calls whose saved tensors are to be dropped and made again in backward.
Before a kind of module is recomputed for the first time, one of its calls runs twice, beside the tensors that it saved,
and must give the same bits; and its arguments must still be unchanged when its backward begins. A difference found then
costs nothing: later it would be an error, or a wrong gradient.
"""

import contextlib
import json
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ebbtide import driver_choice, torch_extension
from ebbtide.errors import StateError
from ebbtide.lms import weights
from ebbtide.lms.recompute.module_calls import ModuleCalls
from ebbtide.lms.recompute.module_states import ModuleState, Subtree
from ebbtide.lms.recompute.objections import call_objection, may_decide, module_objection
from ebbtide.lms.recompute.second_runs import run
from ebbtide.lms.recompute.structures import Structure, tensors_in
from ebbtide.lms.recompute.trials import try_out
from ebbtide.torch_support.ranks import has_ranks
from ebbtide.torch_support.torch_names import find

# They save what they are given, and hardly anything that recomputing would drop.
_LAYERS = ("activation", "batchnorm", "conv", "dropout", "linear", "normalization", "padding", "pooling", "sparse")
_PLAN_FORMAT = "ebbtide.lms plan 1"
_FORBIDDEN = "the program forbids it"
_UNHASHABLE = "a module of it can't be hashed"
_KEPT_GRAPH = "its graph is kept for another backward, with all that was computed again"


class _State:
    def __init__(self) -> None:
        self.calls: ModuleCalls | None = None  # while LMS is on
        self.blocks: Blocks | None = None  # since LMS was on for the first time
        self.names_layers = False
        self.may_evict: Callable[[Any], bool] | None = None  # None: whatever a module saves
        self.rules: tuple[Rule, Rule] | None = None  # recompute, evict


_now = _State()


def install(extension: Any, trim: Callable[[], None]) -> None:
    """Follows the calls of modules from now on. trim: torch gives back what it caches."""
    _now.blocks = blocks = Blocks(extension)
    wanted_of, scope, uses = extension.wanted_of_call, extension.SCOPE, extension.USES
    layers = _layer_classes()

    def named(wanted: int, call: Any, module: Any, arguments: Any, options: Any) -> Any:
        # The call around such a layer names what it saves, unless the program says which modules are meant.
        is_named_outside = type(module) in layers and not _now.names_layers and not module._modules
        if is_named_outside or not wanted & scope:
            return call(module, *arguments, **options)
        keeps = _now.may_evict is not None and not _now.may_evict(module)
        with extension.CallScope(module, arguments, options, keeps) as told:
            if told & extension.GIVE_BACK:
                trim()
                extension.disturb_step()  # it maps anew what it uses
            if told:
                return blocks.call(told, call, module, arguments, options)
            return call(module, *arguments, **options)

    def handle(call: Any, module: Any, arguments: Any, options: Any) -> Any:
        wanted = wanted_of(module)
        if not wanted:
            return call(module, *arguments, **options)
        if not wanted & uses or weights.are_none_used(extension, module):
            return named(wanted, call, module, arguments, options)
        try:
            with extension.ModuleUse() as use:
                weights.before_call(use, module)
                return named(wanted, call, module, arguments, options)
        finally:
            weights.after_call(extension)

    _now.calls = ModuleCalls(handle)  # noted first, so that an interrupt leaves nothing that `remove` does not end
    _now.calls.replace()


def _layer_classes() -> frozenset[type]:
    from torch.nn import modules

    files = [getattr(modules, name) for name in _LAYERS]
    return frozenset(kind for file in files for kind in vars(file).values() if _is_layer_of(file, kind))


def _is_layer_of(file: Any, kind: Any) -> bool:
    return isinstance(kind, type) and kind.__module__ == file.__name__


def remove() -> None:
    """Ends `install`. Can be called again."""
    if _now.calls is not None:
        _now.calls.restore()
        _now.calls = None


Rule = Literal["auto"] | bool | Callable[[Any], bool]


class Plan(NamedTuple):
    """What is recomputed, and what lies on the host, in each step."""

    calls: tuple[int, ...] = ()  # their names, which are the same in each run of a program
    state_bytes: int = 0  # of optimizer states


def allow(recompute: Rule, evict: Rule, plan: Plan | None) -> None:
    """Which modules may be recomputed, and of which ones what they save may be evicted. Those that were refused before
    are asked anew."""
    assert _now.blocks is not None
    extension = torch_extension.load("_lms")
    _now.names_layers = callable(recompute) or callable(evict)
    _now.may_evict = evict if callable(evict) else None
    _now.blocks.allow(recompute if callable(recompute) else lambda _: bool(recompute), plan)
    are_new = _now.rules not in (None, (recompute, evict))
    _now.rules = recompute, evict
    extension.set_rules(recompute is not False, evict is not False, not callable(evict), are_new, plan)


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """What `save_plan` wrote.

    Raises:
        ValueError: the file holds something else.
        OSError: it can't be read.
    """
    content = Path(path).read_bytes()
    try:
        found = json.loads(content)
        if found["format"] != _PLAN_FORMAT:
            raise ValueError(f"its format is {found['format']!r}, not {_PLAN_FORMAT!r}")
        plan = Plan(tuple(int(call["key"], 16) for call in found["recompute"]), int(found["state_bytes"]))
        if not all(0 <= number < 1 << 64 for number in (*plan.calls, plan.state_bytes)):
            raise ValueError("a number of it is none of 64 bits")
        return plan
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is no plan that ebbtide.lms.save_plan wrote: {error}") from None


def save_plan(path: str | os.PathLike[str]) -> None:
    """Writes what the latest step recomputed and had on the host of optimizer states, for `enable(plan=path)`.

        ebbtide.lms.save_plan("plan.json")

    Another run of the same program then decides alike, whatever times it measures. Evictions follow from the limit and
    from what the program saves. Where ebbtide is off, it writes nothing.

    Raises:
        StateError: no step has ended under large model support.
        OSError: the file can't be written.
    """
    if driver_choice.is_off():
        return
    extension = None if _now.blocks is None else torch_extension.load("_lms")
    if extension is None or extension.step_report() is None:
        raise StateError("there is no plan yet: save it after some steps under ebbtide.lms.enable")
    recomputed = [
        {"module": extension.module_class(number), "key": f"{key:x}"}
        for number, key, *_ in extension.recomputed_blocks()
    ]
    found = {
        "format": _PLAN_FORMAT,
        "state_bytes": extension.planned_state_bytes() or 0,
        "recompute": recomputed,
    }
    whole = Path(path)
    part = whole.with_name(f"{whole.name}.{os.getpid()}.part")  # so that an earlier plan stays if this one fails
    try:
        part.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        part.replace(whole)
    finally:
        part.unlink(missing_ok=True)


def recomputed() -> list[tuple[str, int, float]]:
    """The modules that the latest step's plan recomputes: class, bytes that it drops, seconds that it costs."""
    return [] if _now.calls is None or _now.blocks is None else _now.blocks.recomputed()


def refused() -> dict[str, str]:
    """Why modules can't be recomputed, by class, without those that the program forbids."""
    return {} if _now.calls is None or _now.blocks is None else _now.blocks.refused()


class Blocks:
    """Which calls are recomputed: what the plan asks for, where it is safe.

    Args:
        extension: `_lms`.
    """

    def __init__(self, extension: Any) -> None:
        self._extension = extension
        self._number_of = extension.module_number
        self._may_recompute: Callable[[Any], bool] = lambda _: True
        self._reasons: dict[str, str] = {}  # by the class of modules that were refused
        self._verdicts: dict[Any, str] = {}  # by kind of module; "": it can be recomputed
        self._trials: dict[Any, weakref.ref[Any]] = {}  # by kind: those whose backward has not begun
        self._structures: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._refused: dict[int, weakref.ref[Any]] = {}  # by the number of a module
        self._unmatched: frozenset[int] = frozenset()  # keys of a plan that no step has been held against

    def allow(self, may_recompute: Callable[[Any], bool], plan: Plan | None) -> None:
        self._may_recompute = may_recompute
        self._unmatched = frozenset(() if plan is None else plan.calls)
        self._reasons.clear()
        for number in [*self._refused]:
            self._permit(number)

    def recomputed(self) -> list[tuple[str, int, float]]:
        blocks = self._extension.recomputed_blocks()
        return [(self._extension.module_class(number), size, seconds) for number, _, size, seconds in blocks]

    def refused(self) -> dict[str, str]:
        return dict(self._reasons)

    def call(self, told: int, call: Any, module: Any, arguments: Any, options: Any) -> Any:
        """Makes the call as the plan wants it, as far as that is safe.

        Args:
            told: the flags of the extension's CallScope.
        """
        if told & self._extension.NEW_CHOICE:
            self._extension.set_ranks(has_ranks())
            self._check_choice()
            self._check_plan()
        if told & self._extension.RECOMPUTE and self._number_of(module) not in self._refused and may_decide():
            return self._recompute(call, module, arguments, options)
        return call(module, *arguments, **options)

    def _check_plan(self) -> None:
        if not self._unmatched:
            return
        matched = {key for _, key, *_ in self._extension.recomputed_blocks()} & self._unmatched
        if 2 * len(matched) < len(self._unmatched):
            warnings.warn(
                f"ebbtide.lms: a step makes {len(matched)} of the {len(self._unmatched)} calls that the plan "
                "recomputes: it is of another program. Save a new one",
                RuntimeWarning,
                stacklevel=2,
            )
        self._unmatched = frozenset()

    def _check_choice(self) -> None:
        """Chooses anew without modules that can't be recomputed, as far as can be told before they are called.

        Those of other choices are looked at as well: each time that the program chooses anew, it measures anew.
        """
        for _ in range(8):  # the choice may turn to the modules inside
            known = [module for module in self._extension.candidates() if self._number_of(module) not in self._refused]
            subtrees = [Subtree(module) for module in known]
            reasons = [(each.modules[0], self._reason(each, self._kind_of(each))) for each in subtrees]
            if not any(reason for _, reason in reasons):
                return
            for module, reason in reasons:
                if reason:
                    self._refuse(module, reason)
            self._extension.choose_again()

    def _reason(self, subtree: Subtree, kind: Any) -> str:
        if not self._may_recompute(subtree.modules[0]):
            return _FORBIDDEN
        return _UNHASHABLE if kind is None else self._verdicts.get(kind, "") or module_objection(subtree)

    def _refuse(self, module: Any, reason: str) -> None:
        number = self._number_of(module)
        self._refused[number] = weakref.ref(module, lambda _: self._permit(number))
        if reason != _FORBIDDEN:
            self._reasons[type(module).__name__] = reason
        self._extension.forbid_recomputation(number, True)

    def _permit(self, number: int) -> None:
        if self._refused.pop(number, None) is not None:
            self._extension.forbid_recomputation(number, False)

    def _kind_of(self, subtree: Subtree) -> Any:
        """A trial of one module counts for others with the same classes inside, in the same modes. None: torch can't
        list those."""
        module = subtree.modules[0]
        try:
            if (structure := self._structures.get(module)) is None:
                # Weakly: some libraries make a class for each instance, which would hold it.
                classes = ((name, weakref.ref(type(one))) for name, one in module.named_modules())
                structure = self._structures[module] = tuple(classes)
            return structure, tuple([one.training for one in subtree.modules])
        except TypeError:
            return None

    def _recompute(self, call: Any, module: Any, arguments: Any, options: Any) -> Any:
        subtree, structure = Subtree(module), Structure(arguments, options, module)
        kind = self._kind_of(subtree)
        if structure.has_cache and kind is not None:
            kind = (kind, self._number_of(module))  # a layer may read the entries of others
        if reason := self._reason(subtree, kind):
            self._refuse(module, reason)
        elif reason := call_objection(subtree, structure):
            self._refuse_kind(kind, module, reason)  # likely of all calls of such modules
        elif kind in self._verdicts:
            on_second_run, on_doubt = partial(self._second_run, kind, module), partial(self._refuse_kind, kind, module)
            return run(call, subtree, structure, arguments, options, on_second_run, on_doubt)
        elif kind not in self._trials:
            self._extension.disturb_step()
            return self._try(kind, call, module, arguments, options)
        # What it saves is no growth of the step: it was to be dropped.
        self._extension.disturb_step()
        return call(module, *arguments, **options)

    def _refuse_kind(self, kind: Any, module: Any, reason: str) -> None:
        self._verdicts[kind] = reason
        self._refuse(module, reason)

    @contextlib.contextmanager
    def _second_run(self, kind: Any, module: Any) -> Iterator[None]:
        from torch.profiler import record_function

        extension = self._extension
        if extension.keeps_graph():
            self._refuse_kind(kind, module, _KEPT_GRAPH)
        is_profiled = find("_C._autograd._profiler_enabled")()
        name = f"ebbtide::recompute {type(module).__name__}"
        with record_function(name) if is_profiled else contextlib.nullcontext(), weights.used_by(extension, module):
            yield

    def _try(self, kind: Any, call: Any, module: Any, arguments: Any, options: Any) -> Any:
        # Without the arguments themselves: a cache among them gets tensors that depend on this call, and its hook.
        tensors, state = Structure(arguments, options, module).tensors, ModuleState(Subtree(module))
        before = [tensor._version for tensor in tensors]
        output, reason = try_out(call, module, arguments, options)
        wanted = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if reason := reason or ("" if wanted else "what it returns needs no gradient"):
            self._refuse_kind(kind, module, reason)
            return output

        def on_backward(_: Any) -> None:
            if self._trials.pop(kind, None) is None:
                return
            if self._extension.keeps_graph():
                self._verdicts[kind] = _KEPT_GRAPH
            elif [tensor._version for tensor in tensors] != before:
                self._verdicts[kind] = "an argument is changed in place after the call"
            elif written := state.written():
                self._verdicts[kind] = f"{written} is changed in place after the call"
            else:
                self._verdicts[kind] = ""

        # A graph that is dropped without a backward takes its trial along.
        self._trials[kind] = weakref.ref(on_backward, lambda _: self._trials.pop(kind, None))
        wanted[0].register_hook(on_backward)
        return output
