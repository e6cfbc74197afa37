"""What a collective would cost on a cluster that you describe.

    units.py      bytes, bandwidths and times as people write them: 1G, 100Gb/s, 2us
    machine.py    what one host does with bytes, and how long its ranks take to meet: measured numbers
    host.py       walks the real plans of all ranks of a host and adds up what their steps cost
    topology.py   how hosts are wired: star, ring, torus, fat-tree; the links between any two of them
    rounds.py     algorithms between hosts as rounds of messages
    engines.py    what a round costs: our model of shared links, or SimGrid's
    predict.py    collectives from both parts; ``predict`` and ``compare``
    training.py   a training step whose communication hides behind its computation
    calibrate.py  measures this machine with our own collectives; a link from measured ones of several hosts
    check.py      predictions beside what `symcomm bench hosts` measured

Plans are data, so the part within a host needs no formula: it costs the very steps that the C core would run.
"""

from symcomm.simulate.machine import DEFAULT, Machine, load
from symcomm.simulate.predict import ALGORITHMS, Cluster, Estimate, compare, predict
from symcomm.simulate.topology import Link, Topology, parse_topology
from symcomm.simulate.training import Step, ddp_step, fsdp_step

__all__ = [
    "ALGORITHMS", "DEFAULT", "Cluster", "Estimate", "Link", "Machine", "Step", "Topology", "compare", "ddp_step",
    "fsdp_step", "load", "parse_topology", "predict",
]  # fmt: skip
