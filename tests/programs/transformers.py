"""transformers: a small Llama trained by Trainer, and its forward pass and generation under ``tp_plan="auto"``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tests.programs.frame import FOLDER, Part, joined, numbers, tell, timed

VERSION = "5.22.2"
NEEDS = (f"transformers=={VERSION}", "accelerate==1.15.0")
PARTS = ("Trainer, a small Llama", 'tp_plan="auto", 16 tokens')
STEPS, LENGTH, WORDS = 20, 64, 512


def settings():
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def train() -> Part:
    import torch
    from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    class Losses(TrainerCallback):
        found: list[float] = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "loss" in logs:
                self.found.append(logs["loss"])

    set_seed(0)
    words = torch.randint(2, WORDS, (STEPS * 8, LENGTH))
    options = TrainingArguments(
        os.environ[FOLDER], use_cpu=True, per_device_train_batch_size=4, max_steps=STEPS, logging_steps=1,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in words]
    trainer = Trainer(LlamaForCausalLM(settings()), options, train_dataset=rows, callbacks=[Losses()])
    took = trainer.train().metrics["train_runtime"]
    return Part(PARTS[0], Losses.found + numbers(*trainer.model.parameters()), took / STEPS)


def generate() -> Part:
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM

    folder = Path(os.environ[FOLDER]) / "llama"
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(settings()).save_pretrained(folder)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    prompt = torch.arange(2, 34)[None]

    def some(_: int) -> list[int]:
        return model.generate(prompt, max_new_tokens=16, do_sample=False)[0].tolist()

    words, seconds = timed(some, 6, 1)
    with torch.no_grad():
        logits = model(prompt).logits
    return Part(PARTS[1], [*map(float, words[-1]), *numbers(logits)], seconds)


def main(backend: str) -> Iterator[Part]:
    with joined(backend):
        yield train()
        yield generate()


if __name__ == "__main__":
    tell(main)
