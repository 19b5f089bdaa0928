"""Find, by torch.fx, the neighbours of BLN layers that can absorb a fixed scale and shift."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from ..layer import BatchLayerNorm
from .affine import flattened
from .insert import Tracer, called_module
from .layers import hooked, layers
from .run import run_example

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NOTHING_IN_EVAL = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_Side = Literal["before", "after"]


class Fold(NamedTuple):
    """A module to fold a map into, and the map ``(2, features)`` of its outputs or its inputs."""

    module: nn.Module
    side: _Side
    """Where the module stands: ``before`` the map or ``after`` it."""
    values: Tensor


class Neighbours:
    """The graph around the layers of a model, and which neighbours can absorb their maps."""

    def __init__(self, model: nn.Module, calls: _Calls | None) -> None:
        self.calls = calls
        self.names = {module: name for name, module in model.named_modules()}
        self.owners = Counter[Any](module for _, module in model.named_modules(remove_duplicate=False))
        self.owners.update(p for _, p in model.named_parameters(remove_duplicate=False))
        self.nodes: dict[nn.Module, list[fx.Node]] = {}
        graphs, self.untraced = _trace(model, calls)
        for traced in graphs:
            for node in traced.graph.nodes:
                if node.op in ("call_module", "get_attr"):  # reading a module's weights uses it, too
                    path = str(node.target) if node.op == "call_module" else str(node.target).rpartition(".")[0]
                    self.nodes.setdefault(traced.get_submodule(path), []).append(node)

    def find(self, layer: BatchLayerNorm, values: Tensor) -> Fold | str:
        """Return the fold of the layer's map, or why there is none."""
        if layer not in self.nodes:
            return self.untraced or "torch.fx does not see where it is called"
        if not self._used_once(layer):
            return "it is used more than once"
        (node,) = self.nodes[layer]
        if len(node.args) != 1 or node.kwargs:
            return f"it is called with a {'residual' if len(node.args) > 2 or 'residual' in node.kwargs else 'mask'}"
        before = self._fold(layer, values, "before", _before(node))
        if isinstance(before, Fold):
            return before
        if layer.activation is not None:
            return f"{before}; its {layer.activation} stands between it and what comes after"
        after = self._fold(layer, values, "after", _after(node))
        return after if isinstance(after, Fold) else f"{before}; {after}"

    def _used_once(self, module: nn.Module) -> bool:
        called_once = self.calls is None or len(self.calls.get(module, ())) == 1
        return called_once and self.owners[module] == 1 and len(self.nodes.get(module, ())) == 1

    def _fold(self, layer: BatchLayerNorm, values: Tensor, side: _Side, neighbour: _Neighbour) -> Fold | str:
        """Return the fold of a map into the module of a node, or why that would not be exact."""
        if isinstance(neighbour, str):
            return neighbour
        node, flat = neighbour
        module: Any = called_module(node)
        name = f"{self.names.get(module, node.name)} {side} it"
        linear = type(module) is nn.Linear
        if not (linear or type(module) in (*_CONVOLUTIONS, *TRANSPOSED)) or "forward" in vars(module):
            return f"{name} is no linear layer or convolution"
        parameters = list(module.parameters())
        if hooked(module) or not self._used_once(module) or any(self.owners[p] > 1 for p in parameters):
            return f"{name} is used more than once, shares its weights or has hooks"
        if any(type(p) is not nn.Parameter or p.dtype.itemsize < 4 for p in parameters):  # quantized ones, too
            return f"{name} has less than float32 precision; freeze first, then move the model to a lower one"
        if flat:
            sample = flattened(values, layer.channel_dim, module.in_features) if linear else None
            return f"its positions do not fill the inputs of {name}" if sample is None else Fold(module, side, sample)
        if values.dim() > 2:
            return "it differs from position to position"
        rank, wanted = self._rank(layer), module.weight.dim()
        if linear:
            fits = layer.channel_dim == -1 if rank is None else layer.channel_dim % rank == rank - 1
        else:
            fits = rank in (None, wanted) and layer.channel_dim % wanted == 1
        if not fits:
            return f"features stand elsewhere for {name}" + ", or may: pass example=" * (rank is None)
        if side == "after" and not linear and values[1].any() and _adds_zeros(module):
            return f"{name} puts zeros between or around its inputs, which the shift would miss"
        return Fold(module, side, values)

    def _rank(self, layer: BatchLayerNorm) -> int | None:
        """Return the number of dimensions of the layer's input, if that is known."""
        if self.calls is not None:
            return self.calls[layer][0].rank
        return 2 + len(layer.population.position_shape or ()) if layer.per_position else None


