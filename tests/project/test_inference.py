"""Tensor-parallel inference: however many ranks a model is split over, it writes the same tokens."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import symcomm
from symcomm import errors
from symcomm.bench import llm as bench_llm
from symcomm.bench import llm_worker as bench_llm_worker
from symcomm.bench import run as bench_run
from symcomm.llama import Config, Llama, Parallel, generate
from tests.support import loaded
from tests.support.bench_cli import cli, refused
from tests.support.examples import ENVIRONMENT, run_example
from tests.support.programs import kernels_of

pytestmark = [pytest.mark.torch_versions, pytest.mark.long]

CONFIG = Config(layers=2, width=512, vocabulary=512, length=24, batch=3)
PROMPT = torch.arange(30).view(3, 10) * 17 % 512


class Ranks(Parallel):
    def __init__(self, group: Any):
        self.group, self.rank, self.size = group, group.rank, group.size

    def all_reduce(self, x: Any) -> Any:
        self.group.all_reduce(x)
        return x


def write(group: Any) -> list[list[int]]:
    with torch.no_grad():
        return generate(Llama(CONFIG, Ranks(group)), PROMPT, 12).tolist()


# --- the model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_writes_the_same_tokens(ranks: int):
    with torch.no_grad():
        whole = generate(Llama(CONFIG, Parallel()), PROMPT, 12).tolist()
    assert len({tuple(text) for text in whole}) == 3, "texts with different prompts must differ"
    assert symcomm.spawn(write, ranks, mode="threads") == [whole] * ranks


def test_ranks_that_do_not_add_up_write_something_else():
    """The comparison can fail."""

    class Deaf(Parallel):
        rank, size = 0, 2

    with torch.no_grad():
        whole = generate(Llama(CONFIG, Parallel()), PROMPT, 12)
        assert not torch.equal(generate(Llama(CONFIG, Deaf()), PROMPT, 12), whole)


def test_decoding_sees_what_prefill_has_read():
    """Token by token with the cache, or all of them at once: the same next token."""
    model = Llama(CONFIG, Parallel())
    with torch.no_grad():
        written = generate(model, PROMPT, 12)
        text = torch.cat([PROMPT, written[:, :-1]], 1)
        for length in range(10, 22):
            assert torch.equal(model(text[:, :length], torch.arange(length)), written[:, length - 10])


# --- the example -------------------------------------------------------------------------------------------------


def tokens_of(lines: list[str]) -> list[int]:
    [line] = [line for line in lines if line.startswith("tokens ")]
    return [int(word) for word in line.split()[1:]]


@pytest.mark.slow
def test_the_example_on_one_two_and_four_ranks():
    alone = tokens_of(run_example("llama.py", ranks=1))
    assert len(alone) == 16 and len(set(alone)) > 8
    assert tokens_of(run_example("llama.py", "symcomm", "--check")) == alone
    assert tokens_of(run_example("llama.py", "direct", "--check", ranks=4)) == alone
    assert tokens_of(run_example("llama.py", "gloo", "--check", torchrun=True)) == alone


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ENVIRONMENT, "ATEN_CPU_CAPABILITY", "default")  # scalar code compiles in a third of the time
    monkeypatch.setitem(ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR", kernels_of("llama"))
    shape = ("--layers", "1", "--tokens", "6")
    compiled = run_example("llama.py", "symcomm", "--compile", "--check", *shape, torchrun=True, seconds=280)
    assert tokens_of(compiled) == tokens_of(run_example("llama.py", "direct", *shape))


def test_the_example_in_shards():
    """The same logits, bit for bit."""
    shape = ("--shards", "4", "--layers", "1", "--tokens", "4")
    said = [
        [line for line in run_example("llama.py", *shape, ranks=n) if line.startswith("logits ")] for n in (1, 2, 4)
    ]
    assert said[0] == said[1] == said[2] and len(said[0]) == 1


# --- transformers ------------------------------------------------------------------------------------------------

TRANSFORMERS = """
import sys, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
torch.manual_seed(0)
folder, prompt = sys.argv[1], torch.arange(3, 11)[None]
if len(sys.argv) > 2:
    config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
else:
    dist.init_process_group("symcomm")
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    part = model.model.layers[0].self_attn.q_proj.weight.to_local()
    assert part.shape == (64 // dist.get_world_size(), 64), part.shape
written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False,
                         pad_token_id=0)
if not dist.is_initialized() or dist.get_rank() == 0:
    print("tokens", *written[0].tolist())
if dist.is_initialized():
    dist.destroy_process_group()
