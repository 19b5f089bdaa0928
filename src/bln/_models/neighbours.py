"""The neighbours of BLN layers that can take in a fixed scale and shift, found by torch.fx."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from ..layer import BatchLayerNorm
from .affine import FixedMap
from .calibrate import HOOKS, hooked
from .insert import Tracer, call, called

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NOTHING_IN_EVAL = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class Neighbour(NamedTuple):
    side: str
    """``before`` or ``behind``."""
    module: nn.Module
    between: tuple[nn.Module, ...]
    flattened: bool
    """Whether a flatten lies between."""


class Places:
    """Where layers stand in a model, and which neighbour can take a map in."""

    def __init__(self, model: nn.Module, calls: _Calls | None) -> None:
        self.calls = calls
        self.names = {module: name for name, module in model.named_modules()}
        self.uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
        self.owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
        self.nodes: dict[nn.Module, list[fx.Node]] = {}
        graphs, self.untraced = _trace(model, calls)
        for traced in graphs:
            for node in traced.graph.nodes:
                if node.op in ("call_module", "get_attr"):  # reading its weights is a use, too
                    path = str(node.target) if node.op == "call_module" else str(node.target).rpartition(".")[0]
                    self.nodes.setdefault(traced.get_submodule(path), []).append(node)

    def find(self, layer: BatchLayerNorm, fixed: FixedMap) -> Neighbour | str:
        """The neighbour to fold the map into, or why there is none."""
        if layer not in self.nodes:
            return self.untraced or "torch.fx does not see where it is called"
        if self._used_again(layer):
            return "it is used more than once"
        (node,) = self.nodes[layer]
        if len(node.args) != 1 or node.kwargs:
            return f"it is called with a {'residual' if len(node.args) > 2 or 'residual' in node.kwargs else 'mask'}"
        reasons = []
        for side in ("before", "behind"):
            if side == "behind" and fixed.activation is not None:
                reasons.append(f"what stands behind it takes its {fixed.activation}")
                continue
            found = _neighbour(node, side)
            why = found if isinstance(found, str) else self._refusal(found, layer) or self._misfit(found, fixed, layer)
            if not why:
                return found
            reasons.append(why)
        return "; ".join(reasons)

    def _used_again(self, module: nn.Module) -> bool:
        seen = 1 if self.calls is None else len(self.calls.get(module, ()))
        return self.uses[module] > 1 or seen != 1 or len(self.nodes.get(module, ())) != 1

    def _refusal(self, neighbour: Neighbour, layer: BatchLayerNorm) -> str | None:
        """Why a module may not be changed, whatever the map."""
        module, flattened = neighbour.module, neighbour.flattened
        name = f"{self.names[module]} {neighbour.side} it"
        allowed = (nn.Linear,) if flattened else (nn.Linear, *_CONVOLUTIONS, *TRANSPOSED)
        around = {self._hooked_around(part) for part in (layer, *neighbour.between, module)}
        parameters = [p for p in module._parameters.values() if p is not None]
        own = type(module._parameters.get("weight")) is nn.Parameter
        reasons = {
            f"{name} is parametrized": nn.utils.parametrize.is_parametrized(module),
            f"{name} is no linear layer or convolution" + " that takes it flattened" * flattened:
                type(module) not in allowed or "forward" in vars(module),
            f"{name} is used more than once, or its weights are read elsewhere": self._used_again(module),
            f"{name} has hooks": hooked(module),
            f"a module around it or {name} has hooks, which see what passes between": len(around) > 1,
            f"{name} shares its weights, or they are not its own":
                not own or any(self.owners[id(p)] > 1 for p in parameters),
            f"{name} has less than float32 precision; freeze first, then move the model to a lower one":
                any(not p.is_floating_point() or p.dtype.itemsize < 4 for p in parameters),
        }  # fmt: skip
        return next((why for why, refused in reasons.items() if refused), None)

    def _hooked_around(self, module: nn.Module) -> tuple[str, ...]:
        """The modules with hooks that contain this one."""
        name = self.names[module]
        return tuple(n for m, n in self.names.items() if hooked(m) and name.startswith(f"{n}.") and n)

    def _misfit(self, neighbour: Neighbour, fixed: FixedMap, layer: BatchLayerNorm) -> str | None:
        """Why this map cannot be folded into that module exactly."""
        module: Any = neighbour.module
        dim, rank = fixed.channel_dim, fixed.rank
        name = f"{self.names[module]} {neighbour.side} it"
        if neighbour.flattened:
            fits = fixed.flattened(module.in_features) is not None
            return None if fits else f"its positions do not fill the inputs of {name}"
        if fixed.uniform is None:
            return "it differs from position to position"
        if rank is None and self.calls is not None:
            rank = self.calls[layer][0].rank
        if isinstance(module, nn.Linear):
            if rank is None and dim != -1:
                return f"{name} works on the last dimension, features may stand elsewhere: pass example="
            last = rank is None or dim % rank == rank - 1
            return None if last else f"{name} works on the last dimension, features stand elsewhere"
        dimensions = module.weight.dim()
        if rank not in (None, dimensions) or dim % dimensions != 1:
            return f"{name} works on dimension 1 of {dimensions}, features stand elsewhere"
        if neighbour.side == "behind" and fixed.uniform[1].any() and not _keeps_constants(module):
            return f"{name} puts zeros between or around its inputs, which the shift would miss"
        return None


def _neighbour(node: fx.Node, side: str) -> Neighbour | str:
    """The module on one side, past those without an effect in eval, or why there is none to fold into."""
    flattened, between = False, list[nn.Module]()
    while True:
        if side == "before":
            if not isinstance(source := node.args[0], fx.Node):
                return "no layer stands before it"
            if len(source.users) > 1:
                return f"{source.name} before it is used elsewhere too"
            node = source
        else:
            if len(node.users) != 1:
                return f"what comes out of it is used {len(node.users)} times"
            (user,) = node.users
            if user.op == "output":
                return "no layer stands behind it"
            if len(user.all_input_nodes) > 1 or user.args[:1] != (node,):
                return f"{user.name} behind it is not linear in it"
            if user is not node.next:  # without the layer, its output and its input share memory
                return f"something may be changed in place before {user.name} behind it"
            node = user
        module = called(node)
        if side == "behind" and not flattened and _flattens(node, module):
            flattened = True
        elif module is None or len(node.args) != 1 or node.kwargs:
            return f"{node.name} {side} it is no linear layer or convolution"
        elif type(module) not in _NOTHING_IN_EVAL or hooked(module):
            return Neighbour(side, module, tuple(between), flattened)
        between += [] if module is None else [module]


def _flattens(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a node flattens all dimensions but that of samples."""
    if module is not None:
        return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1) and not hooked(module)
    given = {"end_dim": -1} | dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
    return node.target in (torch.flatten, "flatten") and given == {"start_dim": 1, "end_dim": -1}


