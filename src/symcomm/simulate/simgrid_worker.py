"""Plays rounds of messages in SimGrid: a platform and rounds as JSON on stdin, seconds of each round on stdout.

SimGrid's flow model CM02 without its corrections for TCP: a link is as fast as the topology says, and flows share it
max-min fairly, as in our own model.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from simgrid import ActivitySet, Comm, Engine, LinkInRoute

CONFIG = (
    "network/model:CM02",
    "network/TCP-gamma:0",
    "network/crosstraffic:0",  # our links have one direction each
    "network/weight-S:0",
    "precision/timing:1e-12",
    "precision/work-amount:1e-6",
)


def build(question: dict[str, Any], engine: Any) -> list[Any]:
    """The platform: one zone, in which only the routes that are taken exist."""
    zone = engine.netzone_root.add_netzone_full("cluster")
    hosts = [zone.add_host(f"host {number}", 1e9) for number in range(question["hosts"])]
    links = [
        zone.add_link(f"wire {number}", bandwidth).set_latency(question["latency"]).seal()
        for number, bandwidth in enumerate(question["bandwidths"])
    ]
    for a, b, wires in question["routes"]:
        zone.add_route(hosts[a], hosts[b], [LinkInRoute(links[wire]) for wire in wires], False)
    zone.seal()
    return hosts


def play(hosts: list[Any], rounds: list[dict[str, Any]], times: list[float]) -> None:
    """One actor starts a round's messages all at once and waits for the last of them."""
    for each in rounds:
        began = Engine.clock
        messages = ActivitySet([Comm.sendto_async(hosts[a], hosts[b], int(each["nbytes"])) for a, b in each["pairs"]])
        messages.wait_all()
        times.append(Engine.clock - began)


def main() -> None:
    question = json.load(sys.stdin)
    engine = Engine(["symcomm", *(f"--cfg={setting}" for setting in CONFIG), "--log=root.thres:error"])
    hosts = build(question, engine)
    times: list[float] = []
    hosts[0].add_actor("player", play, hosts, question["rounds"], times)
    engine.run()
    print(json.dumps(times))


if __name__ == "__main__":
    main()
