"""vLLM on two hosts, which are network namespaces with a /dev/shm of their own: tensor-parallel ranks, one on each.

``python -m tests.programs.vllm_hosts '{"folder": "/tmp/models"}'`` prints rank 0's line of JSON. Wants root.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

HOSTS = 2
ALONE = 'mount -t tmpfs none /dev/shm && exec "$@"'  # in the mounts that `ip netns exec` has made for it


def main(asked: dict[str, Any], mbits: int = 10_000) -> int:
    from symcomm.bench.namespaces import PORT, Network, why_no_namespaces

    if reason := why_no_namespaces():
        print(json.dumps({"error": f"several hosts: {reason}"}))
        return 1
    with Network(HOSTS, mbits) as network:
        ranks = []
        for rank in range(HOSTS):
            environ = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(HOSTS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": network.address(0), "MASTER_PORT": PORT, "VLLM_HOST_IP": network.address(rank),
                "GLOO_SOCKET_IFNAME": "net0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            }  # fmt: skip
            words = [sys.executable, "-m", "tests.programs.vllm_hosts", "rank", json.dumps(asked)]
            ranks.append(network.start(rank, ["sh", "-c", ALONE, "sh", *words], env=environ))
        return max(rank.wait() for rank in ranks)


def run_rank(asked: dict[str, Any]) -> None:
    from tests.programs import vllm_engine

    found = vllm_engine.main(asked | {"tp": HOSTS, "executor": "external_launcher"})
    if os.environ["RANK"] == "0":
        print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        run_rank(json.loads(sys.argv[2]))
    else:
        sys.exit(main(json.loads(sys.argv[1])))
