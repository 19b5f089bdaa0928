"""What the tests have ranks do together. Data is drawn with one seed on all ranks; each takes its part of it."""

from __future__ import annotations

import copy
import pickle
import time
import warnings
from functools import partial
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from ranks import TIMEOUT
from torch import nn
from torch.nn import functional as F

import bln
import oracle
import tolerance
from bln import _backends

DEVICE = "cpu"
"""Where tensors are; set by the rank."""
FORMS = ({}, {"per_position": False}, {"groups": 3}, {"groups": 1, "per_position": True})
"""Options of layers of three features."""


def total(tensor: torch.Tensor) -> torch.Tensor:
    """Summed over ranks."""
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor)
    return tensor


def assert_population(layer, expected: oracle.Population, size: float, roundings: float) -> None:
    """Statistics as the oracle's, to roundings of the input's size; counters exactly."""
    unit = roundings * torch.finfo(layer.population.batch_mean.dtype).eps
    bounds = {"batch_var": unit * (size**2 + 1), "feature_var": unit * (size**2 + 1), "inverse_m": unit}
    for name, theirs in oracle.NAMES.items():
        tolerance.close(getattr(layer.population, name), getattr(expected, theirs), bounds.get(name, unit * size), name)
    for row, name in enumerate(oracle.NAMES):
        updates, samples = ("var_updates", "var_samples") if name == "batch_var" else ("updates", "samples")
        if layer.groups is not None and name.startswith("feature"):
            updates, samples = "group_updates", "group_samples"
        assert (layer.population.updates[row].cpu().numpy() == getattr(expected, updates)).all(), f"updates of {name}"
        assert (layer.population.samples[row].cpu().numpy() == getattr(expected, samples)).all(), f"samples of {name}"


def against_the_oracle(
    seed: int,
    shares: list[list[int]],
    dtype: str,
    positions: list[int],
    channel_dim: int,
    per_position: bool,
    masked: bool,
    momentum: float | None,
    compiled: str = "",
    affine: bool = True,
    only: int | None = None,
    shared: bool = False,
    groups: int | None = None,
) -> None:
    """Mini-batches of unequal parts: outputs, gradients and population are those of one process with all samples.

    With ``only`` that rank alone is masked; with ``shared`` several programs of a kernel share its work.
    """
    if shared:
        from bln._backends.triton import table

        few = {name: row._replace(values=16, per_thread=1, min_samples=2) for name, row in table.PUBLISHED.items()}
        with mock.patch.object(table, "PUBLISHED", few):
            against_the_oracle(
                seed, shares, dtype, positions, channel_dim, per_position, masked, momentum, compiled, affine, only,
                groups=groups,
            )  # fmt: skip
        return
    torch.manual_seed(seed)
    kind, d = getattr(torch, dtype), 6
    wide = torch.promote_types(kind, torch.float32)
    layer = bln.BatchLayerNorm(
        d, groups=groups, channel_dim=channel_dim, per_position=per_position, momentum=momentum, affine=affine,
        process_group="world", dtype=wide, device=DEVICE,
    )  # fmt: skip
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    gamma, beta = (p.detach().double().cpu().numpy() for p in layer.parameters()) if affine else (1.0, 0.0)
    run = torch.compile(layer, fullgraph=True, backend=compiled) if compiled else layer
    options = {"eps": 1e-4, "mix_eps": layer.mix_eps, "dim_scale": layer.dim_scale, "groups": groups}
    expected = oracle.Population(tuple(positions) if per_position else (), d, groups)
    largest = 1.0
    for parts in shares:
        shape = [sum(parts), *positions]
        mask = (torch.rand(shape) < 0.6) if masked else None
        if masked:
            mask.view(-1)[0] = True
            if only is not None:
                mask[: sum(parts[:only])] = mask[sum(parts[: only + 1]) :] = True
        shape.insert(channel_dim if channel_dim > 0 else len(shape), d)
        x = (torch.randn(shape, dtype=torch.float64) * 2 + 3).to(kind)
        if masked:
            x = torch.where(mask.unsqueeze(channel_dim), x, float("nan"))
        dy = torch.randn(shape, dtype=torch.float64).to(kind)

        own = slice(sum(parts[: dist.get_rank()]), sum(parts[: dist.get_rank() + 1]))
        mine = x[own].clone().to(DEVICE).requires_grad_()
        layer.zero_grad()
        y = run(mine, *([mask[own].to(DEVICE)] if masked and only in (None, dist.get_rank()) else []))
        assert y.dtype == kind
        assert y.shape == mine.shape
        y.backward(dy[own].to(DEVICE))

        rows, rows_dy = (t.movedim(channel_dim, -1).double().numpy() for t in (x, dy))
        real = None if mask is None else mask.numpy()
        clean = rows if mask is None else np.where(real[..., None], rows, 0.0)
        largest = max(largest, np.abs(clean).max())
        s = oracle.measure(rows, real, per_position, groups)
        spread = s.var_B, s.var_F, 1 / np.maximum(s.m, 1)
        wanted = oracle.train(rows, gamma, beta, mask=real, per_position=per_position, **options)
        dx, dgamma, dbeta = oracle.train_backward(rows, rows_dy, gamma, mask=real, per_position=per_position, **options)
        bound = tolerance.output(rows, wanted, *spread, gamma, beta, kind, **options)
        if len(mine):
            tolerance.close(y.movedim(channel_dim, -1), wanted[own], bound[own], "y")
        for_x, for_gamma, for_beta = tolerance.gradient(rows, dx, rows_dy, *spread, gamma, kind, **options)
        if len(mine):
            tolerance.close(mine.grad.movedim(channel_dim, -1), dx[own], for_x[own], "dx")
        if affine:
            tolerance.close(total(layer.weight.grad), dgamma, for_gamma, "dgamma")
            tolerance.close(total(layer.bias.grad), dbeta, for_beta, "dbeta")
        expected.update(clean, momentum, real, per_position)
    assert_population(layer, expected, largest, tolerance.ROUNDINGS)


