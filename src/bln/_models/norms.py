"""Find and build the BLN layer that computes the same as a norm."""

from __future__ import annotations

import copy
import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .._activation import MODULES, Activation
from ..layer import BatchLayerNorm
from .layers import HOOKS, hooked, layers

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
NORMS = (*_BATCH_NORMS, *_INSTANCE_NORMS, nn.LayerNorm, nn.GroupNorm)


# ---- finding the rule


class _Rule(NamedTuple):
    """The BLN layer that computes the same as a norm."""

    kind: Literal["batch", "sample"]
    """Which statistics have all the weight: the batch's (``1/m = 0``) or the sample's (``1/m = 1``)."""
    features: int
    groups: int | None
    channel_dim: int = 1
    following: tuple[str, ...] = ()
    """The children of the norm that are applied to its result, in this order."""


def looks_like_a_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, or has the name or attributes of one and contains no weights but its own."""
    if isinstance(module, NORMS):
        return True
    kind = type(module)
    weights = kind.__module__.startswith("torch.nn.utils.")  # that those norms normalize
    named = re.search(r"Norm([A-Z\d]|$)", kind.__name__) and not weights
    built = any(hasattr(module, name) for name in ("running_mean", "normalized_shape", "num_groups"))
    if not (named or (built and _eps(module) is not None)) or layers(module):
        return False
    return not any(looks_like_a_norm(child) or list(child.parameters()) for child in module.children())


def find_rule(norm: nn.Module, groups: int) -> _Rule | str:
    """Return the rule by which a norm can be replaced, or why there is none."""
    if isinstance(norm, nn.modules.lazy.LazyModuleMixin):
        return "it does not know its features yet; run the model once"
    for name in ("weight", "bias"):
        if isinstance(value := getattr(norm, name, None), Tensor) and not isinstance(value, nn.Parameter):
            if name in norm._buffers:
                return f"its {name} is a buffer, so it is frozen, and BLN would train"
            return f"its {name} is computed, as by pruning; make that permanent"
    if isinstance(norm, nn.LayerNorm) and len(norm.normalized_shape) != 1:
        return f"normalized_shape={tuple(norm.normalized_shape)} spans more than the features of a position"
    if isinstance(norm, NORMS) and not norm.eps > 0:
        return f"its eps={norm.eps} lets a constant feature be 0/0; set one before, as in norm.eps = 1e-5"
    features, eps = _features(norm), _eps(norm)
    if features is None:
        return "it has no weight, bias or running mean of one dimension, which BLN could take over"
    rules = [] if eps is None else list(_candidates(norm, features, groups))
    plain = type(norm) in NORMS and "forward" not in vars(norm)
    return rules[0] if plain else _verify(norm, rules, eps or 1e-5, features)


def _candidates(norm: Any, features: int, groups: int) -> Iterator[_Rule]:
    """Yield the rules that may fit a norm, the likeliest first."""
    # BatchNorm1d may follow a dense layer, where a group of one feature has nothing to normalize over.
    most = max(1, features // 2) if isinstance(norm, nn.BatchNorm1d) else features
    divisor = max(g for g in range(1, min(groups, most) + 1) if features % g == 0)
    tracked = getattr(norm, "running_mean", None) is not None
    instance = isinstance(norm, _INSTANCE_NORMS)
    for channel_dim in (-1, 1) if isinstance(norm, nn.LayerNorm) else (1, -1):
        if tracked or isinstance(norm, _BATCH_NORMS):
            yield _Rule("batch", features, divisor, channel_dim)
        own = getattr(norm, "num_groups", features if instance else None)
        if isinstance(own, int) and own >= 1 and features % own == 0:
            yield _Rule("sample", features, own, channel_dim)
        if not tracked:
            for whole in (None, 1, features):
                yield _Rule("sample", features, whole, channel_dim)


@torch.no_grad()
def _verify(norm: nn.Module, rules: list[_Rule], eps: float, features: int) -> _Rule | str:
    """Return the first rule by which BLN has the norm's outputs on random inputs, in ``eval()``, or why none does."""
    random = torch.Generator("cpu").manual_seed(0)
    group = getattr(norm, "process_group", None)  # cannot be copied
    try:
        probe = copy.deepcopy(norm, {id(group): group}).to_empty(device="cpu").float().eval()
    except Exception as error:
        return f"it cannot be copied to try it ({error})"
    for hooks in HOOKS:
        getattr(probe, hooks).clear()
    for name, value in chain(probe.named_parameters(), probe.named_buffers()):
        value.zero_()
        if value.is_floating_point():
            value += torch.rand(value.shape, generator=random, device="cpu", dtype=torch.float32) + 0.5
        if name == "running_var":
            value[::2] *= eps  # so that another eps would show
    following = tuple(sorted((n for n, m in probe.named_children() if type(m) is not nn.Identity), key="drop".__ne__))
    outputs, failures = list[tuple[int, Tensor, Any]](), list[Exception]()
    for channel_dim in (1, -1):
        for x in _inputs(features, channel_dim, eps, random):
            try:
                outputs.append((channel_dim, x, probe(x.clone())))
            except Exception as error:  # it takes other shapes
                failures.append(error)
    if not outputs:
        return f"it cannot be run on an input alone ({failures[0]})"
    most = max(x.dim() for _, x, _ in outputs)  # (N, C) alone does not say where features stand
    for rule in (rule._replace(following=following) for rule in rules):
        new = build(probe, rule, torch.empty(0, device="cpu")).eval()
        pairs = [(x, y) for channel_dim, x, y in outputs if channel_dim == rule.channel_dim]
        # A parameter that a rule would drop may matter in training.
        complete = {id(p) for p in new.parameters()} == {id(p) for p in probe.parameters()}
        if complete and any(x.dim() == most for x, _ in pairs) and all(_agrees(new, x, y) for x, y in pairs):
            return rule
    x = outputs[0][1][:1]  # a sample of usual size
    y = probe(x.clone())
    if isinstance(y, Tensor) and _agrees(probe, 2 * x, y) and not _agrees(probe, x + 1, y):
        return "it subtracts no mean, as RMSNorm; BLN does"
    return "it computes no batch, layer, group or instance normalization with its own weight, bias and eps"


