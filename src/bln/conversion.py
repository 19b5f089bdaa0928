"""Give a model BLN layers in place of its norms."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from . import _padding
from ._activation import MODULES, Activation
from ._spec import Spec
from .layer import BatchLayerNorm
from .model import HOOKS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_NORMS = (*_BATCH_NORMS, *_INSTANCE_NORMS, nn.LayerNorm, nn.GroupNorm)


def convert(
    model: nn.Module, *, groups: int = 8, process_group: ProcessGroup | Literal["world"] | None = None
) -> nn.Module:
    """Replace BatchNorm, LayerNorm, GroupNorm and InstanceNorm layers by BLN, in place.

    The function is kept, so a pretrained net gives the same outputs in ``eval()`` up to rounding:

    - BatchNorm, and InstanceNorm with running statistics: the grouped form. It takes the running statistics over and
      starts at ``1/m = 0``.
    - GroupNorm and InstanceNorm: the grouped form with the norm's own groups, at ``1/m = 1``.
    - LayerNorm over the features of each position: ``groups=None``, at ``1/m = 1``.

    ``mix_eps`` is 0, so that the other half has no weight; training then moves ``1/m`` to the truth. Parameters are
    the same objects as before, so an optimizer keeps working. Where ``momentum`` is ``None``, each mini-batch that a
    BatchNorm has seen counts as one of 32 samples, since it does not say how many there were. Samples must come first,
    as ever with BLN: build transformers with ``batch_first=True``.

    A norm of another class, such as a subclass with an activation in it, is run on random inputs. It is replaced if
    BLN computes the same, with what the norm holds behind it: a lone ReLU, SiLU or exact GELU becomes ``activation=``,
    anything else stays a module behind the layer. A warning names the norms that are left and why, norms
    whose hooks are gone, and a module that takes samples second; and says so if there is nothing to convert.

    Parts that are called with ``src_key_padding_mask``, ``tgt_key_padding_mask`` or, in Hugging Face's models,
    ``attention_mask`` get hooks that give it to the BLN layers inside, see ``bln.padding``: in training padding enters
    no statistic. In ``eval()`` they do so only where a configuration takes batch statistics from the mini-batch.
    Training warns once where such a mask does not reach what was a LayerNorm, as one outside of those parts.

    With ``process_group`` all BLN layers are synchronized over its ranks: those made here, and those that were there,
    which keep statistics, parameters and configuration.

    Args:
        model: Any module. If it is itself a norm, use what is returned.
        groups: As in ``BatchLayerNorm``, for what was a BatchNorm: the largest divisor of its features up to this.
        process_group: As in ``BatchLayerNorm``. ``None`` leaves BLN layers as they are, and gives those made of a
            ``SyncBatchNorm`` its group.

    Returns:
        The model.

    Examples:
        >>> import bln
        >>> from torch import nn
        >>> bln.convert(nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU()))
        Sequential(
          (0): Conv2d(3, 12, kernel_size=(3, 3), stride=(1, 1))
          (1): BatchLayerNorm(12, groups=6, config=TTFF, eps=1e-05)
          (2): ReLU()
        )
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch module, got {type(model).__name__}")
    if groups is None:
        raise ValueError("groups must be an integer of at least 1, got None; what is made of a BatchNorm has groups")
    Spec.of(groups)
    found, notes = replacements(model, groups)
    swap(model, found)
    converted = found.get(model, model)
    if not (notes or any(_layers(converted))):
        notes.append(
            f"{type(model).__name__} has no norms, and is as it was; bln.insert(model, example) puts BLN behind its "
            "nonlinearities"
        )
    for module in converted.modules():
        _leave_fast_path(module)
        if isinstance(module, BatchLayerNorm) and process_group is not None:
            module.process_group = process_group
    _padding.install(converted, lambda module: isinstance(module, BatchLayerNorm))
    if notes:
        warnings.warn("bln.convert:\n  " + "\n  ".join(notes), stacklevel=2)
    return converted


