"""The plugin for vLLM, with small stand-ins for what it uses of vLLM: ``make programs`` runs the real one."""

from __future__ import annotations

import importlib
import os
import sys
import time
import types
from importlib.metadata import entry_points
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch", reason="vLLM's communicators move tensors")
dist = importlib.import_module("torch.distributed")
symcomm = importlib.import_module("symcomm")
errors = importlib.import_module("symcomm.errors")
plugin = importlib.import_module("symcomm.integrations.vllm")
from symcomm.integrations.vllm import last_words  # noqa: E402
from tests.support.children import children  # noqa: E402

pytestmark = pytest.mark.torch_versions


class CpuPlatform:
    """Like vLLM's, in what the plugin looks at and changes."""

    dist_backend = "gloo"

    def is_cpu(self) -> bool:
        return True

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm's own"


class CpuCommunicator:
    def __init__(self, cpu_group, device=None, device_group=None, unique_name="", use_all2all=False):
        assert not unique_name.startswith(("tp", "pp")), "vLLM's own shared memory would be made"
        self.device_group, self.unique_name = device_group, unique_name
        self.world_size, self.rank_in_group = dist.get_world_size(), dist.get_rank()
        self.supports_tensor_dict = False

    def destroy(self) -> None:
        pass


class EngineDeadError(Exception):
    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue.")


class CPUUnquantizedExperts:
    """Each expert multiplies by its weight; vLLM's looks at no map, and its kernel checks no number."""

    def __init__(self, weights: torch.Tensor):
        self.weights = weights

    def apply(self, *, output, hidden_states, topk_weights, topk_ids, expert_map) -> None:
        assert int(topk_ids.max()) < len(self.weights) and topk_ids.dtype == torch.int32
        output.copy_((self.weights[topk_ids.long()] * topk_weights).sum(1) * hidden_states)


class Ring:
    """What vLLM's message queues lie in."""

    def __init__(self, name: str | None = None):
        self.is_creator = name is None
        self.shared_memory = SharedMemory(name, self.is_creator, 4096)

    def __del__(self):
        self.shared_memory.close()
        if self.is_creator:
            self.shared_memory.unlink()


class MessageQueue:
    """Of readers on this host and on others."""

    def __init__(self, n_reader, n_local_reader, local_reader_ranks=None, max_chunk_bytes=1024, max_chunks=10):
        assert n_reader > n_local_reader, "the plugin's is to take the place of this one"
        self.buffer, self._is_writer = Ring(), True
        self.handle = self.buffer.shared_memory.name

    @staticmethod
    def create_from_handle(handle: str, rank: int) -> MessageQueue:
        self = MessageQueue.__new__(MessageQueue)
        self.buffer, self._is_writer = Ring(handle), False
        return self

    def wait_until_ready(self) -> None:
        pass


class Process:
    """Its exit code is known once it has been reaped."""

    def __init__(self, pid: int, code: int | None = None):
        self.pid, self.exitcode, self.ends_with = pid, code, None

    def join(self, timeout: float) -> None:
        self.exitcode = self.ends_with


class MultiprocExecutor:
    """Its workers take their time to end."""

    def __init__(self, is_failed: bool):
        procs = [Process(70), Process(71, -9 if is_failed else None)]
        self.workers = [types.SimpleNamespace(rank=rank, proc=proc) for rank, proc in enumerate(procs)]
        self.told = []
        self.response_mqs = [types.SimpleNamespace(shutdown=lambda: self.told.append("queue"))] * 2

    def shutdown(self) -> None:
        self.shutting_down = True
        self.told.append("workers")


class Factory:
    """Of engines that bring new weights; it takes each name once."""

    def __init__(self):
        self.known: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        assert name not in self.known
        self.known[name] = module, class_name


class WeightTransferEngine:
    """Like vLLM's, in what ours uses."""

    def __init__(self, model: object):
        self.model, self.model_config = model, None

    def __class_getitem__(cls, kinds: object) -> type:
        return cls

    def parse_init_info(self, told: dict):
        return self.init_info_cls(**told)

    def parse_update_info(self, told: dict):
        return self.update_info_cls(**told)


class World:
    def __init__(self):
        self.cpu_group = dist.group.WORLD


class Reload:
    """vLLM's weights are only loaded in between."""

    told: ClassVar[list[str]] = []

    @classmethod
    def initialize_layerwise_reload(cls, model: object) -> None:
        cls.told.append("begin")

    @classmethod
    def finalize_layerwise_reload(cls, model: object, config: object) -> None:
        cls.told.append("end")