def activated(seed: int, masked: bool, options: dict) -> None:
    """Statistics are those of all ranks; the residual and what follows are a rank's own."""
    torch.manual_seed(seed)
    layer = bln.BatchLayerNorm(
        3, activation="silu", process_group="world", dtype=torch.float64, device=DEVICE, **options
    )  # fmt: skip
    alone = copy.deepcopy(layer)
    alone.process_group = None
    rank, world = dist.get_rank(), dist.get_world_size()
    first = rank * (rank + 1) // 2  # the rank has one sample more than the one before
    own, n = slice(first, first + rank + 1), world * (world + 1) // 2
    x, residual, dy = (torch.randn(n, 3, 4, dtype=torch.float64).to(DEVICE) for _ in range(3))
    mask = (torch.rand(n, 4) < 0.6).to(DEVICE) if masked else None
    if mask is not None:
        mask[:, 0] = True
        residual = torch.where(mask[:, None], residual, torch.nan)
    found = []
    for one, at in ((alone, slice(None)), (layer, own)):
        inputs = [t[at].clone().requires_grad_() for t in (x, residual)]
        y = one(inputs[0], None if mask is None else mask[at], inputs[1])
        y.backward(dy[at])
        found.append([y, *(t.grad for t in inputs)])
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs[own], rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(layer.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(total(mine.grad), theirs.grad, rtol=1e-10, atol=1e-10)


def said(call) -> str:
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- what one rank does to the others


def empty_everywhere(options: dict) -> None:
    """No rank has a sample: nothing is learned, and backward passes."""
    layer = bln.BatchLayerNorm(3, process_group="world", device=DEVICE, **options)
    before = copy.deepcopy(layer.state_dict())
    x = torch.empty(0, 3, 4, requires_grad=True, device=DEVICE)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(layer.weight.grad.cpu(), torch.zeros(3))
    assert torch.equal(layer.bias.grad.cpu(), torch.zeros(3))
    layer(torch.ones(2, 3, 4, device=DEVICE), torch.zeros(2, 4, dtype=torch.bool, device=DEVICE))
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name].expand_as(value) if value.dim() < 2 else torch.zeros_like(value)) or (
            name.endswith("_var") and (value == 1).all()
        ), name


