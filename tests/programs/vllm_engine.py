"""One engine of vLLM with a small model of random weights: its tokens, how fast they come, or how it fails.

``python -m tests.programs.vllm_engine '[{"folder": "/tmp/models", "tp": 2}]'`` prints a line of JSON for each engine.
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

LIMIT = 200.0  # seconds for one engine
VOCABULARY = 768  # of 64 and of 12: so that 12 ranks share it
SHAPES = {
    "llama": ("Llama", {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}),
    "llama12": ("Llama", {"hidden_size": 384, "num_hidden_layers": 2, "num_attention_heads": 12}),
    "llama8": ("Llama", {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}),
    "mixtral": ("Mixtral", {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}),
    "qwen2moe": ("Qwen2Moe", {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}),
}
EXPERTS = {
    "Llama": {},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
                 "shared_expert_intermediate_size": 256},
}  # fmt: skip


def make_model(folder: Path, shape: str, seed: int = 0) -> str:
    """With random weights, the same in all runs, and a tokenizer that knows as many words."""
    path = folder / f"{shape}{seed or ''}"
    if (path / "made").exists():
        return str(path)
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(seed)
    name, sizes = SHAPES[shape]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY, max_position_embeddings=2048, eos_token_id=None, bos_token_id=1, pad_token_id=0,
        intermediate_size=2 * sizes["hidden_size"], num_key_value_heads=12 if shape == "llama12" else 4,
        initializer_range=0.2, **EXPERTS[name], **sizes,
    )  # fmt: skip
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(path)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(path)
    (path / "made").touch()
    return str(path)


def prompt(number: int, length: int = 16) -> list[int]:
    return [(7 * number + 3 * j) % (VOCABULARY - 2) + 2 for j in range(length)]


def options(asked: dict[str, Any]) -> dict[str, Any]:
    return {
        "dtype": asked.get("dtype", "float32"), "enforce_eager": asked.get("eager", True),
        "tensor_parallel_size": asked.get("tp", 1), "pipeline_parallel_size": asked.get("pp", 1),
        "enable_expert_parallel": asked.get("ep", False), "max_model_len": 1024, "max_num_seqs": 32, "seed": 0,
        "enable_prefix_caching": False, "num_gpu_blocks_override": 300,
    }  # fmt: skip


def make_engine(asked: dict[str, Any]) -> Any:
    from vllm import LLM

    model = make_model(Path(asked["folder"]), asked.get("model", "llama"), asked.get("seed", 0))
    kind = {"distributed_executor_backend": asked["executor"]} if "executor" in asked else {}
    if "board" in asked:
        kind["weight_transfer_config"] = {"backend": "symcomm"}
    return LLM(model, **kind, **options(asked))


def greedy(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def generate(engine: Any, count: int, tokens: int, length: int = 16) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt(number, length)} for number in range(count)]
    return [list(each.outputs[0].token_ids) for each in engine.generate(prompts, greedy(tokens), use_tqdm=False)]


def main(asked: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(asked)
    if "kill" in asked:
        return kill_one(engine, asked["kill"])
    if "board" in asked:
        give_new_weights(engine, asked)
    begun = time.perf_counter()
    tokens = generate(engine, asked.get("batch", 4), asked.get("tokens", 32))
    first = time.perf_counter() - begun
    return {
        "tokens": tokens,
        "first": first,
        "seconds": fastest(engine, asked.get("batch", 4), asked.get("tokens", 32)),
    }


def fastest(engine: Any, count: int, tokens: int, length: int = 16, rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        generate(engine, count, tokens, length)
        times.append(time.perf_counter() - begun)
    return min(times)


def give_new_weights(engine: Any, asked: dict[str, Any]) -> None:
    """Those of the model that another seed makes, by way of a board."""
    import transformers

    import symcomm

    trained = make_model(Path(asked["folder"]), asked.get("model", "llama"), asked["board"])
    with symcomm.Board(f"weights of {os.getpid()}") as board:
        board.publish(transformers.AutoModelForCausalLM.from_pretrained(trained).state_dict())
        engine.init_weight_transfer_engine({"init_info": {"board": board.name}})
        engine.start_weight_update()
        engine.update_weights({"update_info": {"version": 1}})
        engine.finish_weight_update()


def take_turns(asked: dict[str, Any]) -> None:
    """An engine that measures when it is told to: a line of ``{"count", "tokens", "length"}`` each."""
    engine = make_engine(asked)
    print("\n" + json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        generate(engine, **json.loads(line))
        print("\n" + json.dumps({"seconds": time.perf_counter() - begun}), flush=True)


def processes_below(part: str) -> list[int]:
    """Processes that this one or its children started, with that in their names, in order of their ids."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat, line = (entry / "stat").read_text(), (entry / "cmdline").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
            names[int(entry.name)] = line
    below = {os.getpid()}
    for _ in range(5):
        below |= {pid for pid, parent in parents.items() if parent in below}
    return sorted(pid for pid in below if part in names.get(pid, ""))


def kill_one(engine: Any, which: int) -> dict[str, Any]:
    """A worker, while tokens are made; and how the client learns it."""
    generate(engine, 4, 8)
    victim, killed = processes_below("Worker")[which], []

    def kill() -> None:
        time.sleep(0.3)
        killed.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)

    threading.Thread(target=kill).start()
    try:
        while True:
            generate(engine, 4, 500)
    except Exception as error:
        seconds = time.monotonic() - killed[0]
        return {"error": f"{type(error).__name__}: {error}", "seconds": seconds, "victim": victim}


def fork_processes() -> None:
    """vLLM spawns its processes on CPUs, and each loads torch and vLLM again (20 s of CPU time): fork them."""
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.platforms import current_platform

    platform = type(current_platform)
    update = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        update(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(check_and_update_config)


def in_a_fork(asked: dict[str, Any]) -> None:
    """Prints what ``main`` returns."""
    pid = os.fork()
    if pid == 0:
        try:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if asked.get("ranks", 2) == 1 else "1"
            found = main(asked)
        except BaseException as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print("\n" + json.dumps(found), flush=True)
        os._exit(0)
    end = time.monotonic() + asked.get("limit", LIMIT)
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            print("\n" + json.dumps({"error": f"not over after {asked.get('limit', LIMIT):g} s"}), flush=True)
            for left in sorted(set(processes_below("")) - {os.getpid()}):
                os.kill(left, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1] in ("turns", "forked"):
        if sys.argv[1] == "forked":
            fork_processes()
        take_turns(json.loads(sys.argv[2]))
    else:
        fork_processes()
        for each in json.loads(sys.argv[1]):
            in_a_fork(each)