def stand_in(platform: object) -> None:
    parts = {
        "vllm": {"envs": types.SimpleNamespace(compile_factors=lambda: {"VLLM_X": "1"})},
        "vllm.platforms": {"current_platform": platform},
        "vllm.distributed": {},
        "vllm.distributed.device_communicators": {},
        "vllm.distributed.device_communicators.cpu_communicator": {"CpuCommunicator": CpuCommunicator},
        "vllm.distributed.device_communicators.shm_broadcast": {"MessageQueue": MessageQueue},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": Factory()},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": WeightTransferEngine,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.distributed.parallel_state": {
            "get_world_group": lambda: types.SimpleNamespace(cpu_group=dist.group.WORLD)
        },
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {"reload": Reload},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.fused_moe": {},
        "vllm.model_executor.layers.fused_moe.experts": {},
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe": {"CPUUnquantizedExperts": CPUUnquantizedExperts},
        "vllm.v1": {},
        "vllm.v1.executor": {},
        "vllm.v1.executor.multiproc_executor": {"MultiprocExecutor": MultiprocExecutor},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError},
    }
    for name, attributes in parts.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module


def in_a_child(function, *args):
    with children() as start:
        child = start(lambda say: say(function(*args)))
        said = child.hear(60)
        assert child.end() == 0
        return said


def registered(version: str, wanted: str) -> tuple:
    stand_in(CpuPlatform())
    os.environ["SYMCOMM_VLLM"] = wanted
    plugin._vllm_version = lambda: version
    import warnings

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        plugin.register()
        plugin.register()
    ours = [str(each.message) for each in warned if "symcomm" in str(each.message)]
    factors = sys.modules["vllm"].envs.compile_factors()
    return CpuPlatform.dist_backend, CpuPlatform.get_device_communicator_cls(), ours, factors


def test_vllm_finds_the_plugin():
    found = [each for each in entry_points(group="vllm.general_plugins") if each.name == "symcomm"]
    assert not found or found[0].value == "symcomm.integrations.vllm:register"
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nsymcomm = "symcomm.integrations.vllm:register"' in text


@pytest.mark.parametrize("wanted", ["", "1"])
def test_groups_become_ours_and_compiled_graphs_of_others_are_not_taken(wanted: str):
    found = in_a_child(registered, "0.32.0", wanted)
    assert found == ("symcomm", plugin.COMMUNICATOR, [], {"VLLM_X": "1", "SYMCOMM": plugin.__version__})


@pytest.mark.parametrize("wanted", ["0", "off"])
def test_a_variable_turns_it_off(wanted: str):
    assert in_a_child(registered, "0.32.0", wanted) == ("gloo", "vllm's own", [], {"VLLM_X": "1"})


def test_an_unknown_version_goes_its_own_way_and_is_told_so_once():
    backend, communicator, warned, factors = in_a_child(registered, "0.99.1", "1")
    assert (backend, communicator, factors) == ("gloo", "vllm's own", {"VLLM_X": "1"})
    assert len(warned) == 1 and warned[0].startswith("symcomm: vLLM 0.99.1 is not among those that were tested")


def test_the_client_hears_what_a_worker_said():
    def client() -> list[str]:
        stand_in(CpuPlatform())
        os.environ["SYMCOMM_VLLM"] = "1"
        plugin._vllm_version = lambda: "0.32.0"
        plugin.register()
        quiet = str(EngineDeadError())
        pid = os.fork()
        if pid == 0:
            last_words.leave(errors.RankFailedError("rank 1 (pid 7) died with SIGKILL during all_reduce #3.", [1]))
            os._exit(0)
        os.waitpid(pid, 0)
        loud = str(EngineDeadError())
        last_words.RECENT = 0.0  # as if another engine had died long ago
        return [quiet, loud, str(EngineDeadError())]

    said = in_a_child(client)
    words = "EngineCore encountered an issue."
    assert said == [words, f"{words} rank 1 (pid 7) died with SIGKILL during all_reduce #3.", words]


def test_only_the_first_of_many_clients_waits_for_surer_words():
    def clients() -> list:
        registered("0.32.0", "")
        last_words.leave("rank 1 (pid 7) died.", sure=False)
        slept: list[float] = []
        last_words.time = types.SimpleNamespace(monotonic=time.monotonic, sleep=slept.append)
        said = [str(EngineDeadError()) for _ in range(3)]
        first = len(slept)
        last_words.leave("rank 1 (pid 7) died during all_reduce #3.")
        return [said, first > 0, [str(EngineDeadError()) for _ in range(3)], len(slept) == first]

    words = "EngineCore encountered an issue. rank 1 (pid 7) died"
    assert in_a_child(clients) == [[f"{words}."] * 3, True, [f"{words} during all_reduce #3."] * 3, True]