def not_finite_on_one_rank(value: float, options: dict) -> None:
    layer = bln.BatchLayerNorm(3, process_group="world", device=DEVICE, **options)
    layer(torch.randn(4, 3, 4, device=DEVICE))
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(4, 3, 4, device=DEVICE)
    if dist.get_rank() == 0:
        x[1, 2, 3] = value
    y = layer(x)
    assert not y[:, 2, 3].isfinite().all()
    assert all(torch.equal(after, before[name]) for name, after in layer.state_dict().items())
    layer(torch.randn(4, 3, 4, device=DEVICE))
    assert layer.population.updates.unique().tolist() == [2]


def sequences_of_different_lengths(seed: int, dtype: str, groups: int | None = None) -> None:
    """Each rank pads to its own longest: the joined mini-batch is one padded to the longest of all, masked."""
    torch.manual_seed(seed)
    kind = getattr(torch, dtype)
    bound = {"rtol": 1e-9, "atol": 1e-9} if kind == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    longest, lengths = 7, [7, 4, 2][: dist.get_world_size()]
    d = 6
    layer = bln.BatchLayerNorm(
        d, groups=groups, channel_dim=-1, per_position=True, position_shape=longest, process_group="world", dtype=kind,
        device=DEVICE,
    )  # fmt: skip
    options = {"mix_eps": layer.mix_eps, "dim_scale": layer.dim_scale, "groups": groups}
    x, dy = torch.randn(2, 3 * len(lengths), longest, d, dtype=kind).unbind()
    mask = torch.zeros(len(x), longest, dtype=torch.bool)
    for rank, length in enumerate(lengths):
        mask[3 * rank : 3 * rank + 3, :length] = True
    mine = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3), slice(lengths[dist.get_rank()])
    own = x[mine].clone().to(DEVICE).requires_grad_()
    y = layer(own)
    y.backward(dy[mine].to(DEVICE))
    x, dy = x.double(), dy.double()
    wanted = oracle.train(x.numpy(), mask=mask.numpy(), **options)
    dx, dgamma, _ = oracle.train_backward(x.numpy(), dy.numpy(), mask=mask.numpy(), **options)
    torch.testing.assert_close(y.cpu().double(), torch.tensor(wanted)[mine], **bound)
    torch.testing.assert_close(own.grad.cpu().double(), torch.tensor(dx)[mine], **bound)
    torch.testing.assert_close(total(layer.weight.grad).cpu().double(), torch.tensor(dgamma), **bound)
    expected = oracle.Population((longest,), d, groups)
    expected.update(np.where(mask[..., None], x, 0.0), 0.1, mask.numpy())
    assert_population(layer, expected, 4.0, 64)


def changed_in_place() -> None:
    """As a ReLU behind, or a residual sum, may do."""
    for channel_dim, shape in ((1, (4, 3, 2)), (-1, (4, 2, 3)), (1, (4, 3))):
        for options in FORMS:
            layer = bln.BatchLayerNorm(3, channel_dim=channel_dim, process_group="world", device=DEVICE, **options)
            x = torch.randn(shape, requires_grad=True, device=DEVICE)
            layer(x).add_(x).relu_().sum().backward()
            changed, x.grad = x.grad, None
            (layer(x) + x).relu().sum().backward()
            torch.testing.assert_close(changed, x.grad)


def eval_is_local(config: str, options: dict) -> None:
    """Only rank 0 runs the layer in eval(): it would wait for ever if that took the others."""
    layer = bln.BatchLayerNorm(3, process_group="world", config=config, device=DEVICE, **options)
    layer(torch.randn(4, 3, device=DEVICE))
    layer.eval()
    if dist.get_rank() == 0:
        alone = copy.deepcopy(layer)
        alone.process_group = None
        x = torch.randn(4, 3, device=DEVICE)
        assert torch.equal(layer(x), alone(x))


