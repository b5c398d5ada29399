"""A call whose saved tensors are dropped, and made again in backward by a second call.

The second call is made with the tensors of the first, in the order of `torch.utils.checkpoint`, and ends as soon as all
that backward wants is there. Rules for the caller:

- An argument that the program changes in place before backward makes torch raise, also where a plain call saves nothing
  of that argument and works. Its version tells.
- A parameter or buffer that is changed in place in between raises as well.
- `objections` and `trials` say which calls can't be repeated. What they can't see, and what they rely on: the
  attributes, arguments and generators of the module decide what it does. A forward that depends on a global of the
  program, or on an object in an attribute that changes inside, must not be recomputed.
- A module that catches `Exception` in its forward catches torch's signal for the end of the second run.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ebbtide.lms.recompute.global_states import OtherRandomStates, Switches
from ebbtide.lms.recompute.module_states import ModuleState, Subtree
from ebbtide.lms.recompute.structures import Structure

Call = Callable[..., Any]  # takes the module, then its arguments
Entrance = Callable[[], AbstractContextManager[Any]]
DRAWS = "Python's or NumPy's random numbers are drawn while it runs"


def run(
    call: Call,
    subtree: Subtree,
    structure: Structure,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    on_second_run: Entrance,
    on_doubt: Callable[[str], None] = lambda reason: None,
) -> Any:
    """`call(module, *arguments, **options)`, whose saved tensors are dropped and made again in backward.

    Args:
        subtree: of the module.
        structure: of the arguments and options. Its tensors are taken out.
        on_second_run: makes a context manager that is entered around each second run.
        on_doubt: is told why such calls should not be recomputed from now on.

    Raises:
        RuntimeError: in backward, where an argument, a parameter or a buffer was changed in place after the call.
        torch.utils.checkpoint.CheckpointError: in backward, where the second run saves other tensors.
    """
    from torch.utils.checkpoint import checkpoint

    tensors, structure.tensors = structure.tensors, []
    repeated = _RepeatedCall(call, subtree, structure, on_second_run, on_doubt)
    repeated.original = arguments, options
    return checkpoint(repeated, *tensors, use_reentrant=False, preserve_rng_state=True)


class _RepeatedCall:
    """The function of a checkpoint: called once in forward, and once for each backward."""

    def __init__(
        self,
        call: Call,
        subtree: Subtree,
        structure: Structure,
        on_second_run: Entrance,
        on_doubt: Callable[[str], None],
    ) -> None:
        self.original: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # until the first run takes them
        self._call, self._module, self._structure = call, subtree.modules[0], structure
        self._on_second_run, self._on_doubt = on_second_run, on_doubt
        self._state, self._switches = ModuleState(subtree), Switches.now()
        self._random: OtherRandomStates | None = None  # where the first run drew from them

    def __call__(self, *tensors: Any) -> Any:
        if self.original is not None:
            # The program's own containers, in case that the module adds something to them.
            (arguments, options), self.original = self.original, None
            random = OtherRandomStates()
            result = self._call(self._module, *arguments, **options)
            if random.have_moved():
                self._random = random
                self._on_doubt(DRAWS)
            return result
        if written := self._state.written():
            self._on_doubt(f"{written} is changed in place after the call")
            raise RuntimeError(
                f"{written} of {type(self._module).__name__} was changed in place after the forward. Backward needs it "
                "as it was, since ebbtide's LMS computes this module again: forbid that with recompute=False"
            )
        filled, named = self._structure.fill(list(tensors))
        same_numbers = self._random.again() if self._random is not None else contextlib.nullcontext()
        with self._on_second_run(), self._switches.restored(), self._state.restored(), same_numbers:
            return self._call(self._module, *filled, **named)