"""


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (pip install transformers)"
)


@needs_transformers
def test_the_model_is_a_llama():
    """transformers' model with our weights writes what ours writes."""
    transformers = importlib.import_module("transformers")
    ours = Llama(CONFIG, Parallel())
    config = transformers.LlamaConfig(
        vocab_size=CONFIG.vocabulary, hidden_size=CONFIG.width, intermediate_size=CONFIG.hidden,
        num_hidden_layers=CONFIG.layers, num_attention_heads=CONFIG.heads, num_key_value_heads=CONFIG.kv_heads,
    )  # fmt: skip
    weights = {"model.embed_tokens": ours.embedding, "model.norm": ours.norm, "lm_head": ours.head}
    for number, layer in enumerate(ours.layers):
        [part] = layer.parts
        q, k, v = part.qkv.split([CONFIG.width, *[64 * CONFIG.kv_heads] * 2])
        gate, up = part.gate_up.chunk(2)
        own = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": part.out}
        own |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": part.down}
        own |= {"input_layernorm": layer.norms[0], "post_attention_layernorm": layer.norms[1]}
        weights |= {f"model.layers.{number}.{name}": weight for name, weight in own.items()}
    theirs = transformers.LlamaForCausalLM(config)
    theirs.load_state_dict({f"{name}.weight": weight for name, weight in weights.items()})
    found = theirs.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=12, do_sample=False,
                            eos_token_id=None, pad_token_id=0)  # fmt: skip
    with torch.no_grad():
        assert torch.equal(found[:, PROMPT.shape[1] :], generate(ours, PROMPT, 12))


@pytest.mark.slow
@needs_transformers
def test_transformers_tp_plan(tmp_path: Path):
    script, folder = tmp_path / "program.py", str(tmp_path / "model")
    script.write_text(TRANSFORMERS)

    def run(*command: str) -> list[int]:
        done = loaded.run([sys.executable, *command], env=ENVIRONMENT, timeout=100, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return tokens_of(done.stdout.splitlines())

    alone = run(str(script), folder, "make")
    assert len(alone) == 20
    for ranks in ("2", "4"):
        assert run("-m", "symcomm", "run", "-n", ranks, "--no-prefix", str(script), folder) == alone


@needs_transformers
def test_transformers_in_shards():
    """Logits are the same bits on any number of ranks, and the tokens those of the whole model."""
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.arange(3, 14)[None]
    how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}

    def on_rank(group: Any) -> tuple[bytes, list[int]]:
        torch.set_num_threads(1)
        model = symcomm.nn.parallelize(copy.deepcopy(whole), whole.tp_plan, 4, group)
        with torch.no_grad():
            return model(prompt).logits.numpy().tobytes(), model.generate(prompt, **how)[0].tolist()

    [first, *others] = [found for ranks in (1, 2, 4) for found in symcomm.spawn(on_rank, ranks, mode="threads")]
    assert all(other == first for other in others) and first[1] == whole.generate(prompt, **how)[0].tolist()


# --- symcomm bench llm -------------------------------------------------------------------------------------------


def fake_measurements(section: bench_llm.LlmSection, workload: bench_llm.LlmWorkload) -> list[bench_llm.LlmMeasurement]:
    """Seconds of a token in three rounds; the second is slow, and so is every second token."""
    decode = {"one": [0.05, 0.9, 0.05], "gloo": [0.1, 3.0, 0.1], "symcomm": [0.04, 1, 0.04], "direct": [0.025, 1, 0.02]}
    figures = []
    for name in section.sides:
        turns = decode.get(name, [1.0])
        ranks = 1 if name == "one" else section.ranks
        prefill = [[20 * seconds] for seconds in turns]
        tokens = [[seconds, 5 * seconds, seconds] for seconds in turns]
        reducing = [[seconds / 2 if section.mode == "eager" else 0.0] * 3 for seconds in turns]
        figures.append(bench_llm.LlmMeasurement(section.mode, ranks, name, "", prefill, tokens, reducing))
    return figures


def test_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[bench_llm.LlmWorkload] = []

    def stand_in(
        section: bench_llm.LlmSection, workload: bench_llm.LlmWorkload, tick: object, begin: object
    ) -> list[bench_llm.LlmMeasurement]:
        asked.append(workload)
        return fake_measurements(section, workload)

    monkeypatch.setattr(bench_llm, "measure", stand_in)
    monkeypatch.setattr(bench_llm, "has_deepspeed", lambda: False)
    path = tmp_path / "llm.json"
    picture = ["--plot", str(tmp_path / "llm.svg")] if importlib.util.find_spec("matplotlib") else []
    code, output = cli("llm", "--markdown", "--json", str(path), "--width", "512", "--batch", "2", *picture)
    assert code == 0, output
    assert asked == [bench_llm.LlmWorkload(width=512, batch=2)] * 4
    assert "| eager | 1 | one process | 256 | 40.0 | - | 2.00x | - |" in output
    assert "| eager | 2 | gloo | 128 | 20.0 | 50.00 | - | 0.50x |" in output
    assert "| eager | 4 | symcomm, own call | 512 | 80.0 | 12.50 | 4.00x | 2.00x |" in output
    assert "| compiled | 2 | symcomm | 320 | 50.0 | - | 2.50x | 1.25x |" in output
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 14 and [row["section_ranks"] for row in rows] == [2] * 4 + [4] * 4 + [2] * 3 + [4] * 3
    assert rows[1]["decode_per_s"] == pytest.approx(20)
    if picture:
        assert (tmp_path / "llm.svg").read_text().count("<!-- symcomm, own call -->") == 1
    _, fastest = cli("llm", "--best", "--ranks", "2", "--quick")
    assert asked[-1] == bench_llm.LlmWorkload(worlds=(2,), **bench_llm.QUICK)
    assert re.search(r"eager +2 +symcomm, own call +80 +50\.0 +10\.00 +5\.00x +2\.50x", fastest), fastest


