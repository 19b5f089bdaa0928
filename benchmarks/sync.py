"""Measure the cost of synchronized statistics: forward plus backward of the layer on several ranks.

    python benchmarks/sync.py [--ranks 2] [--device cpu|cuda] [--seconds 8] [--markdown FILE]

There are two baselines, both the layer without synchronization plus collectives of the same size: a gather after
forward and a sum after backward. ``bare`` throws their results away; ``by hand`` packs statistics into the message and
combines the results, as any synchronization must. ``SyncBatchNorm`` does not run on a CPU (gloo). On GPUs (NCCL, or
gloo where ranks share one) it is measured too, and ``cost`` is the time that synchronization adds to BLN over the time
it adds to ``BatchNorm``. Figures are medians in milliseconds. Variants take turns in random order, the same on all
ranks, so that drift of the machine affects all alike.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import bln
from bln.formula import combine

SHAPES = [  # this rank's input, channel_dim, per_position
    ((32, 16, 32, 32), 1, False),
    ((32, 64, 28, 28), 1, False),
    ((64, 28, 28, 64), -1, False),
    ((32, 80, 128), -1, True),
    ((32, 64, 28, 28), 1, True),
    ((64, 28, 28, 64), -1, True),
    ((256, 512), 1, True),
]

Step = Callable[[Tensor, Tensor], object]
gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def stepper(function: Callable[[Tensor], Tensor], parameters: list[Tensor]) -> Step:
    def step(x: Tensor, dy: Tensor) -> object:
        return torch.autograd.grad(function(x), [x, *parameters], dy)

    return step


def bare(layer: bln.BatchLayerNorm, shape: tuple[int, ...]) -> Step:
    """Return the step of a layer alone plus a synchronized one's collectives, whose results are thrown away."""
    features, device = layer.num_features, layer.weight.device
    positions = torch.Size(shape[1:]).numel() // features if layer.per_position else 1
    message = torch.randn(positions * (2 * features + (3 if layer.per_position else 4)), device=device)
    gathered = torch.empty(dist.get_world_size() * len(message), device=device)
    gradients = torch.randn(positions * 2 * features, device=device)

    def step(x: Tensor, dy: Tensor) -> None:
        y = layer(x)
        gather(gathered, message)
        torch.autograd.grad(y, [x, *layer.parameters()], dy)
        dist.all_reduce(gradients)

    return step


def by_hand(layer: bln.BatchLayerNorm, shape: tuple[int, ...]) -> Step:
    """Return the step of ``bare`` with messages packed from the population's statistics, and combined."""
    features, world, kept = layer.num_features, dist.get_world_size(), layer.population

    def step(x: Tensor, dy: Tensor) -> None:
        y = layer(x)
        sums = [kept.feature_var, *[torch.full_like(kept.feature_var, len(x))] * (1 if layer.per_position else 2)]
        message = torch.cat([kept.batch_mean, kept.batch_var * len(x), torch.stack(sums, -1)], -1)
        gathered = message.new_empty(world * message.numel())
        gather(gathered, message.view(-1))
        means, squares, sums = gathered.view(world, *message.shape).split([features, features, len(sums)], -1)
        mean, var = combine(sums[..., 1:2], means, squares)
        torch.autograd.grad(y, [x, *layer.parameters()], dy)
        dist.all_reduce(torch.stack([mean, var]))

    return step


def variants(shape: tuple[int, ...], channel_dim: int, per_position: bool, device: torch.device) -> dict[str, Step]:
    d = shape[channel_dim]
    options = {"channel_dim": channel_dim, "per_position": per_position, "device": device}
    alone, together = bln.BatchLayerNorm(d, **options), bln.BatchLayerNorm(d, process_group="world", **options)
    found = {
        "alone": stepper(alone, list(alone.parameters())),
        "bare": bare(alone, shape),
        "by hand": by_hand(alone, shape),
        "synchronized": stepper(together, list(together.parameters())),
    }
    if device.type == "cuda":
        norms = {"BatchNorm": nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d, "SyncBatchNorm": nn.SyncBatchNorm}
        for name, kind in norms.items():
            norm = kind(d, device=device)

            def seconds(x: Tensor, norm: nn.Module = norm) -> Tensor:  # features last is torch's channels last
                return norm(x.movedim(channel_dim, 1)).movedim(1, channel_dim)

            found[name] = stepper(seconds, list(norm.parameters()))
    return found


def measure(
    shape: tuple[int, ...], channel_dim: int, per_position: bool, device: torch.device, seconds: float
) -> dict[str, float]:
    """Return the median milliseconds of each variant on this rank."""
    steps = variants(shape, channel_dim, per_position, device)
    x, dy = torch.randn(shape, device=device, requires_grad=True), torch.randn(shape, device=device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, again = random.Random(0), torch.ones((), device=device)
    start = time.perf_counter()
    while again:
        for name, step in order.sample(sorted(steps.items()), len(steps)):
            dist.barrier()  # otherwise one rank's wait for another counts
            before = time.perf_counter()
            step(x, dy)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[name].append(time.perf_counter() - before)
        again.fill_(time.perf_counter() - start < seconds or len(times["alone"]) < 10)
        dist.broadcast(again, 0)
    return {name: 1e3 * statistics.median(values[2:]) for name, values in times.items()}


def work(rank: int, arguments: argparse.Namespace, meet: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    backend = "gloo"
    if arguments.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = "nccl" if torch.cuda.device_count() >= arguments.ranks else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=arguments.ranks)
    names, ratios = ["alone", "bare", "by hand", "synchronized"], ["of bare", "of by hand"]
    if device.type == "cuda":
        names, ratios = [*names, "BatchNorm", "SyncBatchNorm"], [*ratios, "cost"]
    lines = [
        "| shape of a rank | statistics | " + " | ".join([*(f"{name}, ms" for name in names), *ratios]) + " |",
        "|---|---|" + "---|" * (len(names) + len(ratios)),
    ]
    if rank == 0:
        print(
            f"torch {torch.__version__}, {arguments.ranks} ranks, {backend}, {arguments.device}, forward plus backward"
        )
        print("of bare, of by hand: synchronized over it; cost: (synchronized - alone) / (SyncBatchNorm - BatchNorm)")
        print("\n".join(lines), flush=True)
    for shape, channel_dim, per_position in SHAPES:
        found = measure(shape, channel_dim, per_position, device, arguments.seconds)
        kind = "per position" if per_position else "pooled"
        numbers = [f"{found[name]:.3f}" for name in names]
        numbers += [f"{found['synchronized'] / found[base]:.2f}" for base in ("bare", "by hand")]
        if device.type == "cuda":
            added = found["synchronized"] - found["alone"], found["SyncBatchNorm"] - found["BatchNorm"]
            numbers.append(f"{added[0] / added[1]:.2f}")
        lines.append(f"| {', '.join(map(str, shape))} | {kind} | {' | '.join(numbers)} |")
        if rank == 0:
            print(lines[-1], flush=True)
    if rank == 0 and arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts at its end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each shape")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (arguments, str(Path(folder) / "meet")), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
