"""Recompute the population statistics of a model under frozen weights (Algorithm 2), or average them over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from .._distributed.ranks import Ranks, merge
from .._progress import track
from .batches import check_batches
from .layers import required_layers, restore, snapshots
from .run import Step, preserved, run_batch, uncompiled, unwrapped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    step: Step | None = None,
    process_group: ProcessGroup | Literal["world"] | None = None,
    progress: bool = True,
) -> None:
    """Recompute the population statistics under frozen weights (Algorithm 2), as plain averages over ``batches``.

    Averages taken during training mix the statistics of many weights; these are of the present weights alone. The
    remembered ``1/m`` stays that of training, if there was any.

    Only the BLN layers run in training mode: dropout stays off, other norms use their running statistics. Modes,
    weights and random state are left as they were, and so are the statistics if anything fails.

    Args:
        model: A model with BLN layers.
        batches: Any iterable of training batches, composed as in training. A tensor is the input; of a tuple or list
            the first element is, the rest are targets; inputs that are themselves a tuple or a dict are unpacked.
        step: How to run the model on other batches, ``step(model, batch)``.
        process_group: Ranks that share the work, ``"world"`` for the default group. Each calls this with any number of
            batches of its own, and all end with the statistics of all batches. Every batch is a mini-batch by itself,
            also for synchronized layers. If one rank fails, all do.
        progress: Show a progress bar, if rich is installed and standard error is a terminal.
    """
    ranks = Ranks(process_group, model)
    with ranks.guard():
        calibrate_on(ranks, model, batches, step, progress)


def calibrate_on(
    ranks: Ranks, model: nn.Module, batches: Iterable[Any], step: Step | None = None, progress: bool = True
) -> None:
    """Calibrate under a guard that is already held."""
    check_batches(batches)
    layers = required_layers(model)
    unique = list(layers.values())
    before, settings = snapshots(unique), [(layer.momentum, layer.process_group) for layer in unique]
    reached: set[nn.Module] = set()
    hooks = [layer.register_forward_hook(lambda layer, *_: reached.add(layer)) for layer in unique]
    step = step or run_batch
    try:
        with preserved(model), uncompiled(), torch.no_grad():
            model.eval()
            for layer in unique:
                layer.train()
                layer.momentum, layer.process_group = None, None
                layer.reset_statistics()
            count = 0
            for batch in track(batches, "calibrate") if progress and ranks.rank == 0 else batches:
                step(unwrapped(model), batch)
                count += 1
            if (count := sum(ranks.exchange(count))) == 0:
                raise ValueError("calibrate got no batches; was the iterable used up before?")
        merge(layers, ranks, share=False)
        on_ranks = ranks.gather(torch.tensor([[layer in reached for layer in unique]])).any(0).tolist()
        for (name, layer), snapshot, was_reached in zip(layers.items(), before, on_ranks, strict=True):
            if not was_reached:
                layer.population.restore(snapshot)
                warnings.warn(f"calibrate: no batch reached layer {name!r}, its statistics stay", stacklevel=3)
            elif not layer.population.updates.any():
                raise ValueError(f"layer {name!r} never had finite statistics in {count} batches; is its input NaN?")
            else:
                layer.population.complete(snapshot)
    except BaseException:
        restore(unique, before)
        raise
    finally:
        for layer, hook, setting in zip(unique, hooks, settings, strict=True):
            layer.momentum, layer.process_group = setting
            hook.remove()


def average_statistics(model: nn.Module, process_group: ProcessGroup | Literal["world"] = "world") -> None:
    """Average the population statistics of unsynchronized layers over ranks, before evaluation.

    Under ``DistributedDataParallel`` each rank learns the statistics of its own samples. Made on all ranks, this call
    gives all of them the averages, weighted by samples; a rank where a layer saw nothing does not count. Wrap the model
    with ``broadcast_buffers=False``, else rank 0's statistics replace all others at every forward.

    Each rank's counters become its share, the total divided by the number of ranks. Training can go on from here, and
    the next call counts no mini-batch twice.

    Args:
        model: A model with BLN layers, the same on all ranks.
        process_group: The ranks; ``"world"`` is the default group. Without ``torch.distributed`` nothing happens.
    """
    ranks = Ranks(process_group, model)
    with ranks.guard():
        merge(required_layers(model), ranks, share=True)
