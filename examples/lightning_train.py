"""PyTorch Lightning: DDPStrategy takes the backend's name."""

import sys
import warnings

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, _):
        x, wanted = batch
        loss = (self.net(x) - wanted).square().mean()
        everyone = self.all_gather(loss.detach())
        if self.global_rank == 0:
            print("loss", everyone.mean().item(), flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(960, 20)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=sys.argv[1] if len(sys.argv) > 1 else "symcomm"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), loader)
