"""A user's program, checked by mypy --strict and pyright against the installed package, and run."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import bln


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3)
        self.norm = bln.BatchLayerNorm(8, per_position=False, dim_scale=False, momentum=None, config="TTFF")
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.norm(torch.tanh(self.conv(x)), mask)
        logits: Tensor = self.head(hidden.mean(-1))
        return logits


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    return (outputs.argmax(-1) == targets).float().mean().item()


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(6, 3, 9), torch.randint(2, (6,))) for _ in range(3)]


net = Net()
train, validation = batches(), batches()
x: Tensor
y: Tensor
for x, y in bln.callbacks.reset_each_epoch(net, train):
    torch.autograd.backward(nn.functional.cross_entropy(net(x), y))  # Tensor.backward itself has no types

layers: dict[str, bln.BatchLayerNorm] = bln.layers(net)
config: bln.StatisticsConfig = net.norm.config
every: Iterator[bln.StatisticsConfig] = bln.StatisticsConfig.all()
net.norm.config = bln.StatisticsConfig.parse("FTFF")
bln.configure(net, dict.fromkeys(layers, "TTFF"))
bln.calibrate(net, train, progress=False)

result: bln.SearchResult = bln.search(
    net, validation, loss=nn.functional.cross_entropy, metrics={"accuracy": accuracy}, calibrate=train, progress=False
)
result.apply(net)
best: str = result.best.label
loss: float = result.best.loss

plain: Tensor = bln.functional.batch_layer_norm(torch.randn(4, 8))
both: tuple[Tensor, bln.Statistics] = bln.functional.batch_layer_norm(torch.randn(4, 8), return_statistics=True)
converted: nn.Module = bln.convert(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
inserted: nn.Module = bln.insert(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3))

bln.configure(net, "TTTT")
copied: nn.Module = bln.freeze(copy.deepcopy(net))
frozen, report = bln.freeze(net, train[0][0], report=True)
kept: dict[str, str] = report.kept
affine: bln.Affine = bln.Affine(torch.ones(4), torch.zeros(4), channel_dim=1)
print(best, loss, report)