def _inputs(features: int, channel_dim: int, eps: float, random: torch.Generator) -> Iterator[Tensor]:
    """Yield inputs of all ranks. In one sample eps matters, and no other dimension has the size of the features."""
    sizes = [size for size in (2, 3, 4, 5) if size != features][:3]
    for positions in (2, 1, 0, 3):
        shape = 3, *sizes[:positions], features
        x = torch.randn(shape, generator=random, device="cpu", dtype=torch.float32) + 0.3
        x[1] *= math.sqrt(eps)
        yield x.movedim(-1, channel_dim)


def _agrees(new: nn.Module, x: Tensor, y: Any) -> bool:
    """Whether an output is ``y`` up to rounding: float32, a dozen operations, values that may cancel."""
    try:
        output = new(x.clone())
    except Exception:  # a module of the norm may not take its output
        return False
    return isinstance(y, Tensor) and output.shape == y.shape and bool((output - y).abs().max() <= 1e-4 * y.abs().max())


def _features(norm: Any) -> int | None:
    """Return the number of features, if each parameter has one value per feature."""
    tensors = [t for name in ("weight", "bias", "running_mean") if (t := getattr(norm, name, None)) is not None]
    if any(t.dim() != 1 for t in tensors):
        return None
    named = [getattr(norm, name, None) for name in ("num_features", "num_channels", "normalized_shape")]
    sizes = [len(t) for t in tensors] + [n[0] if isinstance(n, tuple) and len(n) == 1 else n for n in named]
    return next((n for n in sizes if isinstance(n, int)), None)


def _eps(norm: nn.Module) -> float | None:
    """Return the norm's eps, under any of its usual names, if BLN can take it over."""
    values = [getattr(norm, name, None) for name in ("eps", "variance_epsilon", "epsilon")]
    return next((eps for eps in values if isinstance(eps, int | float) and 0 < eps < math.inf), None)


def qualified_name(module: nn.Module) -> str:
    """Return the name of a module's class, with that of its Python module."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


# ---- building the layer


@torch.no_grad()
def build(norm: Any, rule: _Rule, like: Tensor) -> nn.Module:
    """Build BLN with the norm's parameters, eps, statistics and mode, followed by the norm's modules.

    Running statistics become the population's. The next mini-batch has the weight ``momentum``, as before. If that is
    ``None``, they are the average of ``num_batches_tracked`` mini-batches, of one without it, taken to be of 32
    samples.
    """
    weight, bias, running_mean = (getattr(norm, name, None) for name in ("weight", "bias", "running_mean"))
    # A norm without tensors takes device and type of the model's first.
    own = (t for t in (weight, running_mean) if t is not None)
    tensor = next(own, like if like.is_floating_point() else torch.empty(0, device=like.device))
    momentum = getattr(norm, "momentum", 0.1) if rule.kind == "batch" else 0.1
    if isinstance(norm, _INSTANCE_NORMS):
        momentum = momentum or 0.0  # torch's meaning of None there
    following = {name: norm.get_submodule(name) for name in rule.following}
    activation = _activation(following.values())
    layer = BatchLayerNorm(
        rule.features, groups=rule.groups, channel_dim=rule.channel_dim, per_position=False, dim_scale=False,
        eps=_eps(norm) or 0.0, mix_eps=0.0, momentum=momentum, affine=weight is not None, bias=bias is not None,
        activation=activation, device=tensor.device, dtype=tensor.dtype,
    )  # fmt: skip
    layer.weight, layer.bias = weight, bias
    if isinstance(norm, nn.SyncBatchNorm):
        layer.process_group = norm.process_group or "world"
    population = layer.population
    if rule.kind == "sample":
        population.inverse_m.fill_(1)
        population.mark_seen(["inverse_m"], 1)
    else:
        forgotten = math.ceil(1 / max(momentum or 0.0, 2**-50))  # mini-batches
        population.mark_seen(["inverse_m"], forgotten if momentum else 1)
        if running_mean is None:
            layer.config = "FFFF"
        else:
            population.batch_mean.copy_(running_mean)
            population.batch_var.copy_(norm.running_var)
            counted = getattr(norm, "num_batches_tracked", None)
            updates, m = (1 if counted is None else counted, 32) if momentum is None else (forgotten, 1)
            population.mark_seen(["batch_mean", "batch_var"], updates, m)
    layer.train(norm.training)
    if activation is not None or not rule.following:
        return layer
    new = nn.Sequential(OrderedDict[str, nn.Module](norm=layer, **following))
    new.training = norm.training
    return new


def _activation(following: Iterable[nn.Module]) -> Activation | None:
    """Return the activation that these modules compute together, if the layer has it."""
    working = [m for m in following if hooked(m) or not (isinstance(m, _DROPOUTS) and m.p == 0)]
    if len(working) != 1 or hooked(working[0]):
        return None
    # By name and by result: libraries have classes of their own, and torch's GELU may be the approximate one.
    name: Any = type(working[0]).__name__.lower()
    x = torch.linspace(-20, 20, 401, device="cpu", dtype=torch.float32)
    same = name in MODULES and torch.allclose(working[0](x.clone()), MODULES[name]()(x), rtol=1e-5, atol=1e-6)
    return name if same else None