def replacements(
    model: nn.Module, groups: int, *, batch_norms: bool = False
) -> tuple[dict[nn.Module, nn.Module], list[str]]:
    """The BLN layer for each norm of a model, for batch norms alone if asked; and notes on what is left or lost."""
    found: dict[nn.Module, nn.Module] = {}
    notes: list[str] = []
    left: dict[str, list[str]] = {}
    like = next(chain(model.parameters(), model.buffers()), torch.empty(0))
    for path, module in model.named_modules():
        if not _looks_like_a_norm(module):
            continue
        name = path or "the model"
        if isinstance(module, _NORMS) and not module.eps > 0:
            raise ValueError(
                f"{name}: {_qualified(module)} has eps={module.eps}, which BLN cannot take over: it must be positive, "
                "as it keeps a constant feature from 0/0. Set one before, as in norm.eps = 1e-5"
            )
        rule = _find_rule(module, groups)
        if isinstance(rule, str):
            left.setdefault(f"left as it is, {_qualified(module)}: {rule}", []).append(name)
            continue
        if batch_norms and rule.kind != "batch":
            continue
        found[module] = _replace(module, rule, like)
        if any(getattr(module, hooks) for hooks in HOOKS):
            notes.append(f"{name}: its hooks stay with the {type(module).__name__} that was there; register them anew")
    for reason, names in left.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        notes.append(f"{', '.join(names[:3])}{more}: {reason}")
    if any(layer.channel_dim == -1 for new in found.values() for layer in _layers(new)):
        notes += _samples_second(model)
    return found, notes


def swap(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    """Put other modules in the places of some inside of a model."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in others:
                setattr(parent, name, others[child])


class NormAct(nn.Sequential):
    """A BLN layer as ``norm``, and behind it what the old norm held, under its old names.

    Attributes that it does not have are those of ``norm``: ``weight``, ``bias``, ``eps``, ``config``.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "norm":
                raise
            return getattr(self.norm, name)


# ---- which norm is what


class _Rule(NamedTuple):
    """The BLN layer that computes what a norm does."""

    kind: Literal["batch", "sample"]
    """Whether all weight is on batch statistics (``1/m = 0``) or on those of a sample (``1/m = 1``)."""
    features: int
    groups: int | None
    channel_dim: int = 1
    behind: tuple[str, ...] = ()
    """The children of the norm that are applied to what it computed, in this order."""


def _looks_like_a_norm(module: nn.Module) -> bool:
    """Whether it is a norm, or has the name or the attributes of one and nothing with weights in it."""
    if isinstance(module, _NORMS):
        return True
    kind = type(module)
    named = re.search(r"Norm([A-Z\d]|$)", kind.__name__) and not kind.__module__.startswith(
        "torch.nn.utils."
    )  # weights'
    built = any(hasattr(module, name) for name in ("running_mean", "normalized_shape", "num_groups"))
    if not (named or (built and _eps(module) is not None)) or any(_layers(module)):
        return False
    return not any(_looks_like_a_norm(child) or any(True for _ in child.parameters()) for child in module.children())


def _find_rule(norm: nn.Module, groups: int) -> _Rule | str:
    """How to replace a norm, or why that cannot be."""
    if isinstance(norm, nn.modules.lazy.LazyModuleMixin):
        return "it does not know its features yet; run the model once"
    for name in ("weight", "bias"):
        if isinstance(value := getattr(norm, name, None), Tensor) and not isinstance(value, nn.Parameter):
            frozen = name in norm._buffers
            way = (
                "a buffer, so it is frozen, and BLN would train"
                if frozen
                else "computed, as by pruning; make that permanent"
            )
            return f"its {name} is {way}"
    if isinstance(norm, nn.LayerNorm) and len(norm.normalized_shape) != 1:
        return f"normalized_shape={tuple(norm.normalized_shape)} spans more than the features of a position"
    features, eps = _features(norm), _eps(norm)
    if features is None:
        return "it has no weight, bias or running mean of one dimension, which BLN could take over"
    if eps is None:
        return _try(norm, [], features, 1e-5)
    rules = list(_candidates(norm, features, groups))
    plain = type(norm) in _NORMS and "forward" not in vars(norm)
    return rules[0] if plain else _try(norm, rules, features, eps)


def _candidates(norm: Any, features: int, groups: int) -> Iterator[_Rule]:
    """What a norm may be, the likeliest first."""
    # BatchNorm1d may stand behind a dense layer, where a group of one feature has nothing to normalize over.
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
def _try(norm: nn.Module, rules: list[_Rule], features: int, eps: float) -> _Rule | str:
    """The first rule by which BLN gives the norm's outputs on random inputs in ``eval()``."""
    random = torch.Generator("cpu").manual_seed(0)
    group = getattr(norm, "process_group", None)  # cannot be copied
    try:
        probe = copy.deepcopy(norm, {id(group): group}).to_empty(device="cpu").float().eval()
    except Exception as error:
        return f"it cannot be copied to try it ({error})"
    for hooks in HOOKS:
        getattr(probe, hooks).clear()
    for name, value in chain(probe.named_parameters(), probe.named_buffers()):
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=random, device="cpu", dtype=torch.float32) + 0.5)
        else:
            value.zero_()
        if name == "running_var":
            value[::2] *= eps  # so that another eps would show
    behind = tuple(sorted((n for n, m in probe.named_children() if type(m) is not nn.Identity), key="drop".__ne__))
    outputs: dict[int, list[tuple[Tensor, Any]]] = {1: [], -1: []}
    failure: Exception | None = None
    for channel_dim, pairs in outputs.items():
        for x in _inputs(features, channel_dim, eps, random):
            try:
                pairs.append((x, probe(x.clone())))
            except Exception as error:  # it takes other shapes
                failure = failure or error
    found = outputs[1] + outputs[-1]
    if not found:
        return f"it cannot be run on an input alone ({failure})"
    most = max(x.dim() for x, _ in found)  # (N, C) alone does not say where features stand
    for rule in rules:
        for held in dict.fromkeys((behind, ())):
            new = _replace(probe, rule := rule._replace(behind=held), torch.empty(0, device="cpu")).eval()
            pairs = outputs[rule.channel_dim]
            # A parameter that a rule would drop may matter in training.
            complete = {id(p) for p in new.parameters()} == {id(p) for p in probe.parameters()}
            if complete and any(x.dim() == most for x, _ in pairs) and all(_agrees(new, x, y) for x, y in pairs):
                return rule
    return _what_else(probe, found)


