"""What happens in a scenario of the soak, all of it from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

FAULTS = ("kill", "kill later", "exit", "stop", "pause", "mismatch", "abort", "destroy", "leavings", "none")
HARMLESS = ("pause", "leavings", "none")  # nobody raises
STOPPED_TIMEOUT = 1.0  # seconds: how long the others wait for a stopped rank; a starved one must not look like it
STARVED = 3.0  # seconds by which a rank may be late on a busy machine


@dataclass
class Scenario:
    seed: int

    def __post_init__(self) -> None:
        dice = random.Random(self.seed)
        self.fault = FAULTS[self.seed % len(FAULTS)]  # so that a few scenarios have them all
        self.world = dice.randint(2, 5)
        self.victim = dice.randrange(self.world)
        self.step = dice.randint(0, 12)  # at which the fault happens
        self.delay = dice.uniform(0, 0.03)  # seconds from the step's beginning to what happens "later"
        # Do survivors go on in a smaller group, or end? A late message is no failure of the group, so the end of the
        # rank that raised for it would be a second fault: after a stop they live on.
        self.goes_on = dice.random() < 0.6
        self.ends_at_once = not self.goes_on and self.fault != "stop" and dice.random() < 0.5
        self.newcomers = dice.choice((0, 1, 2)) if self.goes_on and self.fault not in HARMLESS else 0
        self.newcomer_killed = self.newcomers > 0 and dice.random() < 0.3
        self.kill_newcomer_after = dice.uniform(0, 0.5)
        self.over_tcp = dice.random() < 0.5  # where ranks meet: a store that strangers can reach, or a file

    @property
    def dies(self) -> bool:
        return self.fault in ("kill", "kill later", "exit")

    def __str__(self) -> str:
        then = f", then {self.newcomers} come" if self.newcomers else ", then they go on" if self.goes_on else ""
        killed = ", one is killed as it comes" if self.newcomer_killed else ""
        where = "TCP" if self.over_tcp else "a file"
        fault = f"{self.fault} of rank {self.victim} of {self.world} at step {self.step}"
        return f"seed {self.seed}: {fault}{then}{killed}; they meet over {where}"
