"""Runs a small model in vLLM and prints one line of JSON: the tokens, or how fast they come, or how it fails.

``python -m tests.programs.vllm_tokens '{"tp": 2, "dtype": "float32", "eager": true}'``
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

SHAPES = {
    "llama": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8},
    "mixtral": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8},
}


def make_model(folder: Path, kind: str) -> str:
    """With random weights, the same in all runs."""
    import torch
    import transformers

    path = folder / kind
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        name = {"llama": "Llama", "mixtral": "Mixtral"}[kind]
        config = getattr(transformers, f"{name}Config")(
            vocab_size=1024, num_key_value_heads=4, max_position_embeddings=512, eos_token_id=None, bos_token_id=1,
            **({"num_local_experts": 4} if kind == "mixtral" else {}), **SHAPES[kind],
        )  # fmt: skip
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(path)
    return str(path)


def children_named(part: str) -> list[int]:
    """Processes below this one with that in their names."""
    found, parents = [], {os.getpid()}
    for _ in range(4):
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                stat, line = (entry / "stat").read_text(), (entry / "cmdline").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) in parents and int(entry.name) not in parents:
                parents.add(int(entry.name))
                if part in line:
                    found.append(int(entry.name))
    return found


def main(asked: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        make_model(Path(asked["folder"]), asked.get("model", "llama")),
        skip_tokenizer_init=True, dtype=asked.get("dtype", "float32"), enforce_eager=asked.get("eager", True),
        tensor_parallel_size=asked.get("tp", 1), pipeline_parallel_size=asked.get("pp", 1),
        enable_expert_parallel=asked.get("ep", False), max_model_len=256, max_num_seqs=32, seed=0,
        distributed_executor_backend=asked.get("executor"),
        enable_prefix_caching=False,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 + 2 for j in range(16)]} for i in range(asked.get("batch", 4))]
    params = SamplingParams(temperature=0, max_tokens=asked.get("tokens", 32), ignore_eos=True, detokenize=False)
    if asked.get("kill"):
        return kill_one(llm, prompts, params)
    tokens = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]
    return {"tokens": tokens, "per_second": {n: rate(llm, prompts[:n], params) for n in asked.get("rates", [])}}


def rate(llm: Any, prompts: list[Any], params: Any, rounds: int = 7) -> float:
    """Tokens per second in the fastest of some rounds."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - begun)
    return len(prompts) * params.max_tokens / min(times)


def kill_one(llm: Any, prompts: list[Any], params: Any) -> dict[str, Any]:
    """The last worker, while tokens are made."""
    llm.generate(prompts, params, use_tqdm=False)
    params.max_tokens = 200
    victim, killed = max(children_named("Worker")), []

    def kill() -> None:
        time.sleep(0.3)
        killed.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)

    threading.Thread(target=kill).start()
    try:
        while True:
            llm.generate(prompts, params, use_tqdm=False)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - killed[0], "victim": victim}


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
