"""Fine-tune a ResNet of transformers two images at a time, with BatchNorm and with BLN.

    python examples/finetune_resnet.py

Runs offline: weights start random, and images are coloured patterns in noise. The net learns eight patterns at batch 32
with BatchNorm, in place of a pretraining. Then it learns four new ones at batch 2, once as it is and once converted.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import bln

SIZE, NOISE = 16, 2.5


def images(patterns, count, batch_size, generator):
    """Return batches of noisy patterns with their labels."""
    labels = torch.arange(count) % len(patterns)
    labels = labels[torch.randperm(count, generator=generator)]
    pixels = patterns[labels] + NOISE * torch.randn(count, 3, SIZE, SIZE, generator=generator)
    pairs = zip(pixels.split(batch_size), labels.split(batch_size), strict=True)
    return [{"pixel_values": x, "labels": y} for x, y in pairs]


def train(model, batches, rate):
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model, batches):
    model.eval()
    right = sum((model(b["pixel_values"]).logits.argmax(-1) == b["labels"]).sum().item() for b in batches)
    return right / sum(len(b["labels"]) for b in batches)


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    patterns = torch.nn.functional.interpolate(torch.randn(12, 3, 6, 6, generator=generator), SIZE)
    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=8)
    pretrained = ResNetForImageClassification(config)
    train(pretrained, images(patterns[:8], 640, 32, generator), 5e-3)
    pretrained.classifier[-1] = nn.Linear(32, 4)
    pretrained.num_labels = pretrained.config.num_labels = 4

    small = images(patterns[8:], 240, 2, generator)
    test = images(patterns[8:], 400, 50, generator)
    converted = bln.convert(copy.deepcopy(pretrained))
    for model in (pretrained, converted):
        train(model, small, 3e-3)
    bln.calibrate(converted, [batch["pixel_values"] for batch in small])
    for name, model in (("BatchNorm", pretrained), ("BLN", converted)):
        print(f"{name}, fine-tuned at batch 2: test accuracy {accuracy(model, test):.3f}")


if __name__ == "__main__":
    main()