def test_queues_within_a_host_are_ours():
    def use() -> list:
        registered("0.32.0", "")
        ours = importlib.import_module("symcomm.integrations.vllm.message_queue").MessageQueue
        writer = MessageQueue(2, 2, local_reader_ranks=[1, 2], max_chunk_bytes=1 << 10, max_chunks=3)
        readers = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in (1, 2)]
        for queue in (writer, *readers):
            queue.wait_until_ready()
        writer.enqueue({"weights": torch.arange(5.0)})
        got = [reader.dequeue()["weights"].tolist() for reader in readers]
        return [type(queue) is ours for queue in (writer, *readers)] + got

    assert in_a_child(use) == [True, True, True, [0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0, 4.0]]


def test_names_of_queues_between_hosts_go_once_they_are_open():
    def names() -> tuple:
        registered("0.32.0", "")
        writer = MessageQueue(n_reader=2, n_local_reader=1)
        path = Path("/dev/shm") / writer.handle
        reader = MessageQueue.create_from_handle(writer.handle, 0)
        before = path.exists()
        for queue in (reader, writer):
            queue.wait_until_ready()
        writer.buffer.shared_memory.buf[7] = 5
        found = before, path.exists(), reader.buffer.shared_memory.buf[7]
        path.touch()  # somebody else's, by now
        del writer, reader
        kept = path.exists()
        path.unlink()
        return *found, kept

    assert in_a_child(names) == (True, False, 5, True)


def test_the_engine_stops_waiting_for_a_dead_worker_before_the_others_end():
    def order() -> tuple:
        registered("0.32.0", "")
        failed, well = MultiprocExecutor(True), MultiprocExecutor(False)
        well.shutdown()
        quiet = last_words.heard(0)
        failed.shutdown()
        by_engine = last_words.heard(0)  # nobody was in a call
        failed.shutdown()
        last_words.leave(errors.RankFailedError("rank 1 (pid 71) died during all_reduce #3.", [1]))
        return failed.told, well.told, quiet, by_engine, last_words.heard()

    told = in_a_child(order)
    assert told[:3] == (["queue", "queue", "workers", "workers"], ["workers"], "")
    assert told[3:] == ("rank 1 (pid 71) died with SIGKILL.", "rank 1 (pid 71) died during all_reduce #3.")


def test_the_engine_tells_of_a_death_that_its_queues_noticed_first():
    def order() -> tuple:
        registered("0.32.0", "")
        executor = MultiprocExecutor(False)
        executor.workers[0].proc.ends_with = -6
        importlib.import_module("symcomm.integrations.vllm.message_queue").found_dead.add(70)
        executor.shutdown()
        return executor.told, last_words.heard(0)

    assert in_a_child(order) == (["queue", "queue", "workers"], "rank 0 (pid 70) died with SIGABRT.")


def test_experts_of_other_ranks_count_nothing_here():
    def shares() -> tuple:
        stand_in(CpuPlatform())
        experts = importlib.import_module("symcomm.integrations.vllm.experts")
        experts.mend()
        experts.mend()
        weights, tokens = torch.tensor([1.0, 10.0, 100.0, 1000.0]), torch.tensor([1.0, 2.0, 3.0])
        chosen = torch.tensor([[0, 3], [2, 1], [3, 2]], dtype=torch.int32)
        shares = torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]])

        def found(mine: list[int], map_: list[int] | None) -> list[float]:
            out = torch.empty(3)
            CPUUnquantizedExperts(weights[mine]).apply(
                output=out, hidden_states=tokens, topk_weights=shares, topk_ids=chosen,
                expert_map=None if map_ is None else torch.tensor(map_),
            )  # fmt: skip
            return out.tolist()

        return found([0, 1, 2, 3], None), found([0, 1], [0, 1, -1, -1]), found([2, 3], [-1, -1, 0, 1])

    whole, first, second = in_a_child(shares)
    assert whole == [500.5, 65.0, 3000.0]
    assert (first, second) == ([0.5, 15.0, 0.0], [500.0, 50.0, 3000.0])


# --- new weights ------------------------------------------------------------------------------------------------


def test_a_board_is_a_backend_of_the_weight_transfer():
    def known() -> tuple[str, str]:
        registered("0.32.0", "")
        return sys.modules["vllm.distributed.weight_transfer.factory"].WeightTransferEngineFactory.known["symcomm"]

    module, name = in_a_child(known)
    assert f"{module}.{name}" == plugin.ENGINE


class Model:
    def load_weights(self, weights) -> None:
        self.loaded = {name: tensor.unique().tolist() for name, tensor in weights}


