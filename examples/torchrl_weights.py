"""torchrl's collectors map the weights of their policy from a board: one copy for all, and the trainer waits for none.
Start it as it is: ``python examples/torchrl_weights.py``."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import MultiSyncCollector
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.weight_update import WeightSyncScheme

import symcomm

PUBLISHED = (1.0, 5.0, 9.0)


class BoardWeightSyncScheme(WeightSyncScheme):
    """``MultiSyncCollector(..., weight_sync_schemes={"policy": BoardWeightSyncScheme()})``; then, in the trainer,
    ``collector.update_policy_weights_(policy)``."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__("tensordict")
        self._name = name or f"torchrl-{secrets.token_hex(8)}"
        self._board: symcomm.Board | None = None

    def _init_on_sender_impl(self, model_id: str, context: Any = None, **more: Any) -> None:
        self.model_id, self.context = model_id, context
        self._board = symcomm.Board(self._name)

    def _setup_connection_and_weights_on_sender_impl(self, *, worker_idx: Any = None, weights: Any = None) -> None:
        self.send(weights)

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        found = self.prepare_weights(weights, self.model_id, self._strategy, self.context)
        self._board.publish(found.data.to_dict())

    def _init_on_receiver_impl(self, *, model_id: str, context: Any = None, model: Any = None, **more: Any) -> None:
        self.model_id, self.context = model_id, context
        self.model = model if model is not None else context.get_model(model_id)

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        reader = symcomm.BoardReader(self._name, timeout=60)
        self._apply(reader.wait())
        threading.Thread(target=self._follow, args=(reader,), daemon=True).start()

    def _follow(self, reader: symcomm.BoardReader) -> None:
        while True:
            try:
                self._apply(reader.wait())
            except symcomm.errors.DeadlineError:
                continue
            except (symcomm.errors.QueueClosedError, symcomm.errors.ProcessDiedError):
                return

    def _apply(self, found: symcomm.Snapshot) -> None:
        self._strategy.apply_weights(self.model, TensorDict(found.state), inplace=False)

    def create_transport(self, **more: Any) -> Any:
        return None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_board": None}  # it is the trainer's


class Counting(EnvBase):
    """Nothing happens in it."""

    def __init__(self) -> None:
        super().__init__(batch_size=[])
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: Any = None, **more: Any) -> TensorDict:
        return TensorDict({"observation": torch.ones(1)}, [])

    def _step(self, tensordict: TensorDict) -> TensorDict:
        return TensorDict(
            {"observation": torch.ones(1), "reward": torch.zeros(1), "done": torch.zeros(1, dtype=torch.bool)}, []
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


def main() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    policy = TensorDictModule(layer, in_keys=["observation"], out_keys=["action"])
    collector = MultiSyncCollector(
        [Counting] * 2,
        policy,
        frames_per_batch=8,
        total_frames=-1,
        weight_sync_schemes={"policy": BoardWeightSyncScheme()},
    )
    try:
        batches = iter(collector)
        for wanted in PUBLISHED:
            with torch.no_grad():
                layer.weight.fill_(wanted)
            collector.update_policy_weights_(policy)
            end = time.monotonic() + 30
            while not (actions := next(batches)["action"]).eq(wanted).all() and time.monotonic() < end:
                pass
            print(f"all actions are {actions.unique().tolist()}")
    finally:
        collector.shutdown()


if __name__ == "__main__":
    main()
