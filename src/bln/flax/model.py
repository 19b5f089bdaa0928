"""What is done with a whole Flax NNX module: find its BLN layers, configure, reset, calibrate and search them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from .. import _array_models
from .._search.result import SearchResult
from ..config import StatisticsConfig, choices, configure_layers
from .layer import BatchLayerNorm

if TYPE_CHECKING:
    Configuration = StatisticsConfig | str | Mapping[str, StatisticsConfig | str]
    Metric = str | Callable[[Any, Any], Any]


def layers(model: Any) -> dict[str, BatchLayerNorm]:
    """The model's BLN layers by path, in the order of names, numbers as numbers.

    Flax does not keep the order in which attributes were assigned.
    """
    found = {".".join(map(str, path)): m for path, m in nnx.iter_modules(model) if isinstance(m, BatchLayerNorm)}
    return dict(sorted(found.items(), key=lambda item: [_natural(part) for part in item[0].split(".")]))


def _natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts norm2 before norm10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def _required_layers(model: Any) -> dict[str, BatchLayerNorm]:
    if not (found := layers(model)):
        raise ValueError(f"{type(model).__name__} has no bln.flax.BatchLayerNorm; add one")
    return found


def configure(model: Any, config: Configuration) -> None:
    """Choose the statistics of inference: one configuration for all BLN layers, or one for each name.

    Args:
        model: A Flax NNX module with BLN layers.
        config: ``"TTFF"``, a ``StatisticsConfig``, or a mapping from names, as ``layers`` gives them, to such; layers
            that it does not name stay as they are.
    """
    configure_layers(_required_layers(model), config)


def reset_statistics(model: Any) -> None:
    """Forget the population statistics of all BLN layers. With ``momentum=None``, call it at each epoch's start."""
    for layer in _required_layers(model).values():
        layer.reset_statistics()


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """``model.eval()``, and afterwards each module's mode as it was."""
    names = ("deterministic", "use_running_average")
    modes = [
        (module, name, getattr(module, name))
        for _, module in nnx.iter_modules(model)
        for name in names
        if hasattr(module, name)
    ]
    try:
        model.eval()
        yield
    finally:
        for module, name, value in modes:
            setattr(module, name, value)


def _call(model: Any, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _to_array(value: Any) -> Any:
    """Whatever tensor a data loader has."""
    return jnp.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)


def _tracked(batches: Iterable[Any], what: str, progress: bool) -> Any:
    def convert(batch: Any) -> Any:
        return jax.tree.map(_to_array, tuple(batch) if isinstance(batch, list) else batch)

    return closing(_array_models.tracked(batches, what, progress, convert))


def calibrate(
    model: Any, batches: Iterable[Any], *, step: Callable[[Any, Any], Any] | None = None, progress: bool = True
) -> None:
    """Recompute the population statistics under frozen weights (Algorithm 2), as plain averages over ``batches``.

    Only the BLN layers run as in training: dropout stays off, other norms use what they remember. The remembered
    ``1/m`` stays that of training, where there was any. With ``axis_name`` each batch is a mini-batch by itself. If
    anything goes wrong, the statistics are as they were.

    The first batch runs as it is, where layers may learn their positions, the others under ``nnx.jit``.

    Args:
        model: A Flax NNX module with BLN layers.
        batches: Any iterable of training batches, composed as in training: inputs, or a tuple whose first are the
            inputs; inputs that are themselves a tuple or a dict are unpacked.
        step: How to run the model on a batch, ``step(model, batch)``, where that is not right; put ``nnx.jit`` around
            it where you want it.
        progress: Show a progress bar, if rich is installed and a terminal there to see it.
    """
    found = _required_layers(model)
    known = {name: layer.without_positions for name, layer in found.items()}
    compiled = nnx.jit(_call)
    calls = 0

    def run(batch: Any) -> None:
        nonlocal calls
        calls += 1
        if step is not None:
            step(model, batch)
        else:
            (_call if calls == 1 else compiled)(model, batch[0] if isinstance(batch, tuple) else batch)

    try:
        with _evaluating(model), _tracked(batches, "calibrate", progress) as tracked:
            _array_models.calibrate(found, tracked, run)
    except BaseException:
        for name, layer in found.items():
            layer.without_positions = known[name]
        raise


