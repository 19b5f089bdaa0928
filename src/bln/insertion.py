"""Eq 27: a BLN layer behind every nonlinearity of a model that has none."""

from __future__ import annotations

import warnings
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from .layer import BatchLayerNorm

NONLINEARITIES = (
    nn.Tanh, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Hardswish, nn.Softplus,
)  # fmt: skip

_FEATURES_SECOND = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_FEATURES_LAST = (nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm)
_KEEP_LAYOUT = (
    "pool",
    "drop",
    "norm",
    "pad",
    "add",
    "sub",
    "mul",
    "div",
    "upsample",
    "interpolate",
    "identity",
    "clone",
)


def insert(
    model: nn.Module,
    example: Any,
    after: type[nn.Module] | tuple[type[nn.Module], ...] = NONLINEARITIES,
    *,
    channel_dim: int | None = None,
    **kwargs: Any,
) -> fx.GraphModule:
    """Put a BLN layer behind every nonlinearity: ``z = BLN(g(Wu + b))``, eq 27.

    The model is traced by ``torch.fx``; modules, functions (``torch.tanh``, ``F.relu``) and methods (``x.relu()``) are
    all found, and each place that has no BLN yet gets a layer of its own. What happens inside a module of torch's own,
    such as ``nn.LSTM``, is not seen. The result shares the model's modules and parameters.

    Args:
        model: A model ``torch.fx`` can trace: no control flow on data.
        example: An input, or a tuple of inputs, to learn the shapes from. It runs through the model once, in
            ``eval()`` and without gradients.
        after: The nonlinearities, as a module type or several.
        channel_dim: Where features stand. ``None`` finds out from what comes before: behind a convolution 1, behind
            a linear layer -1.
        **kwargs: Passed on to ``BatchLayerNorm``.

    Returns:
        A ``torch.fx.GraphModule``.

    Examples:
        >>> import torch, bln
        >>> from torch import nn
        >>> net = bln.insert(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(3, 4))
        >>> bln.layers(net)
        {'_1_bln': BatchLayerNorm(8, channel_dim=-1, position_shape=None, config=TTFF)}
    """
    after = after if isinstance(after, tuple) else (after,)
    if not all(isinstance(kind, type) for kind in after):
        raise TypeError(f"after must be a module type such as nn.Tanh, or a tuple of some, got {after}")
    try:
        graph = Tracer().trace(model)
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot trace {type(model).__name__} ({error}); place bln.BatchLayerNorm by hand, behind each "
            "nonlinearity"
        ) from error
    traced = fx.GraphModule(model, graph)
    _propagate_shapes(traced, example if isinstance(example, tuple) else (example,))

    names = {kind.__name__.lower() for kind in after}
    nonlinear = [node for node in traced.graph.nodes if _is_nonlinear(traced, node, after, names)]
    found = [node for node in nonlinear if not _has_layer(traced, node)]
    if nonlinear and not found:
        raise ValueError(f"each nonlinearity of {type(model).__name__} has a BatchLayerNorm behind it already")
    if not found:
        raise ValueError(
            f"{type(model).__name__} has none of the nonlinearities {', '.join(kind.__name__ for kind in after)}; "
            "pass after="
        )
    like = next(model.parameters(), torch.empty(0))
    for node in found:
        _refuse_in_place(node)
        shape = node.meta["tensor_meta"].shape
        dim = _find_channel_dim(traced, node) if channel_dim is None else channel_dim
        if not (isinstance(dim, int) and -len(shape) < dim < len(shape) and dim != 0):
            raise ValueError(
                f"channel_dim must be a dimension of {node.name}, whose shape is {tuple(shape)}, but not that of "
                f"samples: 1, or -1 for features last; got {dim!r}"
            )
        layer = BatchLayerNorm(shape[dim], channel_dim=dim, **{"device": like.device, "dtype": like.dtype, **kwargs})
        name = _unused_name(traced, f"{node.name}_bln")
        traced.add_submodule(name, layer.train(model.training))
        with traced.graph.inserting_after(node):
            placed = traced.graph.call_module(name, (node,))
        node.replace_all_uses_with(placed, delete_user_cb=lambda user, placed=placed: user is not placed)
    traced.recompile()
    for node in traced.graph.nodes:
        if node.op == "call_function" and "dropout" in node.target.__name__:
            warnings.warn(
                f"bln.insert: {node.name} is a function, so tracing fixed whether it drops; train() and eval() do not "
                "change that any more. Use an nn.Dropout module",
                stacklevel=2,
            )
    return traced


