"""The paper's two nets and two small ones for digits, with any normalizer where the paper places it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .lstm import LSTM
from .norms import Norm


def lenet(norm: Norm) -> nn.Module:
    """Return the paper's CNN: LeNet-5 on ``(N, 3, 32, 32)`` with a normalizer in each hidden layer."""
    net = nn.Sequential(
        nn.Conv2d(3, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), norm(6, 1),
        nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), norm(16, 1),
        nn.Flatten(),
        nn.Linear(16 * 6 * 6, 120), nn.Tanh(), norm(120, 1),
        nn.Linear(120, 84), nn.Tanh(), norm(84, 1),
        nn.Linear(84, 10),
    )  # fmt: skip
    return _initialized(net)


def sentiment(norm: Norm, words: int = 20_000, features: int = 512) -> nn.Module:
    """Return the paper's RNN: two LSTMs on tokens ``(N, 80)``, with one logit."""
    net = nn.Sequential(
        Words(words, features),
        LSTM(features, 128, dropout=0.2), norm(128, -1),
        LSTM(128, 64, dropout=0.2, last=True), norm(64, 1),
        nn.Linear(64, 32), nn.Tanh(), norm(32, 1),
        nn.Linear(32, 1), nn.Flatten(0),
    )  # fmt: skip
    return _initialized(net)


def digits_cnn(norm: Norm) -> nn.Module:
    """Return a LeNet for ``(N, 1, 8, 8)``."""
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), norm(6, 1),
        nn.Conv2d(6, 16, 3), nn.Tanh(), norm(16, 1),
        nn.Flatten(),
        nn.Linear(64, 48), nn.Tanh(), norm(48, 1),
        nn.Linear(48, 10),
    )  # fmt: skip
    return _initialized(net)


def digits_rnn(norm: Norm) -> nn.Module:
    """Return an LSTM that reads ``(N, 1, 8, 8)`` row by row."""
    net = nn.Sequential(
        nn.Flatten(1, 2),
        LSTM(8, 32), norm(32, -1),
        LSTM(32, 32, last=True), norm(32, 1),
        nn.Linear(32, 10),
    )  # fmt: skip
    return _initialized(net)


class Words(nn.Embedding):
    """An embedding that reuses its dense gradient, and clears only the rows of the last mini-batch.

    A step reads a few of its many rows. On a CPU, filling the whole gradient with zeros takes longer than the
    optimizer. On a GPU it does not, and the gradient is torch's own.
    """

    def __init__(self, words: int, features: int) -> None:
        super().__init__(words, features)
        self._gradient: Tensor | None = None
        self._rows: Tensor | None = None
        self.weight.register_post_accumulate_grad_hook(self._make_dense)  # type: ignore[no-untyped-call]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens."""
        return F.embedding(tokens, self.weight, sparse=not tokens.is_cuda)

    def _make_dense(self, weight: Tensor) -> None:
        """Replace a sparse gradient by a dense one."""
        sparse = weight.grad
        if sparse is None or not sparse.is_sparse:
            return
        if self._gradient is None or self._gradient.device != weight.device:
            self._gradient, self._rows = torch.zeros_like(weight), None
        if self._rows is not None:
            self._gradient.index_fill_(0, self._rows, 0)
        self._rows = sparse._indices()[0]
        self._gradient.index_add_(0, self._rows, sparse._values())
        weight.grad = self._gradient

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_gradient": None, "_rows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight.register_post_accumulate_grad_hook(self._make_dense)  # type: ignore[no-untyped-call]


def _initialized(net: nn.Sequential) -> nn.Sequential:
    """Initialize dense weights orthogonal, convolutions and embeddings Glorot uniform, biases zero."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
        elif isinstance(module, nn.Conv2d | nn.Embedding):
            nn.init.xavier_uniform_(module.weight)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return net
