"""Hugging Face transformers' Trainer. It takes the process group that exists, so the backend is chosen before."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "symcomm")
torch.set_num_threads(1)
torch.manual_seed(0)


class Model(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
        self.post_init()

    def forward(self, x, labels=None):
        predicted = self.net(x)
        return {"loss": (predicted - labels).square().mean(), "logits": predicted}


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print("loss", logs["loss"], flush=True)


settings = TrainingArguments(
    "out",
    use_cpu=True,
    per_device_train_batch_size=16,
    max_steps=20,
    learning_rate=0.01,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
data = [{"x": x, "labels": x.sum(0, keepdim=True)} for x in torch.randn(960, 20)]
Trainer(Model(PretrainedConfig()), settings, train_dataset=data, callbacks=[Print()]).train()
if dist.is_initialized():
    dist.destroy_process_group()