class Tracer(fx.Tracer):
    """Takes a BLN layer for one operation, as it does torch's own."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether to look no further into ``m``."""
        return isinstance(m, BatchLayerNorm) or super().is_leaf_module(m, module_qualified_name)


def _propagate_shapes(traced: fx.GraphModule, example: tuple[Any, ...]) -> None:
    modes = [(module, module.training) for module in traced.modules()]
    try:
        with torch.no_grad(), redirect_stderr(StringIO()):  # where it prints the error, too
            ShapeProp(traced.eval()).propagate(*example)
    except Exception as error:
        given = ", ".join(str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in example)
        raise ValueError(
            f"the example does not run through the model: {error.__cause__ or error}. It was {given}; pass an input, "
            "or a tuple of inputs"
        ) from error
    finally:
        for module, training in modes:
            module.training = training


def _is_nonlinear(traced: fx.GraphModule, node: fx.Node, after: tuple[type, ...], names: set[str]) -> bool:
    """A nonlinearity, on samples and features."""
    if node.op == "call_module":
        nonlinear = type(traced.get_submodule(str(node.target))) in after
    else:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        nonlinear = node.op in ("call_function", "call_method") and str(name).strip("_").replace("_", "") in names
    return nonlinear and len(node.meta["tensor_meta"].shape) >= 2


def _has_layer(traced: fx.GraphModule, node: fx.Node) -> bool:
    """A BLN behind it."""
    behind = [traced.get_submodule(str(user.target)) for user in node.users if user.op == "call_module"]
    return any(isinstance(module, BatchLayerNorm) for module in behind)


def _refuse_in_place(node: fx.Node) -> None:
    """What was changed in place and is read by its old name would go around the layer."""
    source = node.all_input_nodes[0]
    in_place = node.kwargs.get("inplace") or str(getattr(node.target, "__name__", node.target)).endswith("_")
    if in_place and len(source.users) > 1:
        raise ValueError(
            f"{node.name} works in place, and its input {source.name} is used again: those uses would miss the layer. "
            f"Write {source.name} = F.relu({source.name}), or the like"
        )


def _unused_name(module: nn.Module, name: str) -> str:
    return name if not hasattr(module, name) else _unused_name(module, name + "_again")


def _find_channel_dim(traced: fx.GraphModule, node: fx.Node) -> int:
    """Walk back to the layer that made the features, as long as nothing on the way moves them."""
    shape = tuple(node.meta["tensor_meta"].shape)
    if len(shape) == 2:
        return -1
    waiting, done = list(node.all_input_nodes), set()
    while waiting:
        source = waiting.pop(0)
        if source in done:
            continue
        done.add(source)
        module = traced.get_submodule(str(source.target)) if source.op == "call_module" else None
        name = (type(module).__name__ if module else getattr(source.target, "__name__", str(source.target))).lower()
        if isinstance(module, _FEATURES_SECOND) or name.startswith("conv"):
            return 1
        if isinstance(module, _FEATURES_LAST) or name == "linear":
            return -1
        if isinstance(module, BatchLayerNorm):
            return module.channel_dim
        known = {kind.__name__.lower() for kind in NONLINEARITIES}
        if name.strip("_").replace("_", "") not in known and not any(part in name for part in _KEEP_LAYOUT):
            break
        waiting += source.all_input_nodes
    raise ValueError(
        f"cannot tell where the features of {node.name}, shape {shape}, stand; pass channel_dim=1 for "
        "(N, C, *positions) or channel_dim=-1 for (N, *positions, C)"
    )