def sequences_of_unknown_lengths() -> str:
    layer = bln.BatchLayerNorm(5, channel_dim=-1, process_group="world", device=DEVICE)
    before = copy.deepcopy(layer.state_dict())
    text = said(lambda: layer(torch.randn(3, 7 - dist.get_rank(), 5, device=DEVICE)))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    return text


def positions_known_otherwise() -> list[str]:
    """One rank was told, or loaded, other positions than the others have."""
    found = []
    for first, others in ((4, 5), ((4, 4), (2, 8)), (6, None)):
        layer = bln.BatchLayerNorm(5, position_shape=first if dist.get_rank() == 0 else others, process_group="world")
        positions = layer.population.position_shape or (3,)
        found.append(said(lambda layer=layer, positions=positions: layer(torch.randn(3, 5, *positions))))
    loaded = bln.BatchLayerNorm(5, position_shape=6 if dist.get_rank() == 0 else None, process_group="world")
    loaded(torch.randn(3, 5, 6))
    assert loaded.population.position_shape == (6,)
    assert loaded.population.samples[0].tolist() == [3 * dist.get_world_size()] * 6
    return found


def ranks_of_different_types(masked: bool, options: dict) -> None:
    """Messages have the layer's type, whatever a rank puts in: all learn the same."""
    kinds = [torch.float32, torch.float64, torch.bfloat16]
    for dtype in (torch.float32, torch.float64):
        layer = bln.BatchLayerNorm(3, process_group="world", dtype=dtype, device=DEVICE, **options)
        torch.manual_seed(0)
        x, dy = torch.randn(2, 4 * dist.get_world_size(), 3, 2, device=DEVICE).bfloat16().unbind()  # exact in all types
        alone = bln.BatchLayerNorm(3, dtype=dtype, device=DEVICE, **options)
        mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        own = x[mine].to(kinds[dist.get_rank()]).requires_grad_()
        y = layer(own, torch.ones(4, 2, dtype=torch.bool, device=DEVICE) if masked else None)
        assert y.dtype == own.dtype
        whole = x.to(torch.float64).requires_grad_()
        expected = alone(whole)
        expected.backward(dy.double())
        y.backward(dy[mine].to(y.dtype))
        bound = {"rtol": 0.02, "atol": 0.02} if own.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(y.double(), expected[mine], **bound)
        torch.testing.assert_close(own.grad.double(), whole.grad[mine], **bound)
        torch.testing.assert_close(layer.population.batch_var, alone.population.batch_var)


