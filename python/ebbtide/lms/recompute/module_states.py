"""What the modules of a subtree hold at one moment, without copies of tensors."""

import contextlib
import functools
import operator
from collections.abc import Iterator
from typing import Any


class ModuleState:
    """The attributes of a module and of those below it, at construction.

    It holds the parameters and buffers that a call has used, as the graph of that call does. The running statistics of
    BatchNorm in training do not count: a forward changes them, and nothing that it computes depends on them.
    """

    def __init__(self, module: Any) -> None:
        self._modules = list(module.named_modules())
        self._dicts: list[tuple[dict[str, Any], dict[str, Any]]] = []  # four of each module: its own one, and a copy
        self._statistics: list[tuple[dict[str, Any], list[str]]] = []  # the buffers of a module, and names among them
        self._tensors: list[Any] = []
        for _, one in self._modules:
            own = vars(one)
            parameters, buffers, modules = own["_parameters"], own["_buffers"], own["_modules"]
            self._dicts += [(each, each.copy()) for each in (own, parameters, buffers, modules)]
            if updated := _statistics_of(one):
                self._statistics.append((buffers, updated))
            self._tensors += [*parameters.values(), *(each for name, each in buffers.items() if name not in updated)]
        self._tensors = [tensor for tensor in self._tensors if tensor is not None]
        self._versions = [tensor._version for tensor in self._tensors]
        self._flags = [tensor.requires_grad for tensor in self._tensors]

    def difference(self) -> str:
        """The path of the first attribute that is another one now; "" if there is none."""
        for index, (own, copy) in enumerate(self._dicts):
            for name in {**own, **copy}:
                if name not in own or name not in copy or not _are_same(own[name], copy[name]):
                    return self._path(index, name)
        return ""

    def written(self) -> str:
        """The path of a parameter or buffer that has been written in place since; "" if there is none."""
        versions = [tensor._version for tensor in self._tensors]
        if versions == self._versions:
            return ""
        changed = next(
            one for one, *pair in zip(self._tensors, versions, self._versions, strict=True) if pair[0] != pair[1]
        )
        places = (
            (index, name) for index, (_, copy) in enumerate(self._dicts) for name in copy if copy[name] is changed
        )
        return self._path(*next(places))

    def tensors(self) -> list[Any]:
        """The parameters and buffers, without running statistics."""
        return self._tensors

    def restore(self) -> None:
        """Puts the attributes back."""
        for own, copy in self._dicts:
            if not _are_identical(own, copy):
                _assign(own, copy)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within, the modules hold what they held: the program may have called `eval`, frozen parameters, or replaced
        them for the length of a call, as `torch.func.functional_call` does.
        """
        swapped = [(own, own.copy(), copy) for own, copy in self._dicts if not _are_identical(own, copy)]
        pairs = zip(self._tensors, self._flags, strict=True)
        flags = [(tensor, flag) for tensor, flag in pairs if tensor.requires_grad != flag and tensor.is_leaf]
        try:
            for own, _, copy in swapped:
                _assign(own, copy)
            for tensor, flag in flags:
                tensor.requires_grad_(flag)
            with self.without_statistics():
                yield
        finally:
            for own, now, _ in swapped:
                _assign(own, now)
            for tensor, flag in flags:
                tensor.requires_grad_(not flag)

    def statistics(self) -> list[list[Any]]:
        """The running statistics, of each layer that has any."""
        return [[buffers[name] for name in names] for buffers, names in self._statistics]

    @contextlib.contextmanager
    def without_statistics(self) -> Iterator[None]:
        """Within, running statistics are updated in copies, which are dropped at the end."""
        updated = [(buffers, name, buffers[name]) for buffers, names in self._statistics for name in names]
        try:
            for buffers, name, statistic in updated:
                buffers[name] = statistic.clone()
            yield
        finally:
            for buffers, name, statistic in updated:
                buffers[name] = statistic

    def _path(self, index: int, name: str) -> str:
        path, _ = self._modules[index // 4]
        return f"{path}.{name}" if path else name


def _statistics_of(module: Any) -> list[str]:
    """Which of its buffers are the running mean and its like, of batches that it normalizes by their own."""
    if not module.training or not isinstance(module, _batch_norms()):
        return []
    names = ("running_mean", "running_var", "num_batches_tracked")
    return [name for name in names if module._buffers.get(name) is not None]


@functools.cache
def _batch_norms() -> tuple[type, ...]:
    """torch may be missing when this module is imported."""
    from torch import nn

    return nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def _are_identical(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one.values(), other.values()))


def _are_same(one: Any, other: Any) -> bool:
    """A number that is computed again is another object of the same value."""
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str) and one == other)


def _assign(own: dict[str, Any], values: dict[str, Any]) -> None:
    """Never empties it in between: another thread may read it."""
    own.update(values)
    for name in own.keys() - values.keys():
        del own[name]
