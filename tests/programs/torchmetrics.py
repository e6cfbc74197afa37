"""torchmetrics: metrics over all ranks, with states of three kinds: sums, extremes, and lists of different lengths."""

from __future__ import annotations

from collections.abc import Iterator

from tests.programs.frame import Part, joined, numbers, tell, timed

VERSION = "1.9.0"
NEEDS = (f"torchmetrics=={VERSION}",)
PARTS = ("sums: accuracy, mean, R2", "a largest and a smallest", "lists: AUROC, Spearman, cat")
CLASSES = 5


def metrics_of(part: str):
    import torchmetrics as tm

    found = {
        PARTS[0]: {"a": tm.Accuracy("multiclass", num_classes=CLASSES), "m": tm.MeanMetric(), "r": tm.R2Score()},
        PARTS[1]: {"most": tm.MaxMetric(), "least": tm.MinMetric()},
        PARTS[2]: {"u": tm.AUROC("multiclass", num_classes=CLASSES), "s": tm.SpearmanCorrCoef(), "c": tm.CatMetric()},
    }
    return found[part]


def update(name: str, metric, scores, wanted) -> None:
    if name in ("a", "u"):
        metric.update(scores, wanted)
    elif name in ("r", "s"):
        metric.update(scores[:, 0], scores[:, 0] + scores[:, 1])
    else:
        metric.update(scores[:, 0])


def measure(part: str, rank: int) -> Part:
    import torch

    metrics = metrics_of(part)

    def step(i: int) -> list[float]:
        draw = torch.Generator().manual_seed(100 * i + rank)
        rows = 20 + 7 * rank  # ranks have different numbers of samples
        scores = torch.randn(rows, CLASSES, generator=draw).softmax(1)
        wanted = torch.randint(CLASSES, (rows,), generator=draw)
        for name, metric in metrics.items():
            update(name, metric, scores, wanted)
        found = [value for metric in metrics.values() for value in numbers(metric.compute())]
        for metric in metrics.values():
            metric.reset()
        return found

    values, seconds = timed(step)
    return Part(part, [value for each in values for value in each], seconds)


def main(backend: str) -> Iterator[Part]:
    import torch.distributed as dist

    with joined(backend):
        for part in PARTS:
            yield measure(part, dist.get_rank())


if __name__ == "__main__":
    tell(main)
