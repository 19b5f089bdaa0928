"""Make a model ready for deployment: layers that have become a fixed map are folded into their neighbours."""

from __future__ import annotations

import inspect
import operator
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from . import formula
from ._activation import MODULES
from .affine import Affine
from .insertion import Tracer
from .layer import BatchLayerNorm
from .model import HOOKS, required_layers, unwrapped
from .population import STATISTICS

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NOTHING_IN_EVAL = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


@dataclass(frozen=True)
class FreezeReport:
    """What became of each BLN layer, by name; ``print`` it."""

    folded: dict[str, str] = field(default_factory=dict)
    """Layers that are gone, and the layer that took them in."""
    kept: dict[str, str] = field(default_factory=dict)
    """Layers that are one multiply-add now, a ``bln.Affine``, and why they could not be folded."""
    left: dict[str, str] = field(default_factory=dict)
    """Layers that are BLN as before, and why."""
    difference: float | None = None
    """How far the example's outputs moved, over their largest value; ``None`` without an example."""

    def __str__(self) -> str:
        groups = {"folded": self.folded, "kept": self.kept, "left": self.left}
        lines = [
            f"bln.freeze: {len(self.folded)} folded away, {len(self.kept)} kept as one multiply-add, "
            f"{len(self.left)} left as they are"
        ]
        width = max((len(name) for group in groups.values() for name in group), default=0)
        for what, group in groups.items():
            lines += [f"  {what:6}  {name or 'the model':{width}}  {why}" for name, why in group.items()]
        if self.difference is not None:
            lines.append(f"  outputs of the example moved by {self.difference:.1g} of their largest value")
        return "\n".join(lines)


@overload
def freeze(model: nn.Module, example: Any = ..., *, report: Literal[False] = ...) -> nn.Module: ...
@overload
def freeze(model: nn.Module, example: Any = ..., *, report: Literal[True]) -> tuple[nn.Module, FreezeReport]: ...
def freeze(
    model: nn.Module, example: Any = None, *, report: bool = False
) -> nn.Module | tuple[nn.Module, FreezeReport]:
    """Put the model into ``eval()`` and turn its ``TTTT`` layers into what they then are: a fixed scale and shift.

    With all four statistics from the population, BLN is ``y = scale * x + shift`` for each position and feature. Where
    that is exact, the layer before or behind takes it in: ``nn.Linear``, a convolution, or a linear layer behind a
    flatten. Elsewhere it stays as one operation, ``bln.Affine``. Layers with another configuration look at their
    input and are left as they are. An activation of the layer stays where it was: as a module, where the layer before
    takes the map in, else in the ``bln.Affine``, which takes a residual, too. Outputs stay the same up to rounding.

    Nothing is folded across a nonlinearity, into a layer that is used twice, shares weights, has hooks or
    parametrizations or less than float32 precision (freeze first, then ``.half()``), nor a shift into a convolution
    that pads with zeros. Neighbours are found by ``torch.fx``.

    The model is changed in place, and is one for inference from then on: ``train()`` brings back dropout, but no
    mini-batch statistics. Save the state dict before freezing, and freeze after loading. Call it as a whole: a part
    that is called by itself may no longer give what it did.

    Args:
        model: A trained model with BLN layers, compiled or wrapped or not. If it is itself one, use what is returned.
        example: An input, a tuple of inputs or a dict of arguments. It runs through the model before and
            after, without gradients, and shows what cannot be known otherwise: the rank of inputs, and what is called
            by a model that ``torch.fx`` cannot trace as a whole. Calls with other optional arguments are
            then not looked at.
        report: Return ``(model, report)``; the report says what became of each layer.

    Returns:
        The model, and the ``FreezeReport`` if asked for.

    Examples:
        >>> import torch, bln
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), bln.BatchLayerNorm(8, config="TTTT"), nn.Linear(8, 2))
        >>> _ = net(torch.randn(16, 4))
        >>> net, report = bln.freeze(net, report=True)
        >>> print(report)
        bln.freeze: 1 folded away, 0 kept as one multiply-add, 0 left as they are
          folded  2  into 3
    """
    found, wrapper, model = required_layers(model), model.eval(), unwrapped(model)
    calls, before = (None, None) if example is None else _watch(model, example)
    done = FreezeReport()
    replacements: dict[nn.Module, nn.Module] = {}
    folds: list[tuple[_Neighbour, _FixedMap]] = []
    with torch.inference_mode(False), torch.no_grad():
        places = _Places(model, calls)
        for name, layer in found.items():
            if why := _not_fixed(layer):
                done.left[name] = why
                continue
            fixed = _FixedMap(layer)
            neighbour = places.find(layer, fixed)
            if isinstance(neighbour, str):
                replacements[layer], done.kept[name] = fixed.affine(), neighbour
            else:
                remains = nn.Identity() if layer.activation is None else MODULES[layer.activation]()
                replacements[layer], done.folded[name] = remains, f"into {places.names[neighbour.module]}"
                folds.append((neighbour, fixed))
        for neighbour, fixed in folds:  # nothing is changed before everything is decided
            _take_in(neighbour, fixed)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                setattr(parent, name, replacements[child])
    frozen = replacements.get(model, model).eval()

    if not replacements:
        reasons = "".join(f"\n  {name or 'the model'}: {why}" for name, why in done.left.items())
        warnings.warn(f"bln.freeze: every layer is left as it is:{reasons}", stacklevel=2)
    if before is not None:
        done = FreezeReport(done.folded, done.kept, done.left, _difference(before, _call(frozen, example)))
    frozen = wrapper if frozen is model else frozen
    return (frozen, done) if report else frozen


