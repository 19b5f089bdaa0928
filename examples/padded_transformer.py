"""Train a transformer with BLN on sequences of different lengths, and show that padding does not count.

    python examples/padded_transformer.py

A sequence has up to 24 tokens; its class is whether the first half of the alphabet has the majority. Two samples of
three are short, so most entries are padding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import bln

TOKENS, LONGEST, WIDTH = 20, 24, 32


class Reader(nn.Module):
    """An encoder that averages over real entries."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(tokens), src_key_padding_mask=~real)
        hidden = hidden.masked_fill(~real[..., None], 0)
        return self.out(hidden.sum(1) / real.sum(1, keepdim=True))


def batches(count, size, generator):
    """Return ``((tokens, mask), classes)``: mini-batches of padded sequences."""
    found = []
    for _ in range(count):
        lengths = torch.randint(3, LONGEST + 1, (size,), generator=generator)
        lengths[: 2 * size // 3] = lengths[: 2 * size // 3].clamp(max=7)
        real = torch.arange(LONGEST) < lengths[:, None]
        tokens = torch.randint(TOKENS, (size, LONGEST), generator=generator)
        votes = ((tokens < TOKENS // 2) & real).sum(1)
        found.append(((tokens, real), (2 * votes > lengths).long()))
    return found


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    net = bln.convert(Reader())  # its layers take the mask that the encoder is called with
    train, test = batches(150, 16, generator), batches(20, 16, generator)
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for (tokens, real), classes in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(tokens, real), classes).backward()
        optimizer.step()
    bln.calibrate(net, train)

    net.eval()
    with torch.no_grad():
        right = sum((net(*inputs).argmax(1) == classes).sum().item() for inputs, classes in test)
        (tokens, real), _ = test[0]
        other = torch.where(real, tokens, torch.randint(TOKENS, tokens.shape))
        moved = (net(tokens, real) - net(other, real)).abs().max().item()
    print(f"other padding moves the answers by {moved:.0e}")
    print(f"padded transformer: test accuracy {right / 320:.3f}")


if __name__ == "__main__":
    main()
