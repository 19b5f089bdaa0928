"""A residual net with synchronized BLN on several processes, on images shaped as CIFAR-10's:

    torchrun --nproc-per-node=2 examples/ddp.py [--steps 60] [--batch 32]

Works on GPUs (NCCL, one for each process) and without (gloo). Batch statistics and m are those of all samples
together, so that two processes with 16 each train as one with 32. The images are random blobs whose colour
and place tell their class: nothing is downloaded. At the end statistics are recalibrated and the best of the 16
configurations is searched for, both shared out over the processes.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import bln

CLASSES = 10


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def residual_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip


def images(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise, with a blob whose place and colour are the class's."""
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    x = 0.5 * torch.randn(samples, 3, 32, 32, generator=generator)
    grid = torch.arange(32)
    for image, label in zip(x, labels.tolist(), strict=True):
        row, column = 8 + 16 * (label % 2), 6 + 5 * (label // 2)
        blob = torch.exp(-((grid[:, None] - row) ** 2 + (grid - column) ** 2) / 20.0)
        image[label % 3] += 2 * blob
    return x, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="samples of all processes together, in a step")
    arguments = parser.parse_args()

    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    torch.set_num_threads(1)

    torch.manual_seed(0)  # the same weights everywhere; DistributedDataParallel would see to it, too
    net = bln.convert(residual_net(), process_group="world").to(device)
    bln.reset_statistics(net)  # a new net's have nothing to keep
    model = DistributedDataParallel(net, device_ids=[device.index] if gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), 0.003)

    generator = torch.Generator().manual_seed(rank)  # different images for each process
    share = arguments.batch // world + (rank < arguments.batch % world)
    start = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        x, labels = images(share, generator)
        # Parts may differ in size: the mean over all samples is the sum of sums, and gradients are averaged.
        loss = F.cross_entropy(model(x.to(device)), labels.to(device), reduction="sum") * world / arguments.batch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f} on rank 0, {time.perf_counter() - start:.1f} s", flush=True)

    m = 1 / next(iter(bln.layers(net).values())).population.inverse_m.item()

    train, validation = ([images(32, generator) for _ in range(2)] for _ in range(2))
    bln.calibrate(net, train, process_group="world", progress=False)
    result = bln.search(
        net, validation, loss=F.cross_entropy, metrics="accuracy", process_group="world", progress=False
    )
    row = result.apply(net)
    if rank == 0:
        print(f"{world} processes trained with m = {m:.0f}")
        print(f"{row.label} has accuracy {row.metrics['accuracy']:.3f} on {result.samples} images of all processes")
    dist.barrier()
    print("done", flush=True)
    os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts at its end


if __name__ == "__main__":
    main()