def _keeps_constants(module: Any) -> bool:
    """Whether a convolution gives an input that is the same everywhere an output that is."""
    if not isinstance(module, _CONVOLUTIONS):
        return {*module.kernel_size, *module.stride} == {1} and not any((*module.padding, *module.output_padding))
    if module.padding_mode != "zeros" or module.padding == "valid":
        return True
    return {*module.kernel_size} == {1} if module.padding == "same" else not any(module.padding)


# ---- what is called, and how


class _Called(NamedTuple):
    rank: int | None
    """Dimensions of the first tensor."""
    constants: dict[str, Any]
    """The arguments without a tensor, by name."""


_Calls = dict[nn.Module, list[_Called]]


def watch(model: nn.Module, example: Any) -> tuple[_Calls, Any]:
    """Run the example; return every call of every module, and the outputs."""
    calls: _Calls = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rank = next((value.dim() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        calls.setdefault(module, []).append(_Called(rank, _constants(module, args, kwargs)))

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        return calls, call(model, example)
    finally:
        for handle in handles:
            handle.remove()


def _constants(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # no signature, as of a scripted module: then it cannot be traced either
        return {}
    bound.apply_defaults()
    single = {n for n, p in bound.signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    given = {name: value for name, value in bound.arguments.items() if name in single}
    return {n: value for n, value in given.items() if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))}


def _trace(module: nn.Module, calls: _Calls | None) -> tuple[list[fx.GraphModule], str]:
    """Graphs of the model, or of its parts where it cannot be traced as a whole, and why that is.

    Only an example shows that a part is called as a whole, so without one there are no parts.
    """
    kind, graphs = type(module).__name__, []
    parameters = inspect.signature(module.forward).parameters.values()
    if calls is None and any(p.default is not p.empty for p in parameters):
        return [], f"what stands around it depends on optional arguments of {kind}; pass example="
    why = f"{kind} is not called once"
    if calls is None or len(calls.get(module, ())) == 1:
        constants = None if calls is None else calls[module][0].constants
        try:
            with _untouched(module), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return [fx.GraphModule(module, Tracer().trace(module, constants or None))], ""
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            why = f"torch.fx cannot trace {kind} ({reason})" + "; pass example= to look at its parts" * (calls is None)
    for part in module.children() if calls is not None else ():
        if not isinstance(part, BatchLayerNorm) and any(isinstance(m, BatchLayerNorm) for m in part.modules()):
            graphs += _trace(part, calls)[0]
    return graphs, why


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Remove hooks, and put attributes back: whatever keeps a tensor would keep the tracer's stand-in for it."""
    before = [(vars(part), dict(vars(part))) for part in module.modules()]
    for attributes, _ in before:
        attributes.update({hooks: OrderedDict() for hooks in HOOKS})
    try:
        yield
    finally:
        for attributes, kept in before:
            attributes.clear()
            attributes.update(kept)