def test_refusals():
    assert "a multiple of 256" in refused("llm", "--width", "300")
    assert "a divisor of the model's 4 key heads" in refused("llm", "--ranks", "3")
    assert "2 or more for llm" in refused("llm", "--ranks", "1")
    assert "--layers must be 1 or more" in refused("llm", "--layers", "-1")


SMALL = {"layers": 1, "width": 256, "prompt": 8, "tokens": 4}


@pytest.mark.slow
def test_every_side_is_measured(monkeypatch: pytest.MonkeyPatch):
    """Real ranks: a row for each. Compiled ones differ by one line, which the next test has."""
    monkeypatch.setattr(bench_run, "subprocess", loaded.stand_in())
    monkeypatch.setattr(bench_llm, "has_deepspeed", lambda: False)
    monkeypatch.setattr(bench_llm, "QUICK", SMALL | {"rounds": 2, "modes": ("eager",)})
    code, output = cli("llm", "--quick", "--ranks", "2", "--markdown")
    assert code == 0, output
    rows = [line.split(" | ") for line in output.splitlines() if line.startswith("| eager")]
    one, gloo, _, *ours = bench_llm.SIDES.values()
    assert [row[2] for row in rows] == [one, gloo, *ours]
    assert all(float(row[3]) > 0 and float(row[4]) > 0 for row in rows)
    assert rows[0][5] == "-" and all(float(row[5]) >= 0 for row in rows[1:])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_rank_times_its_tokens(monkeypatch: pytest.MonkeyPatch, compiled: bool):
    """Compiled where it is asked for, and then without the clock in all_reduce, which would break the graph."""
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: asked.append(dynamic) or model)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    config = bench_llm.LlmWorkload(**SMALL).config
    order = {"compiled": compiled, "config": config, "prompt": 8, "tokens": 4, "threads": 3}
    found, written = bench_llm_worker.LlmRun(0, 1, lambda tensor: time.sleep(0.001), order).write()
    assert asked == [3, *[False] * compiled]
    assert [token.shape for token in written] == [(1,)] * 5
    assert len(found["prefill"]) == 1 and len(found["decode"]) == 4 and min(found["decode"]) > 0.003
    assert len(found["reducing"]) == 4
    assert all(seconds == 0 if compiled else seconds >= 0.003 for seconds in found["reducing"])  # three calls a token


@pytest.mark.parametrize("cores", [2, 3])
def test_a_side_that_writes_other_tokens_is_not_timed(monkeypatch, cores):
    done: list[str] = []

    class Stub:
        def __init__(self, name: str, world: int, tokens: list[int]):
            self.name, self.world, self.tokens = name, world, tokens

        def tell(self, order: dict) -> None:
            assert order["do"] == "prepare"
            done.append(f"{self.name} told")

        def hear(self, what: str, seconds: float) -> list[dict]:
            done.append(f"{self.name} heard")
            return [{}] * self.world

        def ask(self, what: str, order: dict) -> list[dict]:
            assert order == {"do": "check"}
            return [{"tokens": self.tokens}] * self.world

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    sides: Any = [Stub("one", 1, [1, 2]), Stub("gloo", 2, [1, 3])]
    with pytest.raises(errors.SymcommError, match="gloo, eager, 2 ranks, does not write the tokens"):
        bench_llm._prepare(
            sides, bench_llm.LlmSection("eager", 2), bench_llm.LlmWorkload(), "eager, 2 ranks", done.append
        )
    if cores == 3:  # one for every rank: all at once
        assert done[0] == "preparing eager, 2 ranks, one process, gloo"
        assert done[1:] == ["one told", "gloo told", "one heard", "gloo heard"]
    else:
        assert done[:3] == ["preparing eager, 2 ranks, one process", "one told", "one heard"]
        assert done[3:] == ["preparing eager, 2 ranks, gloo", "gloo told", "gloo heard"]


def test_what_cannot_run_is_a_dash_with_its_reason():
    class Stub:
        name, world = "deepspeed", 2

        def ask(self, what: str, order: dict, seconds: float = 0.0) -> list[dict]:
            return [{"unsupported": "no such operator"}, {}]

    side: Any = Stub()
    section = bench_llm.LlmSection("eager", 2)
    figures = bench_llm._start(section, side, "eager")
    assert figures.reason == "no such operator"
    assert bench_llm.row_of(figures, [figures], bench_llm.LlmWorkload())[2:] == ["deepspeed", *["-"] * 5]
