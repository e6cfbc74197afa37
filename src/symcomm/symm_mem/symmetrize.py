"""symmetrize(): existing tensors move into symmetric memory and stay the same objects.

It moves storages, not tensors. Tensors that share a storage (tied weights, views, the optimizer's references, results
of ``.data`` or ``.detach()``) share the new one, too, and keep their strides, hooks and gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from symcomm import errors
from symcomm.memory.arena import current_arena
from symcomm.symm_mem.on_cpu import allocate, find_memory, part_of, storage_over

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
LINE = 64  # storages begin on cache lines of their own


def symmetrize(tensors: T, grads: bool | str = True, flat: bool = True) -> T:
    """Move a module's parameters, gradients and buffers, or tensors in lists and dicts, into symmetric memory.

    From then on collectives on them need no copy. Nothing else changes: the same Python objects hold the same values,
    and symmetric tensors stay where they are.

    ``grads``: True moves the gradients that exist; "allocate" also makes those that are missing, filled with zeros
    (keep them with ``optimizer.zero_grad(set_to_none=False)``); False leaves gradients alone.
    ``flat``: one contiguous piece of memory for all, in order; False gives every storage a piece of its own.

    Raises: BadArgumentError, ResourceError.
    """
    if grads not in (True, False, "allocate"):
        raise errors.bad_argument("symmetrize", "grads", grads, "True, False or 'allocate'")
    named = list(_tensors_in(tensors, "tensors"))
    if grads:
        named += [(f"{name}.grad", t.grad) for name, t in named if t.is_leaf and t.grad is not None]
    for name, tensor in named:
        _check(name, tensor)
    without = {id(t): t for _, t in named if t.is_leaf and t.requires_grad and t.grad is None}
    _move([t for _, t in named], list(without.values()) if grads == "allocate" else [], flat)
    return tensors


def _tensors_in(item: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all tensors inside, parameters before buffers."""
    import torch

    if isinstance(item, torch.Tensor):
        yield name, item
    elif isinstance(item, torch.nn.Module):
        yield from item.named_parameters()
        yield from item.named_buffers()
    elif isinstance(item, Mapping):
        for key, value in item.items():
            yield from _tensors_in(value, f"{name}[{key!r}]")
    elif isinstance(item, (list, tuple, set, frozenset)):
        for i, value in enumerate(item):
            yield from _tensors_in(value, f"{name}[{i}]")
    else:
        raise errors.bad_argument(
            "symmetrize", name, type(item).__name__, "a tensor, a module, or a list, tuple, set or dict of such"
        )


def _check(name: str, tensor: torch.Tensor) -> None:
    import torch
    from torch.nn.parameter import is_lazy
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    def refuse(what: str, fix: str) -> errors.BadArgumentError:
        return errors.bad_argument("symmetrize", name, what, "a dense CPU tensor with memory of its own", fix)

    if is_lazy(tensor):
        raise refuse("a parameter without a shape yet", "run the module once first")
    if is_traceable_wrapper_subclass(tensor):
        raise refuse(f"a {type(tensor).__name__}", "pass the plain tensors inside it")
    if tensor.device.type == "meta":
        raise refuse("a meta tensor", "give it memory with module.to_empty(device='cpu') first")
    if tensor.device.type != "cpu":
        raise refuse(f"on {tensor.device}", "move it with .cpu() first")
    if tensor.layout is not torch.strided:
        raise refuse(f"a {tensor.layout} tensor", "use .to_dense() first")
    if find_memory(tensor.untyped_storage().data_ptr()) is None and tensor.is_shared():
        raise refuse("shared with other processes by share_memory_()", "use .clone() first")


def _move(tensors: list[torch.Tensor], missing: list[torch.Tensor], flat: bool) -> None:
    """Move the tensors' storages, and give zero gradients to the tensors in ``missing``."""
    import torch

    old: dict[int, torch.UntypedStorage] = {}
    users: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() and find_memory(address) is None:
            old.setdefault(address, storage)
            users.setdefault(address, []).append(tensor)
    grads = [torch.empty_like(t, device="meta") for t in missing]
    sizes = [s.nbytes() for s in old.values()] + [g.untyped_storage().nbytes() for g in grads]
    homes = _homes(sizes, flat)
    for (address, storage), home in zip(old.items(), homes, strict=False):
        home.copy_(storage)
        _rehome(storage, home, users[address])
    for tensor, grad, home in zip(missing, grads, homes[len(old) :], strict=True):
        tensor.grad = torch.empty(0, dtype=grad.dtype, device="cpu").set_(home, 0, grad.shape, grad.stride()).zero_()


def _homes(sizes: list[int], flat: bool) -> list[torch.UntypedStorage]:
    """A storage in the arena for each size."""
    arena = current_arena()
    if not flat:
        return [storage_over(part_of(allocate(arena, size), 0, size)) for size in sizes]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // LINE) * LINE)
    memory = allocate(arena, starts[-1]) if sizes else None
    return [storage_over(part_of(memory, start, size)) for start, size in zip(starts, sizes, strict=False)]


def _rehome(storage: torch.UntypedStorage, home: torch.UntypedStorage, users: list[torch.Tensor]) -> None:
    swap = getattr(storage, "_swap_data_ptr_", None)
    if swap is not None:
        swap(home)  # all tensors over the storage see the new memory, not only those in ``users``
        return
    import torch

    for tensor in users:  # before torch 2.13 only these tensors can follow
        moved = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            home, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        tensor.data = moved