def search(
    model: Any,
    batches: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Any],
    metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None = None,
    candidates: Iterable[StatisticsConfig | str] = (),
    step: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    progress: bool = True,
) -> SearchResult:
    """Find the configuration of statistics that suits a trained model: all 16 on held-out batches.

    Search on **validation** data. Each batch is loaded once, and run in all configurations by one compiled function:
    the configuration is data. The model is left as it was found; ``SearchResult.apply`` gives it the winner.

    Args:
        model: A trained Flax NNX module with BLN layers.
        batches: Any iterable of ``(inputs, targets)``, in batches composed as requests will be.
        loss: ``loss(outputs, targets)``, one number or one for each sample, such as
            ``optax.softmax_cross_entropy_with_integer_labels``.
        metrics: ``"accuracy"`` or functions like ``loss``; several in a list, or by name. Higher is better, and the
            first breaks ties. Values are those of a batch, averaged by samples.
        candidates: Configurations to compare beside the 16, such as ``StatisticsConfig.shrunk(4, 16, 64)``.
        step: ``step(model, batch)``, which returns ``(outputs, targets)``, where ``model(inputs)`` is not right. It is
            compiled by ``nnx.jit``.
        progress: Show a progress bar, if rich is installed and a terminal there to see it.

    Returns:
        A ``SearchResult``: a table that prints, exports, iterates best first, and applies to the model.
    """
    found = _required_layers(model)
    functions = {"loss": loss, **_named(metrics)}
    compiled = nnx.jit(step or (lambda model, batch: (_call(model, batch[0]), batch[1])))

    def score(batch: Any) -> tuple[list[float], int]:
        if step is None and not (isinstance(batch, tuple) and len(batch) == 2):
            what = f"{len(batch)} parts" if isinstance(batch, tuple) else type(batch).__name__
            raise ValueError(f"expected batches of (inputs, targets), got {what}")
        outputs, targets = compiled(model, batch)
        values = [float(jnp.mean(function(outputs, targets))) for function in functions.values()]
        return values, len(jax.tree.leaves(targets)[0])

    with _evaluating(model), _tracked(batches, "search", progress) as tracked:
        return _array_models.search(
            found, tracked, score, [name for name in functions if name != "loss"], choices(candidates),
            calibrate="bln.flax.calibrate(model, train_batches)",
        )  # fmt: skip


def _named(metrics: Any) -> dict[str, Any]:
    if isinstance(metrics, Mapping):
        named = dict(metrics)
    else:
        given = metrics if isinstance(metrics, list | tuple) else [] if metrics is None else [metrics]
        named = {m if isinstance(m, str) else m.__name__: m for m in given}
    for name, metric in named.items():
        if not (callable(metric) or metric == "accuracy"):
            raise ValueError(
                f"metric {name!r} is {metric!r}, expected a function metric(outputs, targets) or 'accuracy'"
            )
    return {name: _accuracy if metric == "accuracy" else metric for name, metric in named.items()}


def _accuracy(outputs: Any, targets: Any) -> Any:
    """The share of samples whose largest output is the target's; of a single output, whose sign is."""
    single = outputs.ndim == 1 or outputs.shape[-1] == 1
    predicted = (outputs > 0).reshape(targets.shape) if single else outputs.argmax(-1)
    if predicted.shape != targets.shape:
        raise ValueError(
            f"'accuracy' is for outputs (N, ..., classes) and class targets (N, ...), or outputs (N,) or (N, 1) and "
            f"targets of 0 and 1; got {outputs.shape} and {targets.shape}. Pass a function instead"
        )
    return predicted == targets
