"""Lightning: two epochs under DDPStrategy, with a metric of torchmetrics that is gathered over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from tests.programs.frame import Part, numbers, tell

VERSION = "2.6.6"
NEEDS = (f"lightning=={VERSION}", "torchmetrics==1.9.0")
PARTS = ("DDPStrategy, two epochs", "a metric over the ranks")


def make_model():
    import lightning
    import torch
    import torchmetrics
    from torch import nn

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=5)
            self.losses: list[float] = []

        def training_step(self, batch, _):
            x, wanted = batch
            found = self.net(x)
            loss = nn.functional.cross_entropy(found, wanted)
            self.accuracy.update(found, wanted)
            self.losses.append(self.all_gather(loss.detach()).mean().item())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Model()


def main(backend: str) -> Iterator[Part]:
    import time

    import lightning
    import torch
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(1920, 20)
    loader = DataLoader(TensorDataset(x, x[:, :5].argmax(1)), batch_size=16)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=backend), max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model, begun = make_model(), time.perf_counter()
    trainer.fit(model, loader)
    took = time.perf_counter() - begun
    yield Part(PARTS[0], model.losses + numbers(*model.net.state_dict().values()), took / trainer.global_step)
    yield Part(PARTS[1], [model.accuracy.compute().item()])


if __name__ == "__main__":
    tell(main)
