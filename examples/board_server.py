"""An inference server that answers with the newest weights while they are trained: it never waits for the trainer, and
no answer mixes two versions. Start it as it is: ``python examples/board_server.py``."""

import json
import multiprocessing
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

import torch

import symcomm

STEPS, EVERY, NAME = 60, 20, "examples/board_server"


def new_model() -> torch.nn.Linear:
    return torch.nn.Linear(8, 1)


class Newest:
    """A model with the newest weights; one that a request has begun with stays as it is."""

    def __init__(self) -> None:
        self._reader = symcomm.BoardReader(NAME, timeout=60)
        self._lock = threading.Lock()  # requests are threads
        self._version, self._model = 0, new_model()

    def get(self) -> tuple[int, torch.nn.Linear]:
        with self._lock:
            newest = self._reader.newest()
            if newest is not None and newest.version != self._version:
                self._version, self._model = newest.version, new_model()
                self._model.load_state_dict(newest.state, assign=True)  # maps them, and copies nothing
            return self._version, self._model


def serve(port: Connection) -> None:
    newest = Newest()

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            version, model = newest.get()
            with torch.inference_mode():
                answer = {"version": version, "sum": model(torch.tensor(asked)).item()}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    port.send(server.server_port)
    server.serve_forever()


def ask(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}", json.dumps([1.0] * 8).encode()) as answer:
        return json.load(answer)


def train(board: symcomm.Board, port: int) -> None:
    torch.manual_seed(0)
    model, wanted = new_model(), torch.arange(8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1, STEPS + 1):
        x = torch.randn(64, 8)
        loss = (model(x).squeeze(1) - x @ wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            board.publish(model.state_dict(), version=step)
            answer = ask(port)
            print(f"version {answer['version']}: the sum of 0 to 7 is {answer['sum']:.1f}")


if __name__ == "__main__":
    start = multiprocessing.get_context("spawn")
    ours, theirs = start.Pipe()
    with symcomm.Board(NAME) as board:
        server = start.Process(target=serve, args=(theirs,), daemon=True)
        server.start()
        train(board, ours.recv())
    server.terminate()