# ---- the map


def _not_fixed(layer: BatchLayerNorm) -> str | None:
    """Why a layer cannot be written as a fixed scale and shift."""
    if type(layer) is not BatchLayerNorm or "forward" in vars(layer):
        return f"{type(layer).__name__} may compute something else than BatchLayerNorm"
    if _hooked(layer):
        return "it has hooks"
    if str(layer.config) != "TTTT":
        return f"{layer.config} looks at the current input; with TTTT alone it is a fixed map"
    if not (layer.population.updates[STATISTICS.index("inverse_m")] > 0).all():
        return "it has not been trained or calibrated yet, at some position: m would be that of each input"
    return None


class _FixedMap:
    """``y = scale * x + shift`` in float64, features last: ``(*positions, C)``."""

    def __init__(self, layer: BatchLayerNorm) -> None:
        self.channel_dim, self.dtype = layer.channel_dim, layer.population.batch_mean.dtype
        self.activation = layer.activation
        known = layer.population.position_shape
        population = layer.population.statistics(known or (), 1)
        s = formula.Statistics(*(value.double() for value in population))
        gamma, beta = (None if p is None else p.double() for p in (layer.weight, layer.bias))
        centred = s._replace(batch_mean=0 * s.batch_mean, feature_mean=0 * s.feature_mean)
        one = torch.ones_like(s.batch_mean)
        self.scale = formula.transform(one, centred, gamma, spec=layer.spec, xp=torch)
        self.shift = formula.transform(0 * one, s, gamma, beta, spec=layer.spec, xp=torch)
        rows = torch.stack([self.scale, self.shift]).reshape(2, -1, layer.num_features)
        self.uniform = rows[:, 0] if (rows == rows[:, :1]).all() else None  # (scale, shift), where all positions agree
        self.rank = 2 + len(known) if known is not None and layer.per_position else None

    def affine(self) -> Affine:
        values = (value.to(self.dtype) for value in self._as_input(self.scale, self.shift))
        return Affine(*values, channel_dim=self.channel_dim, activation=self.activation)

    def flattened(self, size: int) -> Tensor | None:
        """Scale and shift of a whole sample of ``size`` entries, ``(2, size)``; ``None`` where they do not fit."""
        features = self.scale.shape[-1]
        if size % features:
            return None
        if self.uniform is not None and self.channel_dim in (1, -1):
            count = size // features
            return self.uniform.repeat(1, count) if self.channel_dim == -1 else self.uniform.repeat_interleave(count, 1)
        values = torch.stack([self.scale, self.shift])
        if values.dim() == 3:  # a shorter sequence uses the first positions
            values = values[:, : size // features]
        sample = torch.stack(self._as_input(*values)).flatten(1)
        return sample if sample.shape[1] == size else None

    def _as_input(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Laid out as a sample of the input is."""
        axis = self.channel_dim - 1 if self.channel_dim > 0 else self.channel_dim
        return tuple(v if v.dim() == 1 else v.movedim(-1, axis).contiguous() for v in values)


# ---- who takes it in


@dataclass(frozen=True)
class _Neighbour:
    side: str
    """``before`` or ``behind``."""
    module: nn.Module
    between: tuple[nn.Module, ...]
    """Modules on the way that do nothing in eval."""
    flattened: bool
    """Whether a flatten lies between."""


class _Places:
    """Where layers stand in a model, and who beside them could take a map in."""

    def __init__(self, model: nn.Module, calls: dict[nn.Module, list[_Arguments]] | None) -> None:
        self.calls = calls
        self.names = {module: name for name, module in model.named_modules()}
        self.uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
        self.owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
        self.traces, self.untraced = _trace(model, calls)

    def find(self, layer: BatchLayerNorm, fixed: _FixedMap) -> _Neighbour | str:
        """Who can take in the map, or why none can."""
        ways = next((ways for ways in self.traces if any(layer in way.nodes for way in ways)), None)
        if ways is None:
            return self.untraced or "torch.fx does not see where it is called"
        if self._called_again(layer, ways):
            return "it is used more than once"
        nodes = [way.nodes[layer][0] for way in ways]
        if any(len(node.args) > 2 or "residual" in node.kwargs for node in nodes):
            return "it is called with a residual"
        if any(len(node.args) != 1 or node.kwargs for node in nodes):
            return "it is called with a mask"
        reasons = []
        for side in ("before", "behind"):
            if side == "behind" and fixed.activation is not None:
                reasons.append(f"what stands behind it takes its {fixed.activation}")
                continue
            found = {self._neighbour(node, side) for node in nodes}
            neighbour = found.pop()
            if found:
                neighbour = f"what stands {side} it depends on optional arguments"
            elif not isinstance(neighbour, str):
                why = self._refusal(neighbour, ways, layer) or self._misfit(neighbour, fixed, layer)
                neighbour = why or neighbour
            if not isinstance(neighbour, str):
                return neighbour
            reasons.append(neighbour)
        return "; ".join(reasons)

    def _called_again(self, module: nn.Module, ways: list[_Way]) -> bool:
        """Or in some way of calling the model not at all."""
        seen = 1 if self.calls is None else len(self.calls.get(module, ()))
        return self.uses[module] > 1 or seen != 1 or any(len(way.nodes.get(module, ())) != 1 for way in ways)

    def _neighbour(self, node: fx.Node, side: str) -> _Neighbour | str:
        """The module on one side, past what does nothing in eval; a sentence if there is none to fold into."""
        flattened, start = False, node
        between: list[nn.Module] = []
        while True:
            if side == "before":
                source = node.args[0]
                if not isinstance(source, fx.Node):
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
                node = user
            module = _module(node)
            if side == "behind" and not flattened and _flattens(node, module):
                flattened = True
            elif module is None or len(node.args) != 1 or node.kwargs:
                return f"{node.name} {side} it is no linear layer or convolution"
            elif type(module) not in _NOTHING_IN_EVAL or _hooked(module):
                if side == "behind" and _changes_in_place(start, node):
                    return f"something is changed in place before {node.name} behind it"
                return _Neighbour(side, module, tuple(between), flattened)
            if module is not None:
                between.append(module)

    def _refusal(self, neighbour: _Neighbour, ways: list[_Way], layer: BatchLayerNorm) -> str | None:
        """Why a module may not be changed, whatever the map."""
        module, flattened = neighbour.module, neighbour.flattened
        name = f"{self.names[module]} {neighbour.side} it"
        allowed = (nn.Linear,) if flattened else (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)
        if nn.utils.parametrize.is_parametrized(module):
            return f"{name} is parametrized"
        if type(module) not in allowed or "forward" in vars(module):
            return f"{name} is no linear layer or convolution" + (" that takes it flattened" if flattened else "")
        if self._called_again(module, ways):
            return f"{name} is used more than once"
        if _hooked(module):
            return f"{name} has hooks"
        if len({self._hooked_around(part) for part in (layer, *neighbour.between, module)}) > 1:
            return f"a module around it or {name} has hooks, which see what passes between"
        parameters = [p for p in module._parameters.values() if p is not None]
        if type(module._parameters.get("weight")) is not nn.Parameter or any(
            self.owners[id(p)] > 1 for p in parameters
        ):
            return f"{name} shares its weights, or they are not its own"
        if any(module in way.read for way in ways):
            return f"the weights of {name} are read elsewhere"
        if any(not p.is_floating_point() or p.dtype.itemsize < 4 for p in parameters):
            return f"{name} has less than float32 precision; freeze first, then move the model to a lower one"
        return None

    def _hooked_around(self, module: nn.Module) -> tuple[str, ...]:
        """The modules with hooks that this one lies in."""
        name = self.names[module]
        return tuple(n for m, n in self.names.items() if _hooked(m) and name.startswith(f"{n}.") and n)

    def _misfit(self, neighbour: _Neighbour, fixed: _FixedMap, layer: BatchLayerNorm) -> str | None:
        """Why this map does not go into that module exactly."""
        side, module = neighbour.side, neighbour.module
        name = f"{self.names[module]} {side} it"
        if neighbour.flattened:
            known = fixed.flattened(module.in_features)  # type: ignore[arg-type]
            return f"its positions do not fill the inputs of {name}" if known is None else None
        if fixed.uniform is None:
            return "it differs from position to position"
        rank = fixed.rank
        if rank is None and self.calls is not None and layer in self.calls:
            rank = self.calls[layer][0].rank
        if isinstance(module, nn.Linear):
            if fixed.channel_dim != -1 and rank is None:
                return f"{name} works on the last dimension, features may stand elsewhere: pass example="
            if rank is not None and fixed.channel_dim % rank != rank - 1:
                return f"{name} works on the last dimension, features stand elsewhere"
            return None
        dimensions = module.weight.dim()  # type: ignore[operator]
        if rank not in (None, dimensions) or fixed.channel_dim % dimensions != 1:
            return f"{name} works on dimension 1 of {dimensions}, features stand elsewhere"
        if side == "behind" and fixed.uniform[1].any() and not _constant_stays_constant(module):
            return f"{name} puts zeros between or around its inputs, which the shift would miss"
        return None


def _module(node: fx.Node) -> nn.Module | None:
    root = node.graph.owning_module
    return root.get_submodule(str(node.target)) if node.op == "call_module" and root is not None else None


def _changes_in_place(start: fx.Node, end: fx.Node) -> bool:
    """Whether anything between two nodes might: once the layer is gone, its output is its input's memory."""
    node = start.next
    while node is not end:
        name = str(getattr(node.target, "__name__", node.target))
        if (
            (name.endswith("_") and not name.endswith("__"))
            or (getattr(node.target, "__module__", "") == "_operator" and node.target is not operator.getitem)  # +=
            or any(given is True for given in (*node.args, *node.kwargs.values()))  # inplace=True, by whatever name
            or "out" in node.kwargs
            or getattr(_module(node), "inplace", False)
        ):
            return True
        node = node.next
    return False


def _hooked(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in HOOKS)


def _flattens(node: fx.Node, module: nn.Module | None) -> bool:
    """Everything but samples into one dimension."""
    if module is not None:
        return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1) and not _hooked(module)
    if node.target not in (torch.flatten, "flatten"):
        return False
    given = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
    return given in ({"start_dim": 1}, {"start_dim": 1, "end_dim": -1})


def _constant_stays_constant(module: nn.Module) -> bool:
    """Whether a convolution gives an input that is the same everywhere an output that is."""
    if isinstance(module, _CONVOLUTIONS):
        if module.padding_mode != "zeros" or module.padding == "valid":
            return True
        if module.padding == "same":
            return all(size == 1 for size in module.kernel_size)
        return not any(module.padding)
    ones = (*module.kernel_size, *module.stride)  # type: ignore[misc]
    return set(ones) == {1} and not any((*module.padding, *module.output_padding))  # type: ignore[misc]


def _take_in(neighbour: _Neighbour, fixed: _FixedMap) -> None:
    """Change a module's parameters, in float64; they are new objects, so that older references keep the old values."""
    module = neighbour.module
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    assert weight is not None
    groups = getattr(module, "groups", 1)
    transposed = isinstance(module, _TRANSPOSED)
    scale, shift = fixed.flattened(module.in_features) if neighbour.flattened else fixed.uniform  # type: ignore
    scale, shift = scale.to(weight.device), shift.to(weight.device)

    # (groups, inputs, outputs, *kernel) of a transposed convolution, else (groups, outputs, inputs, *kernel)
    taps = weight.double().reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    taps = taps.transpose(1, 2) if transposed else taps
    kernel = [1] * (taps.dim() - 3)
    new_bias = torch.zeros(taps.shape[0] * taps.shape[1]).to(taps) if bias is None else bias.double()
    if neighbour.side == "before":
        taps = taps * scale.reshape(groups, -1, 1, *kernel)
        new_bias = scale * new_bias + shift
    else:
        if shift.any():
            new_bias = new_bias + (taps * shift.reshape(groups, 1, -1, *kernel)).flatten(2).sum(2).flatten()
        taps = taps * scale.reshape(groups, 1, -1, *kernel)
    taps = (taps.transpose(1, 2) if transposed else taps).reshape(weight.shape)
    module.weight = nn.Parameter(torch.empty_like(weight).copy_(taps), requires_grad=weight.requires_grad)
    if bias is not None or new_bias.any():
        like = weight if bias is None else bias
        module.bias = nn.Parameter(new_bias.to(like.dtype), requires_grad=like.requires_grad)


# ---- what is called, and how


class _Way:
    """A graph of the model, or of a part of it, for one way of calling it."""

    def __init__(self, module: nn.Module, constants: dict[str, Any]) -> None:
        self.traced = fx.GraphModule(module, Tracer().trace(module, constants or None))
        self.nodes: dict[nn.Module, list[fx.Node]] = {}
        self.read: set[nn.Module] = set()
        """Modules whose parameters or buffers are used without calling them."""
        for node in self.traced.graph.nodes:
            if (called := _module(node)) is not None:
                self.nodes.setdefault(called, []).append(node)
            elif node.op == "get_attr":
                self.read.add(self.traced.get_submodule(str(node.target).rpartition(".")[0]))


@dataclass(frozen=True)
class _Arguments:
    """How a module was called: its first tensor's rank, and what was given that is not a tensor."""

    rank: int | None
    constants: dict[str, Any]


def _call(model: nn.Module, example: Any) -> Any:
    with torch.no_grad():
        if isinstance(example, Mapping):
            return model(**example)
        return model(*example) if isinstance(example, tuple) else model(example)


def _watch(model: nn.Module, example: Any) -> tuple[dict[nn.Module, list[_Arguments]], Any]:
    """Run the example, and note every call of every module."""
    calls: dict[nn.Module, list[_Arguments]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rank = next((value.dim() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        try:
            signature = inspect.signature(module.forward)
            bound = signature.bind(*args, **kwargs)
        except (TypeError, ValueError):  # no signature, as of a scripted module: then it cannot be traced either
            constants: dict[str, Any] = {}
        else:
            bound.apply_defaults()
            constants = {
                key: value
                for key, value in bound.arguments.items()
                if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
                and signature.parameters[key].kind
                not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            }
        calls.setdefault(module, []).append(_Arguments(rank, constants))

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        return calls, _call(model, example)
    except Exception as error:
        raise ValueError(
            f"the example does not run through the model ({error}); pass an input, a tuple of inputs or a dict of "
            "arguments"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def _trace(module: nn.Module, calls: dict[nn.Module, list[_Arguments]] | None) -> tuple[list[list[_Way]], str | None]:
    """Graphs of the model, each with every way it may be called; of its parts, where it cannot be traced as a whole.

    That a part is called as a whole, and its modules by nobody else, only an example shows. So without one there are
    no parts. Also returns why the model could not be traced.
    """
    if calls is not None and len(calls.get(module, ())) != 1:
        ways: list[dict[str, Any]] = []
        why = f"{type(module).__name__} is not called once"
    elif calls is not None:
        ways = [calls[module][0].constants]
    else:
        parameters = inspect.signature(module.forward).parameters.items()
        defaults = {name: p.default for name, p in parameters if p.default is not inspect.Parameter.empty}
        ways = [{}, defaults] if defaults else [{}]
    if ways:
        try:
            with _untouched(module), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return [[_Way(module, constants) for constants in ways]], None
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            hint = "" if calls is not None else "; pass example= to look at its parts"
            why = f"torch.fx cannot trace {type(module).__name__} ({reason}){hint}"
    if calls is None:
        return [], why
    parts = (child for child in module.children() if not isinstance(child, BatchLayerNorm))
    wanted = (part for part in parts if any(isinstance(m, BatchLayerNorm) for m in part.modules()))
    return [graphs for part in wanted for graphs in _trace(part, calls)[0]], why


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """No hooks, and attributes put back: whatever keeps a tensor would keep the tracer's stand-in for it."""
    before = [(part, dict(vars(part))) for part in module.modules()]
    for part, _ in before:
        vars(part).update({hooks: OrderedDict() for hooks in HOOKS})
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


def _difference(before: Any, after: Any) -> float:
    pairs = zip(tree_leaves(before), tree_leaves(after), strict=True)
    tensors = [(a.double(), b.double()) for a, b in pairs if isinstance(a, Tensor) and a.is_floating_point()]
    largest = max((a.abs().max().item() for a, _ in tensors if a.numel()), default=0.0)
    moved = max(((a - b).abs().max().item() for a, b in tensors if a.numel()), default=0.0)
    return moved / largest if largest else moved
