"""Find, configure, reset and calibrate the BLN layers of a model; run a model and leave it as it was."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from .._distributed.ranks import Ranks, merge
from .._frameworks import framework
from .._progress import track
from ..config import StatisticsConfig, configure_layers
from ..layer import BatchLayerNorm
from ..population import Snapshot

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Step = Callable[[nn.Module, Any], Any]
Snapshots = Sequence[Snapshot]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def layers(model: nn.Module) -> dict[str, BatchLayerNorm]:
    """The model's BLN layers by name, each once, in the order of ``named_modules``.

    Names are those of the model itself, also where it is compiled or wrapped in ``DistributedDataParallel``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(_no_torch_module(model))
    found = unwrapped(model).named_modules()
    return {name: module for name, module in found if isinstance(module, BatchLayerNorm)}


def configure(model: nn.Module, config: StatisticsConfig | str | Mapping[str, StatisticsConfig | str]) -> None:
    """Choose the statistics ``eval()`` uses: one configuration for all BLN layers, or one for each name.

    Args:
        model: A model with BLN layers.
        config: ``"TTFF"``, a ``StatisticsConfig``, or a mapping from names, as in ``bln.layers``, to such; layers
            that it does not name stay as they are.
    """
    configure_layers(required_layers(model), config)


def reset_statistics(model: nn.Module) -> None:
    """Forget the population statistics of all BLN layers. With ``momentum=None``, call it at each epoch's start."""
    for layer in required_layers(model).values():
        layer.reset_statistics()


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
    found = required_layers(model)
    unique = list(found.values())
    before, settings = snapshots(unique), [(layer.momentum, layer.process_group) for layer in unique]
    reached: set[nn.Module] = set()
    hooks = [layer.register_forward_hook(lambda layer, *_: reached.add(layer)) for layer in unique]
    step = step or run
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
            if (count := sum(ranks.meet(count))) == 0:
                raise ValueError("calibrate got no batches; was the iterable used up before?")
        merge(found, ranks, share=False)
        on_ranks = ranks.gather(torch.tensor([[layer in reached for layer in unique]])).any(0).tolist()
        for (name, layer), snapshot, was_reached in zip(found.items(), before, on_ranks, strict=True):
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


def snapshots(layers: Iterable[BatchLayerNorm]) -> Snapshots:
    """The statistics of layers, for ``restore``."""
    return [layer.population.snapshot() for layer in layers]


def restore(layers: Iterable[BatchLayerNorm], snapshots: Snapshots) -> None:
    """Put statistics back; without any, nothing happens."""
    for layer, snapshot in zip(layers, snapshots, strict=False):
        layer.population.restore(snapshot)


def check_batches(batches: Any) -> None:
    """Refuse a tensor or a dataset, which iterate over samples, not over batches."""
    if isinstance(batches, Tensor):
        given, way_out = f"one tensor of shape {tuple(batches.shape)}", "[x], or x.split(25)"
    elif isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        given = f"a dataset, {type(batches).__name__}"
        way_out = "torch.utils.data.DataLoader(dataset, batch_size=25)"
    else:
        return
    raise TypeError(
        f"expected an iterable of batches, got {given}, whose samples would be taken for batches; pass {way_out}"
    )


def required_layers(model: nn.Module) -> dict[str, BatchLayerNorm]:
    """The model's BLN layers by name; a model without any is refused."""
    if found := layers(model):
        return found
    if framework(model).__name__ != __name__:  # on the torch backend Keras models are torch modules too
        raise TypeError(_no_torch_module(model))
    raise ValueError(
        f"{type(model).__name__} has no BatchLayerNorm; bln.convert(model) replaces other norms, "
        "bln.insert(model, example) adds one behind each nonlinearity"
    )


def _no_torch_module(model: Any) -> str:
    with suppress(TypeError):
        return f"{type(model).__name__} is no torch model; what can be done with it is in {framework(model).__name__}"
    return f"expected a torch module with BLN layers, got {type(model).__name__}"


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks of its own."""
    return any(getattr(module, hooks) for hooks in HOOKS)


def swap(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules inside a model, wherever they are used."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in others:
                setattr(parent, name, others[child])


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``DistributedDataParallel``, whose forward waits for other ranks, and ``torch.compile``."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled models eagerly: the compiler would make a graph for each mode and configuration."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def run(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch's inputs, moved to its device."""
    inputs = batch[0] if isinstance(batch, tuple | list) and len(batch) > 0 else batch
    inputs = to_device(inputs, next(chain(model.parameters(), model.buffers())).device)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def to_device(value: Any, device: torch.device) -> Any:
    """Move a tensor, or the tensors in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_device(item, device) for item in value]
    return value


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore every module's mode, and the random state of torch, Python and NumPy, at the end."""
    modes = [(module, module.training) for module in model.modules()]
    python_state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    devices = {t.device.index for t in model.parameters() if t.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        for module, training in modes:
            module.training = training
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
