"""Finds storages whose address may be known elsewhere, so that `adopt` must not move them.

torch counts the owners of a storage (its tensors) and of a tensor. The owners that see a move are known: tensors that
Python sees, the views of a tensor, the tensor that it is the gradient of, graphs that have not run backward, and
DistributedDataParallel. If they do not account for a count, something holds the tensor out of sight: a DLPack partner,
TorchScript, or a C++ extension.

A partner of `__cuda_array_interface__` (CuPy, Numba) keeps a reference to the Python object and the bare address. It is
an object of another library's type that refers to a tensor of the storage. `address_reads` records whose address was
read since the first region.
"""

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ebbtide.saver.tensors import address_reads
from ebbtide.saver.tensors.living import ask, gradient_of, living_objects
from ebbtide.saver.tensors.walk import sparse_parts

LENT_OUT = (
    "lent out, or held outside torch's view (DLPack, TorchScript, a C++ extension): let go of that first, or "
    "adopt(..., force=True) if no other code keeps the address"
)
BORROWED = (
    "an object of another library refers to it and may keep its address: let go of that first, or "
    "adopt(..., force=True) if it keeps none"
)
ADDRESS_READ = (
    "its __cuda_array_interface__ was read: let go of the tensor that it was read from, or adopt(..., force=True) if "
    "no other code keeps the address"
)

# Python classes of these packages keep an address beside the tensor. Extension types are told by flags and files.
_KEEP_ADDRESSES = frozenset(("cupy", "numba", "pycuda", "warp", "cuda", "nvmath"))
_HARMLESS = frozenset((*sys.stdlib_module_names, "torch", "functorch", "ebbtide"))
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
# How often DistributedDataParallel's reducer owns a parameter: in its list of all, in a bucket's, in a rebuild's.
_REDUCER_OWNS = (2, 3)
_BUCKET_OWNS = (1, 2)  # a bucket's memory is owned by the bucket, and by the last all-reduce's result
_KINDS_OF_VIEW = (torch.is_complex, torch.is_conj, torch.is_neg, lambda tensor: tensor.is_nested)


