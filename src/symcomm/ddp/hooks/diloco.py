"""DiLoCo: local steps, then an outer step of SGD with Nesterov momentum, on how far the ranks have moved.

Every ``period`` steps the ranks average how far each has moved from the last common point (the anchor). The mean moves
the anchor as a gradient would, and all ranks go on from there. With ``lr=1, momentum=0`` this is local SGD.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from symcomm import errors
from symcomm.ddp.hooks._exchange import all_reduce_bytes, work_dtype
from symcomm.ddp.hooks._state import at_least, one_of
from symcomm.ddp.hooks.blockwise import LARGEST, BlockCodec, quantised_mean
from symcomm.ddp.hooks.local_sgd import LocalSGDState, flattened, write_back

SENT_AS = (None, torch.bfloat16, torch.float16, *LARGEST)


def _number(argument: str, value: Any, lowest: float, below: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not lowest <= value < below:
        raise errors.bad_argument("DiLoCoState", argument, value, f"a number, at least {lowest:g} and below {below:g}")
    return float(value)


class DiLoCoState(LocalSGDState):
    """State of ``local_sgd_hook``, and the outer optimizer: call ``step()`` after every step of the inner one.

    ``lr``, ``momentum``, ``nesterov``: of the outer steps. ``dtype``: what the differences are sent in: None (as the
    parameters), bfloat16, float16, int8 or float8_e4m3fn (these two with a scale for each ``block`` values).
    ``error_feedback``: what rounding leaves out of a difference is added to the next one.

    Raises: BadArgumentError.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        period: int = 50,
        process_group: Any = None,
        *,
        start: int = 0,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        dtype: torch.dtype | None = None,
        block: int = 256,
        error_feedback: bool = True,
    ):
        self.lr = _number("lr", lr, 0.0, float("inf"))
        self.momentum = _number("momentum", momentum, 0.0, 1.0)
        self.nesterov = bool(one_of("DiLoCoState", "nesterov", nesterov, (True, False)))
        self.dtype = one_of("DiLoCoState", "dtype", dtype, SENT_AS)
        self.codec = BlockCodec(dtype, at_least("DiLoCoState", "block", block, 1)) if dtype in LARGEST else None
        feedback = bool(one_of("DiLoCoState", "error_feedback", error_feedback, (True, False)))
        super().__init__(parameters, period, process_group, start=start)
        self.error_feedback = feedback
        self._anchors: dict[torch.dtype, torch.Tensor] = {}
        self._drop_anchors()
        self._momenta = {kind: torch.zeros_like(anchor) for kind, anchor in self._anchors.items()}
        self._missed: dict[torch.dtype, torch.Tensor] = {}

    def _drop_anchors(self) -> None:
        """Make the parameters, which are now equal on all ranks, the common point."""
        self._anchors = {kind: flattened(ps, work_dtype(kind)).clone() for kind, ps in self._of_dtype.items()}

    def step(self) -> bool:
        due = super().step()
        if self.steps == self.start:
            self._drop_anchors()
        return due

    @torch.no_grad()
    def synchronize(self) -> None:
        """Take an outer step now. All ranks call it."""
        for kind, parameters in self._of_dtype.items():
            anchor, momentum = self._anchors[kind], self._momenta[kind]
            way = self._mean(kind, anchor - flattened(parameters, anchor.dtype))
            momentum.mul_(self.momentum).add_(way)
            anchor.sub_(way.add_(momentum, alpha=self.momentum) if self.nesterov else momentum, alpha=self.lr)
            write_back(parameters, anchor)

    def _mean(self, kind: torch.dtype, way: torch.Tensor) -> torch.Tensor:
        """The mean of all ranks' differences, with the same bits on each."""
        group = self.process_group
        if group.size() == 1:
            return way
        if kind in self._missed:
            way.add_(self._missed.pop(kind))
        if self.codec is not None:
            self.bytes_sent += 2 * (group.size() - 1) * self.codec.row_bytes(way.numel(), group.size())
            future, missed = quantised_mean(way, self.codec, group, self.error_feedback)
            mean = future.wait()
        else:
            sent = (way / group.size()).to(self.dtype or kind)
            self.bytes_sent += all_reduce_bytes(sent.nbytes, group.size())
            missed = way.sub_(sent, alpha=group.size())
            dist.all_reduce(sent, group=group)
            mean = sent.to(way.dtype)
        if self.error_feedback and missed is not None:
            self._missed[kind] = missed.nan_to_num_(0.0, 0.0, 0.0)
        return mean

    def state_dict(self) -> dict[str, Any]:
        """The outer optimizer's state; equal on all ranks but for ``missed``, so each rank saves its own."""
        kept = {"anchors": self._anchors, "momenta": self._momenta, "missed": self._missed}
        copies = {key: {str(kind): flat.clone() for kind, flat in flats.items()} for key, flats in kept.items()}
        return {**super().state_dict(), **copies}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        for key, target in (("anchors", self._anchors), ("momenta", self._momenta), ("missed", self._missed)):
            for kind, anchor in self._anchors.items():
                flat = saved[key].get(str(kind))
                if flat is None and key == "missed":
                    target.pop(kind, None)
                elif flat is None or flat.shape != anchor.shape:
                    got = "nothing" if flat is None else f"{flat.numel()} values"
                    raise errors.bad_argument(
                        "DiLoCoState.load_state_dict", f"{key} of {kind}", got, f"{anchor.numel()} values"
                    )
                else:
                    target[kind] = flat.detach().clone().to(anchor.device)
