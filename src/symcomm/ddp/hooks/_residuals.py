"""Error feedback: what compression left out of a gradient is added to the next one.

Residuals belong to parameters, not to buckets: DDP lays its buckets out anew after the first iteration. As long as the
layout stays, a bucket's residuals are one flat tensor; when a parameter turns up in another bucket, the old bucket's
tensor falls into pieces, one for each parameter, and new ones are put together from them.
"""

from __future__ import annotations

from typing import Any

import torch

from symcomm import errors

Key = tuple[int, ...]  # the identities of a bucket's parameters


def places_in(bucket: Any) -> list[tuple[Any, int]]:
    """(parameter, where its gradient starts in the bucket's buffer)."""
    origin = bucket.buffer().storage_offset()
    return [
        (parameter, gradient.storage_offset() - origin)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]


class Names:
    """Parameters by name, for checkpoints. The names are those of the module itself, wrapped or not."""

    def __init__(self, call: str, model: Any):
        if model is not None and not isinstance(model, torch.nn.Module):
            raise errors.bad_argument(call, "model", type(model).__name__, "a torch.nn.Module or None")
        self._call = call
        named = [] if model is None else model.named_parameters()
        self._parameters = {name.removeprefix("module."): parameter for name, parameter in named}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}

    def of(self, parameter: Any) -> str:
        name = self._names.get(id(parameter))
        if name is None:
            raise errors.CallerError(
                f"{self._call}.state_dict: a parameter has no name; give the model to the state: "
                f"{self._call}(model=model)."
            )
        return name

    def parameter(self, name: str, count: int | None = None) -> Any:
        """The parameter of that name, which must have ``count`` elements."""
        parameter = self._parameters.get(name)
        if parameter is None:
            known = ", ".join(list(self._parameters)[:5]) or "none: the state was made without model=..."
            raise errors.bad_argument(f"{self._call}.load_state_dict", "every name", name, f"a parameter's ({known})")
        if count is not None and parameter.numel() != count:
            allowed = f"{parameter.numel()} elements long"
            raise errors.bad_argument(f"{self._call}.load_state_dict", f"{name!r}", f"{count} elements", allowed)
        return parameter


class Residuals:
    """What was left out so far."""

    def __init__(self, names: Names):
        self._names = names
        self._places: dict[Key, list[tuple[Any, int]]] = {}
        self._wholes: dict[Key, torch.Tensor] = {}
        self._bucket_of: dict[int, Key] = {}
        self._pieces: dict[int, tuple[Any, torch.Tensor]] = {}

    def take(self, bucket: Any) -> torch.Tensor | None:
        """Remove and return a bucket's residual, in the layout of its buffer, or None."""
        if not self._wholes and not self._pieces:
            return None
        key = tuple(map(id, bucket.parameters()))
        whole = self._wholes.pop(key, None)
        if whole is not None:
            return whole
        for identity in key:
            if identity in self._bucket_of:
                self._break_up(self._bucket_of.pop(identity))
        return self._assemble(bucket)

    def keep(self, bucket: Any, flat: torch.Tensor) -> None:
        """Remember ``flat`` for the next time, without infinities and NaNs: those would come back for ever."""
        key = tuple(map(id, bucket.parameters()))
        if key not in self._places:
            self._places[key] = places_in(bucket)
        self._wholes[key] = flat.nan_to_num_(0.0, 0.0, 0.0)
        self._bucket_of.update(dict.fromkeys(key, key))

    def _break_up(self, key: Key) -> None:
        whole = self._wholes.pop(key, None)
        if whole is not None:
            for parameter, start in self._places.pop(key):
                self._pieces[id(parameter)] = (parameter, whole[start : start + parameter.numel()])

    def _assemble(self, bucket: Any) -> torch.Tensor | None:
        found = [(start, self._pieces.pop(id(p))) for p, start in places_in(bucket) if id(p) in self._pieces]
        if not found:
            return None
        buffer = bucket.buffer()
        flat = torch.zeros(buffer.numel(), dtype=found[0][1][1].dtype, device=buffer.device)
        for start, (parameter, piece) in found:
            flat[start : start + parameter.numel()] = piece
        return flat

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Flat tensors by the names of their parameters."""
        for key in list(self._wholes):
            self._break_up(key)
        return {self._names.of(parameter): piece.clone() for parameter, piece in self._pieces.values()}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        pieces = {}
        for name, piece in saved.items():
            parameter = self._names.parameter(name, piece.numel())
            pieces[id(parameter)] = (parameter, piece.detach().clone().to(parameter.device))
        self._wholes.clear()
        self._bucket_of.clear()
        self._pieces = pieces