def _inputs(features: int, channel_dim: int, eps: float, random: torch.Generator) -> Iterator[Tensor]:
    """Inputs of all ranks, with one sample so small that eps shows; no other dimension is as long as features."""
    sizes = [size for size in (2, 3, 4, 5) if size != features][:3]
    for positions in (2, 1, 0, 3):
        shape = 3, *sizes[:positions], features
        x = torch.randn(shape, generator=random, device="cpu", dtype=torch.float32) + 0.3
        x[1] *= math.sqrt(eps)
        yield x.movedim(-1, channel_dim)


def _agrees(new: nn.Module, x: Tensor, y: Any) -> bool:
    try:
        return isinstance(y, Tensor) and _same(new(x.clone()), y)
    except Exception:  # what the norm holds is not for its output
        return False


def _same(new: Tensor, old: Tensor) -> bool:
    """Up to rounding of float32 in a dozen operations on values that may cancel."""
    return new.shape == old.shape and bool((new - old).abs().max() <= 1e-4 * old.abs().max())


def _what_else(probe: nn.Module, pairs: list[tuple[Tensor, Any]]) -> str:
    """Why no rule fits."""
    x, y = pairs[0]
    x = x[:1]  # a sample of usual size
    if isinstance(y, Tensor) and _same(probe(2 * x), probe(x.clone())) and not _same(probe(x + 1), probe(x.clone())):
        return "it subtracts no mean, as RMSNorm; BLN does"
    return "it computes no batch, layer, group or instance normalization with its own weight, bias and eps"


def _features(norm: Any) -> int | None:
    """The number of features, if parameters have one value for each."""
    tensors = [t for name in ("weight", "bias", "running_mean") if (t := getattr(norm, name, None)) is not None]
    if any(t.dim() != 1 for t in tensors):
        return None
    named = [getattr(norm, name, None) for name in ("num_features", "num_channels", "normalized_shape")]
    sizes = [len(t) for t in tensors] + [n[0] if isinstance(n, tuple) and len(n) == 1 else n for n in named]
    return next((n for n in sizes if isinstance(n, int)), None)


def _eps(norm: nn.Module) -> float | None:
    """The norm's eps under whatever name, if it is one for BLN."""
    found = [getattr(norm, name, None) for name in ("eps", "variance_epsilon", "epsilon")]
    return next((eps for eps in found if isinstance(eps, int | float) and 0 < eps < math.inf), None)


