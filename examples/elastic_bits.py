"""A transformer that is trained while ranks are killed and replaced, and ends with the same bits as undisturbed::

    symcomm run -n 4 --max-restarts 3 --restart failed examples/elastic_bits.py 3:4 2:5 0:20
    symcomm run -n 4 examples/elastic_bits.py
    symcomm run -n 1 examples/elastic_bits.py

"3:4" kills rank 3 in step 4. The job goes on with 3 ranks, of which 2 work; then with 2; those that are started instead
join, and it has 4 again, until rank 0 dies. Each run prints the same SHA-256 of the weights.
"""

import hashlib
import os
import signal
import sys
import time

import torch
from torch import nn

import symcomm
from symcomm import elastic

RANKS, STEPS, SHARDS, ROWS = 4, 24, 8, 2
LETTERS, LENGTH, WIDTH = 16, 12, 32
DEATHS = dict(map(int, argument.split(":")) for argument in sys.argv[1:])
COME_BACK = range(8, 19)  # steps that take a second while ranks are missing: programs take some to start


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, LETTERS)

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x = self.letters(text) + self.places(torch.arange(text.shape[1]))
        return self.out(self.layers(x, mask=mask, is_causal=True))


torch.set_num_threads(1)
torch.manual_seed(0)
model = Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
text = torch.randint(LETTERS, (400, 1), generator=torch.Generator().manual_seed(1))
text = (text + 3 * torch.arange(LENGTH + 1) ** 2) % LETTERS  # what is to be learnt
sampler = symcomm.ShardSampler(text, shards=SHARDS, batch_size=ROWS)


def die_if_asked(session):
    rank = int(os.environ["RANK"])
    if DEATHS.get(rank) == session.step and not elastic.is_newcomer():
        os.kill(os.getpid(), signal.SIGKILL)


def train_step(session):
    if DEATHS and session.size < RANKS and session.step in COME_BACK:
        time.sleep(1.0)
    losses = torch.zeros(SHARDS, dtype=torch.float64)  # of all shards: no rank adds to another's
    optimizer.zero_grad()
    for shard in session.model.shards():
        rows = text[sampler.batch(session.step, shard)]
        with symcomm.shard_seed(shard, session.step):  # dropout
            scores = session.model(rows[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        losses[shard] = loss.detach()
        die_if_asked(session)
    die_if_asked(session)  # one without shards
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    session.group.all_reduce(losses)
    return losses.mean().item()


def on_change(session):
    if session.rank == 0:
        print(f"step {session.step}: {session.size} ranks", flush=True)


with elastic.Session(
    model=model, optimizer=optimizer, data_parallel={"logical_shards": SHARDS}, on_change=on_change
) as session:
    curve = session.run(train_step, STEPS)
    if session.step == STEPS:  # and not one that came when all was done
        digest = hashlib.sha256()
        for tensor in model.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        print(f"weights {digest.hexdigest()}", flush=True)
    if session.rank == 0:
        print("loss", curve[0], "\nloss", curve[-1], flush=True)
