"""vLLM's server over HTTP: eight clients at once, and what each is told when a worker is killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.programs.vllm_engine import make_model, options, processes_below, prompt

CLIENTS = 8
ROUNDS = 4  # of all clients at once; the fastest counts, as everywhere with vLLM
START = 600.0  # seconds; every process of vLLM loads torch


@contextlib.contextmanager
def server(asked: dict[str, Any], log: Path) -> Iterator[int]:
    """Its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--model", make_model(Path(asked["folder"]), asked.get("model", "llama")), "--port", str(port)]
    for name, value in options(asked).items():
        flag = "--" + name.replace("_", "-")
        words += [flag] * value + ["--no-" + flag[2:]] * (not value) if isinstance(value, bool) else [flag, str(value)]
    with open(log, "w") as output:
        served = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
        process = subprocess.Popen(served, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_until_ready(process, port, log)
        yield port
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(process: subprocess.Popen, port: int, log: Path) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server is not there: {log.read_text()[-1500:]}")


def ask(port: int, number: int, tokens: int) -> tuple[int, dict[str, Any]]:
    """Its status and its answer."""
    body = {
        "prompt": prompt(number),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def at_once(client: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(asked: dict[str, Any]) -> dict[str, Any]:
    tokens, told, killed = {}, {}, []

    def answered(number: int) -> None:
        tokens[number] = ask(port, number, asked.get("tokens", 32))[1]["choices"][0]["token_ids"]

    def refused(number: int) -> None:
        try:
            while True:
                status, answer = ask(port, number, 400)
                if status != 200:
                    break
            told[number] = (f"{status}: {answer['error']['message']}", time.monotonic() - killed[0])
        except (OSError, http.client.HTTPException) as error:
            told[number] = (f"{type(error).__name__}: {error}", time.monotonic() - killed[0])

    def kill() -> None:
        time.sleep(0.5)
        killed.append(time.monotonic())
        os.kill(processes_below("Worker")[-1], signal.SIGKILL)

    with server(asked, Path(asked["log"])) as port:
        times = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            at_once(answered)
            times.append(time.perf_counter() - begun)
        threading.Thread(target=kill).start()
        at_once(refused)
    return {"tokens": [tokens[n] for n in range(CLIENTS)], "seconds": min(times), "told": list(told.values())}


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