def collectives_are_one_each_way(masked: bool, per_position: bool, groups: int | None = None) -> None:
    """And they carry what the docs say: numbers for each position, and for each group."""
    c, p = 3, 2
    layer = bln.BatchLayerNorm(c, groups=groups, process_group="world", per_position=per_position, device=DEVICE)
    mask = torch.ones(4, p, dtype=torch.bool, device=DEVICE) if masked else None
    calls: list[tuple[str, int]] = []
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    kept = {name: getattr(dist, name) for name in (gather, "all_reduce", "all_gather", "broadcast", "barrier")}

    def counted(name):
        return lambda *args, **kwargs: (calls.append((name, args[-1].numel())), kept[name](*args, **kwargs))[1]

    try:
        layer(torch.randn(4, c, p, device=DEVICE))  # ranks agree on positions first, once
        for name in kept:
            setattr(dist, name, counted(name))
        y = layer(torch.randn(4, c, p, requires_grad=True, device=DEVICE), mask)
        at = p if per_position else 1
        sent = [(gather, at * (2 * c + 1) + (2 * at + (not per_position) if groups is None else 2 * groups + 1))]
        assert calls == sent, calls
        y.sum().backward()
        assert calls == [*sent, ("all_reduce", 2 * c * at)], calls
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def channels_last() -> None:
    """Output and gradient lie as the input does, and are those of one process."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 7, 3, 4, 5, dtype=torch.float64, device=DEVICE).unbind()
    for options in FORMS:
        alone = bln.BatchLayerNorm(3, dtype=torch.float64, device=DEVICE, **options)
        layer = copy.deepcopy(alone)
        layer.process_group = "world"
        whole = x.clone().requires_grad_()
        y = alone(whole)
        y.backward(dy)
        mine = split(x).contiguous(memory_format=torch.channels_last).requires_grad_()
        ours = layer(mine)
        ours.backward(split(dy))
        assert ours.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(ours, split(y))
        torch.testing.assert_close(mine.grad, split(whole.grad))


def a_group_of_some_ranks(seed: int) -> None:
    """Ranks 0 and 1 of three: the layer takes the group, copies share it, and the third rank is left out."""
    group = dist.new_group([0, 1])
    torch.manual_seed(seed)
    x = torch.randn(6, 3, device=DEVICE)
    if dist.get_rank() == 2:
        assert "no member" in said(lambda: bln.BatchLayerNorm(3, process_group=group))
        return
    layer = bln.BatchLayerNorm(3, process_group=group, device=DEVICE)
    assert layer.process_group is group
    assert "process_group=<2 ranks>" in repr(layer)
    clone = copy.deepcopy(layer)
    assert clone.process_group is group
    alone = bln.BatchLayerNorm(3, device=DEVICE)
    mine = slice(0, 2) if dist.get_rank() == 0 else slice(2, 6)
    torch.testing.assert_close(clone(x[mine]), alone(x)[mine], atol=1e-5, rtol=1e-5)
    assert "state_dict" in said(lambda: pickle.dumps(layer))
    alone.load_state_dict(layer.state_dict())
    world = bln.BatchLayerNorm(3, process_group=dist.group.WORLD)
    assert world.process_group == pickle.loads(pickle.dumps(world)).process_group == "world"


# ---- on a GPU


def exchanged(layer: bln.BatchLayerNorm, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The layer on a group of one, which it would not ask otherwise."""
    call = x, layer.weight, layer.bias, mask, 1, layer.spec, layer.population, layer.momentum
    return _backends.train(*call, group=dist.group.WORLD)[0]


