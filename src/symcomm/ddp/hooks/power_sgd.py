"""PowerSGD: matrices travel as two thin factors.

A gradient matrix M (rows x cols) is sent as P (rows x rank) and Q (cols x rank). One step of subspace iteration, which
starts from the Q of the iteration before, finds the subspace in which most of M lies:

    P = mean of M Q, made orthonormal;   Q = mean of M^T P;   the mean of M is taken to be P Q^T

What the subspace misses stays in the residual. Vectors, and matrices too small to gain, are averaged as they are.
"""

# No postponed annotations in modules with hooks: DDP compares a hook's annotations with the types themselves.
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from symcomm.ddp.hooks._exchange import all_reduce_bytes, when_done
from symcomm.ddp.hooks._residuals import places_in
from symcomm.ddp.hooks._state import HookState, at_least, callbacks_only_compute, one_of


class Matrix(NamedTuple):
    """Where a gradient that is worth factoring lies in a bucket's buffer."""

    parameter: Any
    start: int
    rows: int
    cols: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.rows * self.cols].view(self.rows, self.cols)


class PowerSGDState(HookState):
    """State of :func:`power_sgd_hook`.

    ``rank``: columns of the factors; more is closer and costs more. ``start``: iterations of plain all-reduce before
    the first compressed one. ``warm_start``: begin from the last Q rather than from a random one. ``seed``: of the
    random ones, the same on all ranks.

    Raises: BadArgumentError.
    """

    def __init__(
        self,
        rank: int = 1,
        process_group: Any = None,
        *,
        start: int = 0,
        warm_start: bool = True,
        seed: int = 0,
        error_feedback: bool = True,
        model: Any = None,
    ):
        super().__init__(process_group, error_feedback=error_feedback, model=model)
        self.rank = at_least("PowerSGDState", "rank", rank, 1)
        self.start = at_least("PowerSGDState", "start", start, 0)
        self.warm_start = bool(one_of("PowerSGDState", "warm_start", warm_start, (True, False)))
        self._random = torch.Generator().manual_seed(at_least("PowerSGDState", "seed", seed, 0))
        self._factors: dict[int, tuple[Any, torch.Tensor]] = {}  # the last Q of each parameter

    def _matrices(self, bucket: Any) -> list[Matrix]:
        shapes = [
            Matrix(p, start, len(p), p.numel() // len(p)) for p, start in places_in(bucket) if p.dim() > 1 and len(p)
        ]
        return [m for m in shapes if (m.rows + m.cols) * self.rank < m.rows * m.cols]

    def wire_bytes(self, bucket: Any, world: int) -> int:
        buffer = bucket.buffer()
        matrices = self._matrices(bucket) if self.iteration >= self.start else []
        gained = sum(m.rows * m.cols - (m.rows + m.cols) * self.rank for m in matrices)
        return all_reduce_bytes((buffer.numel() - gained) * buffer.element_size(), world)

    def _first_factor(self, matrix: Matrix, like: torch.Tensor) -> torch.Tensor:
        """The Q to start from. Random ones are drawn in the same order on all ranks."""
        known = self._factors.get(id(matrix.parameter))
        if known is not None:
            return known[1]
        return torch.randn(matrix.cols, self.rank, generator=self._random, dtype=like.dtype).to(like.device)

    def exchange(self, bucket: Any, flat: torch.Tensor) -> Any:
        """Two all-reduces: one of the P's and all that is not factored, which this waits for; then one of the Q's."""
        buffer, group = bucket.buffer(), self.process_group
        matrices = self._matrices(bucket)
        factored = {matrix.start for matrix in matrices}
        others = [slice(start, start + p.numel()) for p, start in places_in(bucket) if start not in factored]

        parts = [flat[other] for other in others]
        parts += [matrix.of(flat) @ self._first_factor(matrix, flat) for matrix in matrices]
        first = _flattened(parts, group.size(), buffer.dtype)
        dist.all_reduce(first, group=group)
        means = _like(parts, first.to(flat.dtype))
        lefts = [torch.linalg.qr(product).Q for product in means[len(others) :]]

        rights = [matrix.of(flat).T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        second = _flattened(rights, group.size(), buffer.dtype)
        if self.error_feedback:
            sent = _like(rights, second.to(flat.dtype) * group.size())
            for matrix, left, right in zip(matrices, lefts, sent, strict=True):
                matrix.of(flat).sub_(left @ right.T)
            for other in others:
                flat[other] = 0.0
            self._residuals.keep(bucket, flat)
        work = dist.all_reduce(second, group=group, async_op=True)

        def result() -> torch.Tensor:
            for other, mean in zip(others, means, strict=False):
                buffer[other] = mean
            for matrix, left, right in zip(matrices, lefts, _like(rights, second.to(flat.dtype)), strict=True):
                matrix.of(buffer).copy_(left @ right.T)
                self._remember(matrix, right)
            return buffer

        return when_done(work, result)

    def _remember(self, matrix: Matrix, right: torch.Tensor) -> None:
        """Start the next iteration from this Q, unless it has infinities or NaNs, which would stay for ever."""
        self._factors.pop(id(matrix.parameter), None)
        if self.warm_start and bool(right.isfinite().all()):
            self._factors[id(matrix.parameter)] = (matrix.parameter, right.clone())

    def state_dict(self) -> dict[str, Any]:
        factors = {self._names.of(parameter): factor.clone() for parameter, factor in self._factors.values()}
        return {**super().state_dict(), "factors": factors, "random": self._random.get_state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        named = [(self._names.parameter(name), factor) for name, factor in saved["factors"].items()]
        self._factors = {id(p): (p, factor.detach().clone().to(p.device)) for p, factor in named}
        self._random.set_state(saved["random"])


def _flattened(parts: list[torch.Tensor], divisor: int, dtype: torch.dtype) -> torch.Tensor:
    """All parts in one flat tensor, divided, as they will be sent."""
    return torch.cat([part.reshape(-1) for part in parts]).div_(divisor).to(dtype)


def _like(parts: list[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Views of ``flat`` in the shapes of ``parts``."""
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


@callbacks_only_compute
def power_sgd_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket, its matrices as products of two thin factors.

    Raises: what a group's collectives raise."""
    return state.average(bucket)
