"""Session: a training loop whose ranks may die and come back.

Between two steps, a session lets newcomers in and gives them the state. If a rank is lost in the middle of a step, the
others shrink the group, restore the state from before that step, and run it again; fewer ranks then share the global
batch. If some rank has finished the step in which another failed, all go on from its state.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from symcomm import errors
from symcomm.ddp.sampling import RandomState
from symcomm.elastic.state import Snapshot, Stateful
from symcomm.group import default
from symcomm.group.grow import close
from symcomm.group.process_group import ProcessGroup

log = logging.getLogger(__name__)
NO_STATE, FRESH = -2, -1  # the step of a rank that has just joined: a running job, or a job that starts


def _enter() -> ProcessGroup:
    """The group of this process's job: joined late, if the launcher says so."""
    return default.join() if default.is_newcomer() else default.init()


class Session:
    """``Session(model=..., optimizer=...).run(step, steps)`` calls ``step(session)`` until ``steps`` are done.

    ``others``         more things with state_dict() and load_state_dict(): schedulers, scalers, samplers
    ``data_parallel``  True, or arguments for symcomm.DistributedDataParallel; ``session.model`` is then one
    ``wait``           seconds to wait for another rank after one was lost, before going on with fewer
    ``min_size``       with fewer ranks than this the run ends with RankFailedError
    ``quorum``         of ``group.shrink()``, where ranks are on several hosts; with fewer it ends with NoQuorumError
    ``admit_every``    look for newcomers before every so many steps
    ``on_change``      called with the session whenever ranks have come or gone, also at the start
    ``enter``          returns the group to begin with; unless given, what init() or, in a newcomer, join() returns

    Raises: BadArgumentError, RankFailedError below ``min_size``, NoQuorumError, and what the step raises.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        others: Mapping[str, Stateful] | None = None,
        data_parallel: bool | Mapping[str, Any] = False,
        wait: float = 0.0,
        min_size: int = 1,
        quorum: int | None = None,
        admit_every: int = 1,
        on_change: Callable[[Session], None] | None = None,
        enter: Callable[[], ProcessGroup] = _enter,
    ):
        if data_parallel and model is None:
            raise errors.bad_argument("Session", "data_parallel", data_parallel, "given together with model")
        if admit_every < 1:
            raise errors.bad_argument("Session", "admit_every", admit_every, "1 or more")
        things = {"model": model, "optimizer": optimizer, "random": RandomState(), **(others or {})}
        self.model = model
        self.group: Any = None
        self.step = 0
        self.results: list[Any] = []  # what step() returned, for every step done
        self._module = model
        self._wrap = None if not data_parallel else {} if data_parallel is True else dict(data_parallel)
        if self._wrap and self._wrap.get("logical_shards"):
            self._wrap.setdefault("spare_ranks", True)  # ranks come and go one by one
        self._snapshot = Snapshot({name: thing for name, thing in things.items() if thing is not None})
        self._wait, self._min_size, self._admit_every = wait, min_size, admit_every
        self._quorum = quorum
        self._on_change, self._enter = on_change, enter
        self._full = 0  # the most ranks there were
        self._settled = False
        self._lost = False  # a rank was lost just now
        self._admits = True  # newcomers can find us

    # --- what a step uses -------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank in the current group; -1 in a newcomer that came too late."""
        return -1 if self.group is None else self.group.rank

    @property
    def size(self) -> int:
        return 0 if self.group is None else self.group.size

    def share(self, count: int) -> slice:
        """This rank's part of ``count`` items. Together, all ranks' parts are all items, each once."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    # --- the loop ---------------------------------------------------------------------------------------------

    def run(self, step: Callable[[Session], Any], steps: int) -> list[Any]:
        """Run the steps. Returns their results, in order, on every rank; a newcomer to a finished job gets none."""
        try:
            self._begin()
        except errors.GroupUnusableError as error:
            if not default.is_newcomer():
                raise
            log.warning("%s", error)
            return self.results
        while True:
            try:
                self._settle()
                if self.step >= steps:
                    self.group.barrier()  # no rank leaves while others may still need its state
                    break
                if self._admit():
                    continue  # newcomers begin at the top of this loop, so all ranks do
                if self.size < self._min_size:
                    left = f"{self.size} of {self._full} ranks are left"
                    raise errors.RankFailedError(f"{left}, which is less than min_size={self._min_size}.")
                result = step(self)
            except Exception as error:
                self._recover(error)
                continue
            self.results.append(result)
            self.step += 1
            self._snapshot.take()
        if self.group.store is not None:
            close(self.group)
        return self.results

    def _begin(self) -> None:
        self._use(self._enter())
        self._admits = self.group.store is not None
        self._snapshot.take()
        self.step = NO_STATE if self.rank in self.group.newcomers else FRESH

    def _use(self, group: ProcessGroup) -> None:
        if group is self.group:
            return
        if self.group is not None:
            self.group.leave()
        self.group, self._settled = group, False
        default.set_default(group)

    # --- coming and going -------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Before a step: let in newcomers that wait; returns whether there were any."""
        waits = self._lost and self._wait > 0 and self.size < self._full
        self._lost = False
        if not self._admits or not (waits or self.step % self._admit_every == 0):
            return False
        try:
            self._use(self.group.grow(wait=self._wait, size=self._full) if waits else self.group.grow())
        except errors.StoreConnectionError as error:
            self._admits = False  # on all ranks, because all get the same answer
            log.warning("no more ranks can join: %s", error)
        return not self._settled

    def _recover(self, error: Exception) -> None:
        """Go on without the lost ranks; raises ``error`` if it is about something else."""
        self._lost = True
        while True:
            self._check_is_loss(error)
            try:
                quorum = None if self._quorum is None else min(self._quorum, self.size)
                return self._use(self.group.shrink(quorum=quorum))
            except errors.NoQuorumError:
                raise  # the others may go on, so this rank must not
            except errors.SymcommError as another:
                error = another

    def _check_is_loss(self, error: Exception) -> None:
        """Raise ``error``, unless the group failed because a rank died, left, or did not come in time."""
        failure = self.group.failure
        lost = isinstance(failure, (errors.PeerError, errors.DeadlineError, errors.GroupUnusableError))
        left_out = isinstance(error, errors.RankFailedError) and error.ranks == [self.rank]
        if not lost or left_out or self.group.has_left:
            raise error

    def _settle(self) -> None:
        """Make all ranks go on from the same step, with the state of the rank that is farthest.

        This comes first on every new group, and ranks decide only by what they agree on here: a newcomer, or a rank
        that was interrupted in this very place, may know less than others."""
        if self._settled:
            return
        mine = json.dumps([self.step, self._full, self._lost, self._admits])
        told = [json.loads(item) for item in self.group.all_gather_bytes(mine.encode())]
        places, most, lost, admits = zip(*told, strict=True)
        farthest = max(places)
        if farthest == NO_STATE:
            raise errors.SymcommError("every rank that had the state is gone; start again from a checkpoint.")
        self._full, self._lost, self._admits = max(*most, self.size), any(lost), all(admits)
        if min(places) < farthest or farthest == FRESH:
            results = self._snapshot.send(self.group, places.index(farthest), self.results)
            self.step, self.results = max(farthest, 0), results
        self._snapshot.put_back()
        self._wrap_model()
        if self._on_change is not None:
            self._on_change(self)
        self._settled = True

    def _wrap_model(self) -> None:
        """A fresh DistributedDataParallel on the current group, the same on all ranks."""
        if self._wrap is None:
            return
        from symcomm.ddp.module import DistributedDataParallel
        from symcomm.torch_backend.group import TorchGroup

        if self.model is not self._module:
            self.model.reducer._remove_autograd_hooks()
        for parameter in self._module.parameters():
            parameter.grad = None  # it may lie in a bucket of the previous reducer
        core = self.group
        lifetime = timedelta(seconds=core.timeout)
        group = TorchGroup(core.store, core.rank, core.size, lifetime, core.name, core.global_ranks, core=core)
        self.model = DistributedDataParallel(self._module, process_group=group, init_sync=False, **self._wrap)

    # --- the end ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the group."""
        if self.group is not None:
            with contextlib.suppress(errors.SymcommError):
                self.group.destroy()
            if default.is_initialized() and default.default_group() is self.group:
                default.set_default(None)