def through_nccl(dtype: str, per_position: bool, masked: bool, groups: int | None = None) -> None:
    """What the layer does alone, and no operation waits for the GPU."""
    kind = getattr(torch, dtype)
    wide = torch.promote_types(kind, torch.float32)
    layer = bln.BatchLayerNorm(6, groups=groups, per_position=per_position, dtype=wide, device=DEVICE)
    alone = copy.deepcopy(layer)
    bound = 64 * torch.finfo(kind).eps
    for _ in range(3):
        x, dy = torch.randn(2, 6, 6, 3, 2, dtype=kind, device=DEVICE).unbind()
        mask = torch.rand(6, 3, 2, device=DEVICE) < 0.7 if masked else None
        found = []
        for run in (partial(exchanged, layer), alone):
            own = x.clone().requires_grad_()
            learned = layer.population.position_shape is not None  # ranks agree on positions first, once
            torch.cuda.set_sync_debug_mode("error" if run is not alone and learned else 0)
            try:
                y = run(own, mask)
                found.append(
                    (y, *torch.autograd.grad(y, [own, *(layer if run is not alone else alone).parameters()], dy))
                )
            finally:
                torch.cuda.set_sync_debug_mode(0)
        torch.testing.assert_close(*found, rtol=bound, atol=16 * bound)
    for (name, ours), theirs in zip(layer.named_buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


def without_gradient_of_the_input() -> None:
    """A first layer: parameters still learn, and nothing has to be sent for it."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 5, 3, 2, device=DEVICE).unbind()
    for options in FORMS:
        alone = bln.BatchLayerNorm(3, device=DEVICE, **options)
        layer = copy.deepcopy(alone)
        layer.process_group = "world"
        alone(x).backward(dy)
        layer(split(x)).backward(split(dy))
        for ours, theirs in zip(layer.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(total(ours.grad), theirs.grad)


def captured_with_nccl() -> None:
    layer = bln.BatchLayerNorm(5, position_shape=4, device=DEVICE)
    alone = copy.deepcopy(layer)
    x = torch.randn(6, 5, 4, device=DEVICE, requires_grad=True)

    def step() -> list[torch.Tensor]:
        y = exchanged(layer, x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    layer.reset_statistics()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
        found = step()
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        own = x.detach().requires_grad_()  # x belongs to the stream it was first used on
        y = alone(own)
        expected = [y, *torch.autograd.grad(y.square().sum(), [own, *alone.parameters()])]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(layer.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def merged_through_nccl() -> None:
    """Messages must lie on the GPU, whatever they are about."""
    from bln._distributed import ranks as over_ranks

    model = trained(0)
    together = over_ranks.Ranks("world", model)
    assert together.gather(torch.tensor([3, 5], device=DEVICE)).tolist() == [3, 5]
    bln.average_statistics(model)
    bln.calibrate(model, shares(0)[0], process_group="world", progress=False)
    bln.search(model, shares(0)[0], loss=F.cross_entropy, process_group="world", progress=False)


# ---- whole nets


def net(grouped: bool = False, **kwargs) -> nn.Sequential:
    """A layer for each position and a pooled one, in the published form or with groups."""
    first, second = ({"groups": 3}, {"groups": 2}) if grouped else ({}, {})
    return nn.Sequential(
        nn.Conv1d(3, 6, 3, padding=1), nn.ReLU(), bln.BatchLayerNorm(6, per_position=True, **first, **kwargs),
        nn.Conv1d(6, 4, 3), nn.Tanh(), bln.BatchLayerNorm(4, per_position=False, **second, **kwargs), nn.Flatten(),
        nn.Linear(4 * 6, 2),
    )  # fmt: skip


def split(x: torch.Tensor, empty: bool = False) -> torch.Tensor:
    """This rank's samples: unequal parts, the last rank's empty if asked for."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ends = [0, *(len(x) * (at + 1) // (world + 1) for at in range(world - 1)), len(x)]
    if empty:
        ends = [0, *[len(x)] * world]
    return x[ends[rank] : ends[rank + 1]]


def net_against_one_process(
    seed: int, how: str, empty: bool = False, dtype: str = "float64", grouped: bool = False
) -> None:
    """A net trained a few steps by all ranks has the weights and statistics of one process with all samples."""
    torch.manual_seed(seed)
    kind = getattr(torch, dtype)
    bound = {"rtol": 1e-7, "atol": 1e-9} if kind == torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
    single = net(grouped).to(DEVICE, kind)
    several = copy.deepcopy(single)
    bln.convert(several, process_group="world")
    assert all(layer.process_group == "world" for layer in bln.layers(several).values())
    run, world = several, dist.get_world_size()
    if how in ("ddp", "no_sync", "ddp compiled"):
        run = nn.parallel.DistributedDataParallel(several)
    if how == "ddp compiled":
        run = torch.compile(run, backend="aot_eager")
    if how == "compiled":
        run = torch.compile(several, fullgraph=True, backend="aot_eager")
    if how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(DEVICE, (world,))
        for module in several:
            if list(module.parameters()):
                fully_shard(module, mesh=mesh)
        run = fully_shard(several, mesh=mesh)
    if how == "checkpoint":
        from torch.utils.checkpoint import checkpoint_sequential

        def run(x):
            return checkpoint_sequential(several, 2, x, use_reentrant=False)

    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (single, several)]
    for _ in range(3):
        pieces = torch.randn(2, 7, 3, 8, dtype=kind, device=DEVICE).unbind()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if how == "no_sync":  # two mini-batches, one exchange of gradients
            with run.no_sync():
                run(split(pieces[0], empty)).square().sum().mul(world).backward()
            run(split(pieces[1], empty)).square().sum().mul(world).backward()
            for piece in pieces:
                single(piece).square().sum().backward()
        else:
            # DDP and FSDP average gradients over ranks: a sum over samples is world times that.
            loss = run(split(pieces[0], empty)).square().sum() * world
            loss.backward()
            single(pieces[0]).square().sum().backward()
        if how in ("compiled", "checkpoint"):
            for parameter in several.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        for optimizer in optimizers:
            optimizer.step()
    for (name, theirs), ours in zip(single.named_parameters(), several.parameters(), strict=True):
        full = ours.full_tensor() if how == "fsdp" else ours
        torch.testing.assert_close(full, theirs, **bound, msg=lambda text, name=name: f"{name}: {text}")
    for name, layer in bln.layers(several).items():
        for key, buffer in layer.population.named_buffers():
            assert type(buffer) is torch.Tensor, "statistics are not sharded"
            torch.testing.assert_close(buffer, getattr(bln.layers(single)[name].population, key), **bound)


