"""Add a BLN layer after every nonlinearity of a model that has none (eq 27)."""

from __future__ import annotations

import warnings
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from ..layer import BatchLayerNorm
from .run import preserved, run_example

NONLINEARITIES = (
    nn.Tanh, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Hardswish, nn.Softplus,
)  # fmt: skip
_FEATURES_LAST = (nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm)
_KEEP_LAYOUT = (
    "pool", "drop", "norm", "pad", "add", "sub", "mul", "div", "upsample", "interpolate", "identity", "clone",
    *(kind.__name__.lower() for kind in NONLINEARITIES),
)  # fmt: skip


def insert(
    model: nn.Module,
    example: Any,
    after: type[nn.Module] | tuple[type[nn.Module], ...] = NONLINEARITIES,
    *,
    channel_dim: int | None = None,
    **kwargs: Any,
) -> fx.GraphModule:
    """Add a BLN layer after every nonlinearity: ``z = BLN(g(Wu + b))``, eq 27.

    The model is traced by ``torch.fx``, which finds modules, functions (``torch.tanh``, ``F.relu``) and methods
    (``x.relu()``), but does not look inside torch's own modules, such as ``nn.LSTM``. Each place that has no BLN yet
    gets a layer of its own. The result shares the model's modules and parameters.

    Args:
        model: A model ``torch.fx`` can trace: no control flow on data.
        example: An input, or a tuple of inputs, to learn the shapes from. It runs through the model once, in
            ``eval()`` and without gradients.
        after: The nonlinearities, as a module type or several.
        channel_dim: The dimension of features. ``None`` infers it from the layer before: 1 after a convolution, -1
            after a linear layer.
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
        traced = fx.GraphModule(model, Tracer().trace(model))
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot trace {type(model).__name__} ({error}); place bln.BatchLayerNorm by hand, after each "
            "nonlinearity"
        ) from error
    with preserved(traced), redirect_stderr(StringIO()):  # ShapeProp also prints the error
        run_example(ShapeProp(traced.eval()).propagate, example if isinstance(example, tuple) else (example,))

    nonlinear = [node for node in traced.graph.nodes if _is_nonlinear(node, after)]
    places = [
        node for node in nonlinear if not any(isinstance(called_module(user), BatchLayerNorm) for user in node.users)
    ]
    if not places:
        raise ValueError(
            f"{type(model).__name__} has no nonlinearity without a BatchLayerNorm after it; after= are the types to "
            f"look for, {', '.join(kind.__name__ for kind in after)}"
        )
    like = next(model.parameters(), torch.empty(0))
    dims = _feature_dims(traced.graph)
    for node in places:
        _refuse_in_place(node)
        shape = tuple(node.meta["tensor_meta"].shape)
        dim = channel_dim if channel_dim is not None else -1 if len(shape) == 2 else dims.get(node)
        if not (isinstance(dim, int) and -len(shape) < dim < len(shape) and dim != 0):
            raise ValueError(
                f"cannot tell where the features of {node.name}, shape {shape}, stand; pass channel_dim=1 for "
                f"(N, C, *positions), -1 for (N, *positions, C), or another dimension but 0; got {channel_dim!r}"
            )
        layer = BatchLayerNorm(shape[dim], channel_dim=dim, **{"device": like.device, "dtype": like.dtype, **kwargs})
        name = f"{node.name}_bln"
        while hasattr(traced, name):
            name += "_again"
        traced.add_submodule(name, layer.train(model.training))
        with traced.graph.inserting_after(node):
            placed = traced.graph.call_module(name, (node,))
        node.replace_all_uses_with(placed, delete_user_cb=lambda user, placed=placed: user is not placed)
    traced.recompile()
    if any(node.op == "call_function" and "dropout" in _name(node) for node in traced.graph.nodes):
        warnings.warn(
            "bln.insert: tracing fixed whether a dropout function drops; train() and eval() do not change that any "
            "more. Use an nn.Dropout module",
            stacklevel=2,
        )
    return traced


class Tracer(fx.Tracer):
    """A tracer that treats a BLN layer as one operation, like torch's own modules."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether not to trace inside ``m``."""
        return isinstance(m, BatchLayerNorm) or super().is_leaf_module(m, module_qualified_name)


def called_module(node: fx.Node) -> nn.Module | None:
    """Return the module that a node calls, if it calls one."""
    root = node.graph.owning_module
    return root.get_submodule(str(node.target)) if node.op == "call_module" and root is not None else None


def _name(node: fx.Node) -> str:
    """Return the name of what a node calls, in one spelling for a module type, a function and a method."""
    name = (
        getattr(node.target, "__name__", node.target)
        if (module := called_module(node)) is None
        else type(module).__name__
    )
    return str(name).lower().strip("_").replace("_", "")


def _is_nonlinear(node: fx.Node, after: tuple[type, ...]) -> bool:
    """Whether a node applies one of these nonlinearities to samples with features."""
    module = called_module(node)
    if module is None:
        known = node.op in ("call_function", "call_method") and _name(node) in [kind.__name__.lower() for kind in after]
    else:
        known = type(module) in after
    return known and len(node.meta["tensor_meta"].shape) >= 2


def _refuse_in_place(node: fx.Node) -> None:
    """Refuse an in-place nonlinearity whose input is used again: that use would bypass the layer."""
    source = node.all_input_nodes[0]
    in_place = node.kwargs.get("inplace") or str(getattr(node.target, "__name__", node.target)).endswith("_")
    if in_place and len(source.users) > 1:
        raise ValueError(
            f"{node.name} works in place, and its input {source.name} is used again: those uses would miss the layer. "
            f"Write {source.name} = F.relu({source.name}), or the like"
        )


def _feature_dims(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the dimension of features after layers that create them, and after operations that keep the layout."""
    dims: dict[fx.Node, int] = {}
    for node in graph.nodes:
        module, name = called_module(node), _name(node)
        known = [dims[source] for source in node.all_input_nodes if source in dims]
        if isinstance(module, BatchLayerNorm):
            dims[node] = module.channel_dim
        elif name.startswith("conv"):
            dims[node] = 1
        elif isinstance(module, _FEATURES_LAST) or name == "linear":
            dims[node] = -1
        elif known and any(part in name for part in _KEEP_LAYOUT):
            dims[node] = known[0]
    return dims