def load(say, rank: int, folder: str, name: str) -> None:
    stand_in(CpuPlatform())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    engine = importlib.import_module("symcomm.integrations.vllm.weights").BoardWeightTransferEngine(Model())
    engine.init_transfer_engine(engine.parse_init_info({"board": name}))
    say("there")
    for wanted in (1, 500):
        engine.start_weight_update()
        engine.update_weights({"version": wanted, "timeout": 60.0})
        engine.finish_weight_update()
        say(engine.model.loaded)
    with pytest.raises(errors.DeadlineError):
        engine.update_weights({"version": 10**9, "timeout": 0.1})
    engine.shutdown()
    say(Reload.told)
    dist.barrier()


def test_all_workers_load_the_same_version_though_the_trainer_goes_on(tmp_path: Path):
    name = f"weights of {tmp_path}"
    with children() as start, symcomm.Board(name) as board:
        workers = [start(load, rank, str(tmp_path), name) for rank in range(2)]
        assert [worker.hear(60) for worker in workers] == ["there"] * 2

        def heard() -> dict:
            while not all(worker.has_said() for worker in workers):
                board.publish({"w": torch.full((100_000,), float(board.version + 1)), "b": torch.tensor([7.0])})
            one, two = (worker.hear() for worker in workers)
            assert one == two and one["b"] == [7.0]
            return one["w"]

        (first,), (second,) = heard(), heard()
        assert 1 <= first < second and second >= 500
        assert [worker.hear(60) for worker in workers] == [["begin", "end"] * 2] * 2


# --- the communicator ------------------------------------------------------------------------------------------


def work(say, rank: int, folder: str) -> None:
    stand_in(CpuPlatform())
    torch.set_num_threads(1)
    dist.init_process_group("symcomm", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    made = importlib.import_module("symcomm.integrations.vllm.communicator").Communicator
    comm = made(dist.group.WORLD, device_group=dist.group.WORLD, unique_name="tp:0")
    x = torch.arange(6.0).reshape(2, 3) + 100 * rank
    found = {"all_reduce": comm.all_reduce(x.clone()), "gather": comm.gather(x, 0, -1)}
    found |= {f"all_gather {dim}": comm.all_gather(x, dim) for dim in (0, 1, -1)}
    square = torch.arange(16.0).reshape(4, 4) * (rank + 1)
    found |= {f"reduce_scatter {dim}": comm.reduce_scatter(square, dim) for dim in (0, 1, -1)}
    found["all_gatherv"] = comm.all_gatherv(x[: rank + 1], 0, [1, 2])
    found["all_gatherv of two"] = comm.all_gatherv([x, x + 1], 0)[1]
    found["reduce_scatterv"] = comm.reduce_scatterv(square, 0, [1, 3])

    def layer(y: torch.Tensor) -> torch.Tensor:
        return comm.all_reduce(y * 2) + comm.all_gather(y, 1).sum()

    with torch._dynamo.config.patch(optimize_ddp=False):  # of use to DDP only, of which earlier tests may leave traces
        found["compiled"] = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    found["not compiled"] = layer(x)
    sent = {"hidden": x.t(), "name": "stage", "empty": torch.empty(0, 3), "ids": torch.arange(5)}
    if rank == 0:
        comm.send_tensor_dict(sent, 1)
    else:
        got = comm.recv_tensor_dict(0)
        found["order"], found["got"] = (
            list(got),
            [got["hidden"].tolist(), got["name"], list(got["empty"].shape), got["ids"].tolist()],
        )
    found["supports"] = comm.supports_tensor_dict
    say({name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in found.items()})
    dist.barrier()
    comm.destroy()


def test_the_communicator_is_right(tmp_path: Path):
    with children() as start:
        ranks = [start(work, rank, str(tmp_path)) for rank in range(2)]
        one, two = (child.hear(90) for child in ranks)
    x = [torch.arange(6.0).reshape(2, 3) + 100 * rank for rank in range(2)]
    square = torch.arange(16.0).reshape(4, 4) * 3
    for rank, found in enumerate((one, two)):
        assert found["all_reduce"] == (x[0] + x[1]).tolist()
        assert found["gather"] == (torch.cat(x, -1).tolist() if rank == 0 else None)
        for dim in (0, 1, -1):
            assert found[f"all_gather {dim}"] == torch.cat(x, dim).tolist()
            assert found[f"reduce_scatter {dim}"] == square.chunk(2, dim)[rank].tolist()
        assert found["all_gatherv"] == torch.cat([x[0][:1], x[1][:2]]).tolist()
        assert found["all_gatherv of two"] == (torch.cat(x) + 1).tolist()
        assert found["reduce_scatterv"] == square.split([1, 3])[rank].tolist()
        assert found["compiled"] == found["not compiled"] and found["supports"] is True
    assert two["order"] == ["hidden", "name", "empty", "ids"]
    hidden, name, shape, ids = two["got"]
    assert (hidden, name, shape, ids) == (x[0].t().tolist(), "stage", [0, 3], [*range(5)])