_Neighbour = tuple[fx.Node, bool] | str
"""A node and whether a flatten comes between, or why there is none."""


def _before(node: fx.Node) -> _Neighbour:
    """Return the node that a layer's input comes from, skipping modules without an effect in eval."""
    while True:
        (source,) = node.all_input_nodes
        if len(source.users) > 1:
            return f"{source.name} before it is used elsewhere too"
        if not _is_idle(source):
            return source, False
        node = source


def _after(node: fx.Node) -> _Neighbour:
    """Return the node that a layer's output goes to, skipping modules without an effect in eval and a flatten."""
    flat = False
    while True:
        if len(node.users) != 1:
            return f"what comes out of it is used {len(node.users)} times"
        (user,) = node.users
        if user.op == "output":
            return "no layer stands after it"
        if len(user.all_input_nodes) > 1 or user.args[:1] != (node,):
            return f"{user.name} after it is not linear in it"
        if user is not node.next:  # without the layer, its output and its input share memory
            return f"something may be changed in place before {user.name} after it"
        if not (_is_idle(user) or (_flattens(user) and not flat)):
            return user, flat
        flat = flat or not _is_idle(user)
        node = user


def _is_idle(node: fx.Node) -> bool:
    """Whether a node returns its input, in eval."""
    module = called_module(node)
    return isinstance(module, _NOTHING_IN_EVAL) and not hooked(module)


def _flattens(node: fx.Node) -> bool:
    """Whether a node flattens all dimensions but that of samples."""
    if (module := called_module(node)) is not None:
        return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1) and not hooked(module)
    arguments = {"end_dim": -1} | dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
    return node.target in (torch.flatten, "flatten") and arguments == {"start_dim": 1, "end_dim": -1}


def _adds_zeros(module: Any) -> bool:
    """Whether a convolution sees zeros between or around its inputs."""
    padded = any(module._reversed_padding_repeated_twice)  # what "same" stands for, too
    return isinstance(module, TRANSPOSED) or (padded and module.padding_mode == "zeros")


# ---- calls and graphs


class _Call(NamedTuple):
    """The arguments of a module's call."""

    rank: int | None
    """Dimensions of the first tensor."""
    positional: int
    named: list[str]


_Calls = dict[nn.Module, list[_Call]]


def watch(model: nn.Module, example: Any) -> tuple[_Calls, Any]:
    """Run the example; return every call of every module, and the outputs."""
    calls: _Calls = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rank = next((value.dim() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        calls.setdefault(module, []).append(_Call(rank, len(args), list(kwargs)))

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        return calls, run_example(model, example)
    finally:
        for handle in handles:
            handle.remove()


class _Tracer(Tracer):
    """A tracer that does not look into modules with hooks, which see what passes between their parts and others."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return hooked(m) or super().is_leaf_module(m, module_qualified_name)


def _trace(module: nn.Module, calls: _Calls | None) -> tuple[list[fx.GraphModule], str]:
    """Return graphs of the model, or of its parts if it cannot be traced as a whole, and why that is.

    Only an example shows that a part is called as a whole, so without one there are no parts.
    """
    kind, once = type(module).__name__, calls is None or len(calls.get(module, ())) == 1
    _, positional, named = calls[module][0] if calls and once else _Call(None, 0, [])
    parameters = list(inspect.signature(module.forward).parameters.values())
    left_out = {p.name: p.default for p in parameters[positional:] if not (p.default is p.empty or p.name in named)}
    if calls is None and left_out:
        return [], f"what stands around it depends on optional arguments of {kind}; pass example="
    why = f"{kind} is not called once"
    if once:
        try:
            with _unchanged(module), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return [fx.GraphModule(module, _Tracer().trace(module, left_out or None))], ""
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            why = f"torch.fx cannot trace {kind} ({reason})" + "; pass example= to look at its parts" * (calls is None)
    parts = [part for part in module.children() if layers(part) and not isinstance(part, BatchLayerNorm)]
    return [] if calls is None else [graph for part in parts for graph in _trace(part, calls)[0]], why


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restore attributes at the end: a module that stores a tensor would store the tracer's proxy for it."""
    before = [(vars(part), dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for attributes, kept in before:
            attributes.clear()
            attributes.update(kept)