def _qualified(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


# ---- what takes its place


@torch.no_grad()
def _replace(norm: Any, rule: _Rule, like: Tensor) -> nn.Module:
    """BLN with the norm's parameters, eps, statistics and mode, and what the norm holds behind it.

    Running statistics become the population's. The next mini-batch weighs ``momentum`` against them, as it did before:
    nothing if that is 0. If it is ``None``, they are the average of so many mini-batches, whose sizes nobody wrote
    down: they are taken to be of 32 samples.
    """
    weight, bias, running_mean = (getattr(norm, name, None) for name in ("weight", "bias", "running_mean"))
    # Where the norm has no tensor, the layer is as the model's first.
    own = (t for t in (weight, running_mean) if t is not None)
    tensor = next(own, like if like.is_floating_point() else torch.empty(0, device=like.device))
    momentum = 0.1
    if rule.kind == "batch":
        momentum = getattr(norm, "momentum", 0.1)
        if isinstance(norm, _INSTANCE_NORMS):
            momentum = momentum or 0.0  # as torch takes None there
    activation = _activation([norm.get_submodule(name) for name in rule.behind])
    layer = BatchLayerNorm(
        rule.features,
        groups=rule.groups,
        channel_dim=rule.channel_dim,
        per_position=False,
        eps=_eps(norm) or 0.0,  # which is refused
        mix_eps=0.0,
        momentum=momentum,
        affine=weight is not None,
        bias=bias is not None,
        dim_scale=False,
        activation=activation,
        device=tensor.device,
        dtype=tensor.dtype,
    )
    layer.weight, layer.bias = weight, bias
    if isinstance(norm, nn.SyncBatchNorm):
        layer.process_group = norm.process_group or "world"
    population = layer.population
    if rule.kind == "sample":
        population.inverse_m.fill_(1)
        population.mark_seen(["inverse_m"], 1)
    else:
        forgotten = math.ceil(1 / max(momentum or 0.0, 2**-50))  # after so many mini-batches
        population.mark_seen(["inverse_m"], forgotten if momentum else 1)
        if running_mean is None:
            layer.config = "FFFF"
        else:
            population.batch_mean.copy_(running_mean)
            population.batch_var.copy_(norm.running_var)
            updates, m = (norm.num_batches_tracked, 32) if momentum is None else (forgotten, 1)
            population.mark_seen(["batch_mean", "batch_var"], updates, m)
    layer.train(norm.training)
    if activation is not None or not rule.behind:
        return layer
    new = NormAct()
    new.training = norm.training
    for name, child in (("norm", layer), *((name, norm.get_submodule(name)) for name in rule.behind)):
        setattr(new, name, child)  # add_module would find the norm's attributes, such as activation
    return new


def _activation(behind: list[nn.Module]) -> Activation | None:
    """The activation that all of these modules together are, if the layer has it."""
    if any(getattr(module, hooks) for module in behind for hooks in HOOKS):
        return None
    working = [module for module in behind if not (isinstance(module, _DROPOUTS) and module.p == 0)]
    if len(working) != 1 or any(True for _ in chain(working[0].parameters(), working[0].buffers())):
        return None
    name = type(working[0]).__name__.lower()
    x = torch.linspace(-20, 20, 401, device="cpu", dtype=torch.float32)
    for known, kind in MODULES.items():
        # By name and by result: libraries have classes of their own, and torch's GELU may be the approximate one.
        if name == known and torch.allclose(working[0](x.clone()), kind()(x), rtol=1e-5, atol=1e-6):
            return known
    return None


def _layers(module: nn.Module) -> Iterator[BatchLayerNorm]:
    return (m for m in module.modules() if isinstance(m, BatchLayerNorm))


def _samples_second(model: nn.Module) -> list[str]:
    """A note on the first module whose inputs have samples in the second dimension, if there is one."""
    for name, module in model.named_modules():
        attention = getattr(module, "self_attn", module)  # which a transformer's layer asks
        if getattr(attention, "batch_first", None) is False:
            return [
                f"{name or 'the model'}: {type(module).__name__} has batch_first=False, but BLN takes the first "
                "dimension for samples; build the model with batch_first=True"
            ]
    return []


def _leave_fast_path(module: nn.Module) -> None:
    """Keep a transformer from computing its fused layer norm in place of ours: it asks for weights, not for types."""
    if isinstance(module, nn.TransformerEncoderLayer) and isinstance(module.norm1, BatchLayerNorm):
        module.activation_relu_or_gelu = 0
    if isinstance(module, nn.TransformerEncoder) and any(
        isinstance(getattr(layer, "norm1", None), BatchLayerNorm) for layer in module.layers
    ):
        module.use_nested_tensor = False
