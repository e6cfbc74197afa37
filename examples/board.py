"""A trainer puts up its weights every few steps, and two generators use the newest: they never wait for the trainer,
see no half-written weights, and share one copy of them. Start it as it is: ``python examples/board.py``."""

import multiprocessing

import torch

import symcomm

STEPS, EVERY, NAME = 60, 10, "examples/board"


def new_model() -> torch.nn.Linear:
    return torch.nn.Linear(8, 1)


def train() -> None:
    torch.manual_seed(0)
    model, wanted = new_model(), torch.arange(8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with symcomm.Board(NAME) as board:
        board.await_readers(2, timeout=60)  # only for the sake of the example
        for step in range(1, STEPS + 1):
            x = torch.randn(64, 8)
            loss = (model(x).squeeze(1) - x @ wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % EVERY == 0:
                board.publish(model.state_dict(), version=step)


def generate(number: int, answers: "multiprocessing.Queue[tuple[int, int, float]]") -> None:
    model = new_model()
    with symcomm.BoardReader(NAME, timeout=60) as reader:
        try:
            while True:
                newest = reader.wait(timeout=60)
                model.load_state_dict(newest.state, assign=True)  # maps them, and copies nothing
                with torch.no_grad():
                    said = model(torch.ones(8)).item()
        except symcomm.errors.QueueClosedError:  # the trainer is done
            answers.put((number, newest.version, said))


if __name__ == "__main__":
    start = multiprocessing.get_context("spawn")
    answers: "multiprocessing.Queue[tuple[int, int, float]]" = start.Queue()
    generators = [start.Process(target=generate, args=(number, answers)) for number in range(2)]
    for process in generators:
        process.start()
    train()
    for number, version, said in sorted(answers.get(timeout=60) for _ in generators):
        print(f"generator {number}: version {version}, the sum of 0 to 7 is {said:.0f}")
    for process in generators:
        process.join()