def sync_batch_norm_hands_over_its_group() -> None:
    group = dist.new_group([0, 1])
    model = nn.Sequential(nn.SyncBatchNorm(3), nn.SyncBatchNorm(3, process_group=group), nn.BatchNorm1d(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bln.convert(model)
    assert model[0].process_group == "world"
    assert model[1].process_group is group
    assert model[2].process_group is None


# ---- statistics over ranks


def averages(seed: int, options: dict) -> None:
    """Unsynchronized layers with plain averages: twice, with training in between, as one process over all."""
    torch.manual_seed(seed)
    d, rank, world = 3, dist.get_rank(), dist.get_world_size()
    layer = bln.BatchLayerNorm(d, momentum=None, dtype=torch.float64, device=DEVICE, **options)
    unused = bln.BatchLayerNorm(3, device=DEVICE, **options)
    only_first = bln.BatchLayerNorm(3, dtype=torch.float64, device=DEVICE, **options)
    model = nn.ModuleList([layer, unused, only_first])
    expected = oracle.Population((4,) if layer.per_position else (), d, layer.groups)
    for _ in range(2):
        for at in range(2 * world):
            # Even numbers of samples for each rank, so that its share of the counters is a whole number.
            x = torch.randn(2 + 2 * (at % world), d, 4, dtype=torch.float64, device=DEVICE)
            if at % world == rank:
                layer(x)
            expected.update(x.movedim(1, -1).cpu().numpy(), None, per_position=layer.per_position)
        bln.average_statistics(model)
        for name, theirs in oracle.NAMES.items():
            bound = 1e-12
            tolerance.close(getattr(layer.population, name), getattr(expected, theirs), bound, name)
        assert (layer.population.samples[0].cpu().numpy() == np.ceil(expected.samples / world)).all()
    assert not unused.population.updates.any()
    x = torch.randn(4, 3, 5, dtype=torch.float64, device=DEVICE)
    if rank == 0:
        only_first(x)
    bln.average_statistics(model, dist.group.WORLD)
    alone = bln.BatchLayerNorm(3, dtype=torch.float64, device=DEVICE, **options)
    alone(x)
    assert only_first.population.position_shape == alone.population.position_shape
    for name in oracle.NAMES:
        torch.testing.assert_close(getattr(only_first.population, name), getattr(alone.population, name))
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):  # counters that grew each time would overflow one day
        bln.average_statistics(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) if not value.is_floating_point() else True, name
        torch.testing.assert_close(value, before[name], rtol=1e-12, atol=1e-12)


def averages_of_different_models() -> list[str]:
    """Of other features, or other groups."""
    others = [(3, None), (4, None)], [(4, 2), (4, 4)], [(4, None), (4, 4)]
    made = [bln.BatchLayerNorm(d, groups=g, device=DEVICE) for d, g in (pair[dist.get_rank() > 0] for pair in others)]
    return [said(lambda layer=layer: bln.average_statistics(nn.ModuleList([layer]))) for layer in made]


def averages_of_different_positions() -> str:
    layer = bln.BatchLayerNorm(3, device=DEVICE)
    layer(torch.randn(4, 3, 5 if dist.get_rank() == 0 else 6, device=DEVICE))
    return said(lambda: bln.average_statistics(layer))


def trained(seed: int, **kwargs) -> nn.Module:
    torch.manual_seed(seed)
    model = net(**kwargs).to(DEVICE)
    bln.configure(model, "FFFF")
    model.train()
    for layer in bln.layers(model).values():
        layer.process_group = None
    for _ in range(3):
        model(torch.randn(6, 3, 8, device=DEVICE))
    for layer in bln.layers(model).values():
        layer.process_group = kwargs.get("process_group")
    return model


def shares(seed: int, number: int = 5) -> tuple[list, list]:
    """All batches, and this rank's: all but the last of the ranks take turns, the last has none."""
    torch.manual_seed(seed)
    batches = [(torch.randn(4 + at, 3, 8), torch.randint(2, (4 + at,))) for at in range(number)]
    workers = max(dist.get_world_size() - 1, 1)
    return batches, [batch for at, batch in enumerate(batches) if at % workers == dist.get_rank()]


def calibrated(seed: int, wrapped: bool, synchronized: bool, grouped: bool) -> None:
    model = trained(seed, grouped=grouped, **({"process_group": "world"} if synchronized else {}))
    alone = trained(seed, grouped=grouped)
    everything, mine = shares(seed)
    run = nn.parallel.DistributedDataParallel(model) if wrapped else model
    bln.calibrate(run, iter(mine), process_group="world", progress=False)
    bln.calibrate(alone, everything, progress=False)
    for name, layer in bln.layers(model).items():
        assert layer.process_group == ("world" if synchronized else None)
        for key, buffer in layer.population.named_buffers():
            theirs = getattr(bln.layers(alone)[name].population, key)
            torch.testing.assert_close(buffer, theirs, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


def searched(seed: int, how: dict) -> list:
    grouped = how.pop("grouped", False)
    model, alone = trained(seed, grouped=grouped), trained(seed, grouped=grouped)
    everything, mine = shares(seed)
    before = copy.deepcopy(model.state_dict())
    train, mine_train = shares(seed + 1, 3)
    extra = {"calibrate": mine_train} if how.pop("calibrate", False) else {}
    options = {"loss": F.cross_entropy, "metrics": "accuracy", "progress": False, **how}
    result = bln.search(model, iter(mine), process_group="world", **options, **extra)
    single = bln.search(alone, everything, **options, **({"calibrate": train} if extra else {}))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert result.samples == single.samples
    assert result.batches == len(everything)
    if not how.get("sampler"):
        for row in result if not how.get("rebatch") else []:
            theirs = single[row.config]
            assert np.isclose(row.loss, theirs.loss, rtol=1e-5), (row.config, row.loss, theirs.loss)
            assert np.isclose(row.loss_error, theirs.loss_error, rtol=1e-4)
            assert np.isclose(row.metrics["accuracy"], theirs.metrics["accuracy"])
            if extra:
                assert np.isclose(row.uncalibrated.loss, theirs.uncalibrated.loss, rtol=1e-5)
    if how.get("per_layer") and not how.get("robust"):
        assert result.lowest.loss <= min(row.loss for row in result if not row.per_layer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*makes a prediction depend|.*was measured to collapse")  # what is best may
        result.apply(model)
    return [[row.label, row.loss, row.loss_error, {k: s.loss for k, s in row.rebatched.items()}] for row in result]


def fails_on_one_rank(what: str, interrupted: bool) -> str:
    model = trained(0)

    def batches():
        yield from shares(0)[0][:2]
        if dist.get_rank() == 0:
            raise KeyboardInterrupt if interrupted else OSError("the disk is gone")

    before = copy.deepcopy(model.state_dict())
    start = time.monotonic()
    if what == "calibrate":
        text = said(lambda: bln.calibrate(model, batches(), process_group="world", progress=False))
    elif what == "search":
        text = said(lambda: bln.search(model, batches(), loss=F.cross_entropy, process_group="world", progress=False))
    else:
        text = said(
            lambda: bln.search(
                model, shares(0)[0], loss=F.cross_entropy, calibrate=batches(), process_group="world", progress=False
            )
        )
    assert time.monotonic() - start < TIMEOUT / 2  # told by the other rank, not by the timeout
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return text


def no_batches_anywhere() -> str:
    return said(lambda: bln.calibrate(net(), [], process_group="world", progress=False))
