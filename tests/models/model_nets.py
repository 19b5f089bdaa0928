import torch
from torch import nn


def warmed(norm, shape):
    """With statistics far from their initial values, and parameters far from theirs."""
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    for _ in range(4):
        norm(torch.randn(shape) * 3 + 2)
    return norm.eval()