def find_lent(storages: "Sequence[torch.UntypedStorage]") -> dict[int, str]:
    """Maps `_cdata` of each of `storages` that must not move to the reason.

    The threads that use them must rest meanwhile. Tensors that the collector does not see (kept by C alone) count as
    lent.
    """
    if not storages:
        return {}
    # Bypasses subclasses and modes: an uninitialized parameter refuses even to give its storage.
    with torch._C.DisableTorchFunction(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = _World(storages)
        lent = dict.fromkeys(world.unexplained(), LENT_OUT)
        lent |= dict.fromkeys(world.borrowed(), BORROWED)
        lent |= dict.fromkeys(world.keys & {storage_key(tensor) for tensor in address_reads.living()}, ADDRESS_READ)
    return lent


def storage_key(tensor: torch.Tensor) -> int | None:
    """`_cdata` of the tensor's storage; None where it has none."""
    if not torch._C._has_storage(tensor):
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:  # functorch's wrappers
        return None


class _World:
    """The tensors of this process that lie on some storages, and their owners."""

    def __init__(self, storages: "Sequence[torch.UntypedStorage]") -> None:
        self._storages = {int(storage._cdata): storage for storage in storages}
        self.keys = self._storages.keys()
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused meanwhile
        self._on: dict[int, dict[int, torch.Tensor]] = {key: {} for key in self.keys}
        self._owners: Counter[int] = Counter()  # id of a tensor -> owners outside Python
        self._hidden: Counter[int | None] = Counter()  # key -> tensors that Python does not see
        self._in_old_graphs: set[int] = set()
        self._reducing: list[Any] = []
        self._reduced: set[int] = set()
        self._buckets: set[int] = set()
        self._graphs: list[Any] = []
        self._kinds: dict[type, str] = {}
        self._strangers: list[Any] = []
        self._read_all()

    def _read_all(self) -> None:
        for thing in living_objects(lambda kind: self._kind_of(kind) != "plain", globals()):
            kind = self._kinds.get(type(thing)) or self._kind_of(type(thing))
            if kind == "tensor":
                self._read_tensor(thing)
            elif kind == "reducing module":
                self._reducing.append(thing)
                self._reduced.update(map(id, thing.parameters()))
            elif kind == "stranger":
                self._strangers.append(thing)

    def _kind_of(self, kind: type) -> str:
        found = "plain"
        if torch.Tensor in kind.__mro__:
            found = "tensor"
        elif torch.nn.parallel.DistributedDataParallel in kind.__mro__:
            found = "reducing module"
        elif _may_keep_addresses(kind):
            found = "stranger"
        self._kinds[kind] = found
        return found

    def _read_tensor(self, tensor: torch.Tensor) -> None:
        """Records the address of a tensor and the tensors that it owns. Tensors that it owns may be new to Python."""
        waiting = [tensor]
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in self._seen:
                continue
            self._seen[id(tensor)] = tensor
            key = storage_key(tensor)
            if key in self.keys:
                self._on[key][id(tensor)] = tensor
            self._graphs.append(ask(tensor, "grad_fn"))
            self._hidden.update(map(storage_key, sparse_parts(tensor)))
            owned = _owned_by(tensor)
            self._owners.update(map(id, owned))
            waiting += owned

    def unexplained(self) -> list[int]:
        """The storages whose counts the known owners do not explain."""
        wrong = [key for key in self.keys if not self._adds_up(key)]
        if wrong:
            self._read_graphs()
            self._read_buckets()
            wrong = [key for key in wrong if not self._adds_up(key)]
        return wrong

    def _adds_up(self, key: int) -> bool:
        tensors = self._on[key]
        expected = 1 + len(tensors) + self._hidden[key]  # 1: the Python object of the storage
        return torch._C._storage_Use_Count(key) == expected and all(map(self._is_explained, tensors.values()))

    def _is_explained(self, tensor: torch.Tensor) -> bool:
        # The edge keeps the node that accumulates the gradient, which may live or not, alive meanwhile.
        edge = _gradient_edge_of(tensor)
        more = tensor._use_count() - 1 - (edge is not None) - self._owners[id(tensor)]
        if id(tensor) in self._reduced and more in _REDUCER_OWNS:
            return True
        if id(tensor) in self._buckets and more in _BUCKET_OWNS:
            return True
        return more == 0 or (more > 0 and id(tensor) in self._in_old_graphs)

    def _read_graphs(self) -> None:
        """Graphs that have not run backward own their saved tensors, often ones that Python has not seen yet."""
        found = _find_saved(self._graphs)
        for tensor in found.saved:
            self._read_tensor(tensor)
        self._owners.update(map(id, found.saved))
        self._in_old_graphs.update(map(id, found.leaves_of_old_torch))
        self._seen.update((id(tensor), tensor) for tensor in found.leaves_of_old_torch)

    def _read_buckets(self) -> None:
        """Counts gradients that are views of a reducer's bucket: the reducer owns each of them, and one more view."""
        for module in self._reducing:
            for parameter in module.parameters() if module.gradient_as_bucket_view else ():
                gradient = parameter.grad
                if gradient is not None and gradient._is_view():
                    base = gradient._base
                    self._owners.update((id(gradient), id(base)))
                    self._hidden[storage_key(gradient)] += 1
                    self._buckets.add(id(base))

    def borrowed(self) -> set[int]:
        """The storages of which an object of another library holds a tensor."""
        found = set()
        for stranger in self._strangers:
            for thing in _referents(stranger):
                if torch.Tensor in type(thing).__mro__:
                    found.add(storage_key(thing))
                elif isinstance(thing, torch.UntypedStorage):
                    found.add(thing._cdata)
        return self.keys & found


def _referents(stranger: Any) -> list[Any]:
    """Of an object, with its attributes: those of a Python class lie in a dict, before Python 3.11 always."""
    direct = gc.get_referents(stranger)
    return direct + [value for thing in direct if type(thing) is dict for value in list(thing.values())]


def _gradient_edge_of(tensor: torch.Tensor) -> Any:
    """The node that accumulates a leaf's gradient, which owns it; None where there is none."""
    try:
        return torch.autograd.graph.get_gradient_edge(tensor) if tensor.requires_grad and tensor.is_leaf else None
    except (AssertionError, RuntimeError):  # views of one function after a write to their base, or without gradients
        return None


def _owned_by(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that this one keeps alive, each as often as it is counted."""
    owned: list[torch.Tensor] = []
    if tensor._is_view():
        base = tensor._base
        # A view that changes more than sizes and strides has one record for backward, and one for forward mode.
        if any(kind(tensor) != kind(base) for kind in _KINDS_OF_VIEW):
            owned += (base, base, *_record_of_jagged(tensor))
        else:
            owned.append(base)
    gradient = gradient_of(tensor)
    return owned if gradient is None else [*owned, gradient]


def _record_of_jagged(tensor: torch.Tensor) -> list[torch.Tensor]:
    names = ("_offsets", "_lengths", "_min_seqlen_tensor", "_max_seqlen_tensor")
    parts = [getattr(tensor, name, None) for name in names] if tensor.layout is torch.jagged else []
    return 2 * [part for part in parts if part is not None]


def _may_keep_addresses(kind: type) -> bool:
    """Whether objects of this type are another library's own: made in C, or known to keep addresses."""
    for part in kind.__mro__:
        origin = str(getattr(part, "__module__", "")).partition(".")[0]
        if origin in _KEEP_ADDRESSES:
            return True
        if origin not in _HARMLESS and (not part.__flags__ & _HEAP_TYPE or _is_of_extension(part)):
            return True
    return False


def _is_of_extension(kind: type) -> bool:
    """Whether a type that was made at run time comes from a compiled file (pybind11, nanobind, newer Cython)."""
    module = sys.modules.get(str(kind.__module__))
    return str(getattr(module, "__file__", "") or "").endswith((".so", ".pyd"))


class _SavedTensors(NamedTuple):
    """The tensors that some graphs hold.

    `saved` has a tensor once for each time that it was saved. torch before the version whose saved tensors have an
    attribute `data` does not tell these without running hooks: there, `leaves_of_old_torch` are the leaves in question.
    """

    saved: list[torch.Tensor]
    leaves_of_old_torch: list[torch.Tensor]


def _find_saved(roots: Iterable[Any]) -> _SavedTensors:
    """The tensors that the graphs behind these nodes hold. No hook runs, and nothing is unpacked."""
    saved: list[torch.Tensor] = []
    leaves: list[torch.Tensor] = []
    names: dict[type, list[str]] = {}
    for node in _nodes(roots):
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        for name in names[kind]:
            for entry in _entries(node, name):
                if hasattr(entry, "unpack_hook"):
                    saved += _held_by(entry)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and not hasattr(torch._C._autograd.SavedTensor, "data"):
            leaves.append(leaf)
    return _SavedTensors(saved, leaves)


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    seen = set()
    waiting = list(roots)
    keep = []  # a node's Python object may exist only during this walk
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        keep.append(node)
        yield node
        waiting += [edge[0] for edge in node.next_functions]


def _entries(node: Any, name: str) -> tuple[Any, ...]:
    try:
        value = getattr(node, name)
    except (AttributeError, RuntimeError):  # a graph that has run backward has released them
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _held_by(entry: Any) -> list[torch.Tensor]:
    try:
        has_hook, value = entry.unpack_hook is not None, entry.data
    except RuntimeError:
        return []
    return [value] if isinstance(value, torch.Tensor) and not has_hook else []  # a packed value belongs to its hook
