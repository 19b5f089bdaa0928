"""``bln.BatchLayerNorm``, the layer: options, forward, state dict, and what it shows of itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from . import _backends, functional
from ._activation import Activation, check_activation, check_residual, finish
from ._autograd import recomputing
from ._distributed.group import Group
from ._distributed.messages import Task, agree_on
from ._distributed.train import train as train_over_ranks
from ._masks import positions_of, samples_at
from ._memory import Memory
from ._models import padding as _padding
from ._positions import sizes
from ._scripting import refuse_scripting
from ._spec import Spec
from .config import StatisticsConfig
from .formula import Statistics
from .population import Population

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class BatchLayerNorm(nn.Module):
    """Batch Layer Normalization: batch and layer normalization, mixed by the inverse of the mini-batch size.

    An activation is seen as ``x[n, p, k]``: sample ``n`` of ``m``, position ``p`` (pixel, time step), feature ``k`` of
    ``d``. In training

        x_B = (x - mean_B) / sqrt(var_B + eps)
        x_F = (x - mean_F) / sqrt(var_F + eps)
        y   = gamma * [(1 - 1/m - mix_eps) * x_B + (1/m - mix_eps) * x_F] / sqrt(d) + beta

    where ``mean_B``, ``var_B`` are mean and biased variance over samples, one for each position and feature, and
    ``mean_F``, ``var_F`` those over features, one for each sample and position. Population statistics are averaged on
    the way. In ``eval()`` each of the four is the population's or the current mini-batch's, as ``config`` says, and
    ``1/m`` is the one remembered from training. Put the layer behind the nonlinearity.

    With ``groups`` it is the form to use in convolutional nets: batch statistics are pooled over positions, as
    BatchNorm's, and feature statistics are those of a sample over a group of features and all positions, as
    GroupNorm's. At ``m = 1`` it is GroupNorm, and as ``1/m`` goes to 0 it becomes BatchNorm. In a sequence such
    statistics see all positions, later ones too: do not use them in a causal model.

    Args:
        num_features: ``C``, the number of features (the paper's d).
        groups: Feature statistics over this many groups of features, and over positions. ``None`` is the paper's layer.
        channel_dim: Where features stand: 1 for ``(N, C, *positions)``, -1 for ``(N, *positions, C)``.
        per_position: Batch statistics for each position, the default without ``groups``. ``False`` pools them over
            positions, as ``BatchNorm2d`` does, and takes any image size or sequence length.
        position_shape: The positions (``(28, 28)``, ``80``) to keep statistics for. ``None`` learns them from the
            first training mini-batch. Shorter sequences use the first positions.
        eps: Added to both variances.
        mix_eps: The epsilon of the mixing weights; ``None`` is ``eps``, with ``groups`` 0.
        momentum: The weight of a new mini-batch in the population statistics, as in ``BatchNorm2d``. ``None``
            averages all since the last reset. Population variances are unbiased: they carry ``m / (m - 1)``.
        affine: Learn a scale (``weight``, gamma) and, with ``bias``, a shift (``bias``, beta) for each feature.
        bias: With ``affine``, learn a shift.
        config: The statistics ``eval()`` uses, for E_B, Std_B, E_F, Std_F: ``T`` population, ``F`` current. With
            ``TT..`` a prediction does not depend on the rest of its batch.
        dim_scale: Divide by the root of ``num_features``, as the paper does; the default without ``groups``.
        activation: ``"relu"``, ``"silu"`` or ``"gelu"`` (the exact one) computes ``g(BLN(x))``, and with a residual
            ``g(BLN(x) + residual)``, as the blocks of residual nets do. The grouped form on a GPU does so in the same
            pass. ``None`` leaves the output as it is.
        process_group: In training, take batch statistics and ``m`` over all ranks of this ``torch.distributed`` group;
            ``"world"`` is the default group, once there is one. A rank may hold any number of samples, none
            included. In ``eval()`` ranks do not talk: current statistics are those of the rank's own batch.
        device: Of parameters and statistics.
        dtype: Of the parameters; statistics are float64 where this is, else float32.

    Shape:
        ``(N, C)``, ``(N, C, *positions)`` or, with ``channel_dim=-1``, ``(N, *positions, C)``; the output has the
        input's shape and type. ``mask``: ``(N, *positions)``, boolean, true at real entries. ``residual``: the input's
        shape.

    Examples:
        >>> import torch, bln
        >>> layer = bln.BatchLayerNorm(16)
        >>> y = layer(torch.randn(25, 16, 8, 8))
        >>> layer.config = "FTFF"
        >>> y = layer.eval()(torch.randn(1, 16, 8, 8))
        >>> layer
        BatchLayerNorm(16, position_shape=(8, 8), config=FTFF)
        >>> bln.BatchLayerNorm(16, groups=8)(torch.randn(4, 16, 8, 8)).shape
        torch.Size([4, 16, 8, 8])

        The end of a residual block, ``relu(BLN(x) + shortcut)``:

        >>> shortcut = torch.randn(4, 16, 8, 8)
        >>> end = bln.BatchLayerNorm(16, groups=8, activation="relu")
        >>> bool((end(torch.randn(4, 16, 8, 8), residual=shortcut) >= 0).all())
        True
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    population: Population
    activation: Activation | None
    _memory: Memory | None
    _agreed = False  # with the other ranks, on positions

    def __init__(
        self,
        num_features: int,
        *,
        groups: int | None = None,
        channel_dim: int = 1,
        per_position: bool | None = None,
        position_shape: int | tuple[int, ...] | None = None,
        eps: float = 1e-4,
        mix_eps: float | None = None,
        momentum: float | None = 0.1,
        affine: bool = True,
        bias: bool = True,
        config: StatisticsConfig | str = "TTFF",
        dim_scale: bool | None = None,
        activation: Activation | None = None,
        process_group: ProcessGroup | Literal["world"] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(num_features, SupportsIndex) or index(num_features) < 1:
            raise ValueError(f"num_features must be an integer of at least 1, got {num_features!r}")
        if not isinstance(channel_dim, SupportsIndex) or index(channel_dim) == 0:
            raise ValueError(
                f"channel_dim must be 1, or -1 for features last, got {channel_dim!r}; 0 is that of samples"
            )
        if isinstance(dtype, torch.dtype) and not (dtype.is_floating_point and dtype.itemsize > 1):
            raise ValueError(f"dtype must be float32, float64, bfloat16 or float16, got {dtype}")
        spec = Spec.of(groups, per_position, eps, mix_eps, dim_scale)
        if momentum is not None and not (isinstance(momentum, int | float) and 0 <= momentum <= 1):
            raise ValueError(f"momentum must be None (plain average) or in [0, 1], got {momentum!r}")
        positions = sizes(position_shape, spec.per_position)

        self.num_features = num_features = index(num_features)
        spec.check_features(num_features)
        self.channel_dim = index(channel_dim)
        self.spec = spec
        self.momentum = momentum
        self.config = config
        self.activation = activation
        self.register_module("_memory", None)
        self.process_group = process_group
        for name, wanted in (("weight", affine), ("bias", affine and bias)):
            parameter = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(name, parameter)
        self.population = Population(num_features, positions if spec.per_position else (), device, dtype, spec.groups)
        self.reset_parameters()

    @property
    def groups(self) -> int | None:
        """The groups of feature statistics; ``None`` for the published form."""
        return self.spec.groups

    @property
    def per_position(self) -> bool:
        """Whether batch statistics are kept for each position."""
        return self.spec.per_position

    @property
    def eps(self) -> float:
        """What is added to both variances."""
        return self.spec.eps

    @property
    def mix_eps(self) -> float:
        """The epsilon of the mixing weights."""
        return self.spec.mix_eps

    @property
    def dim_scale(self) -> bool:
        """Whether the output is divided by the root of the number of features."""
        return self.spec.dim_scale

    @property
    def config(self) -> StatisticsConfig:
        """The statistics ``eval()`` uses; assign a ``StatisticsConfig``, four letters, or priors too."""
        return self._config

    @config.setter
    def config(self, value: StatisticsConfig | str) -> None:
        self._config = StatisticsConfig.parse(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "activation":  # no property: nn.Module passes that by where the value is a module
            check_activation(value)
        super().__setattr__(name, value)

    @property
    def memory(self) -> Memory | None:
        """Batch statistics of recent requests, which in ``eval()`` join the current ones; ``None`` for none.

        Assign the samples to remember at most, or ``None``.
        """
        return self._memory

    @memory.setter
    def memory(self, samples: int | None) -> None:
        if samples is not None and self.population.position_shape is None:
            raise ValueError(
                "the layer does not know its positions yet, so it cannot remember requests; run a training batch, or "
                "pass position_shape="
            )
        self._memory = None if samples is None else Memory(self.population, samples)

    @property
    def process_group(self) -> ProcessGroup | Literal["world"] | None:
        """The ranks that training takes statistics over; assign ``None`` for this process alone."""
        return None if self._group is None else self._group.given

    @process_group.setter
    def process_group(self, value: ProcessGroup | Literal["world"] | None) -> None:
        self._group = None if value is None else Group(value)

    def forward(self, x: Tensor, mask: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Normalize ``x``; with ``mask`` true at real entries, hidden ones enter no statistic and come out 0.

        Without one, a mask given by ``bln.padding`` is used where it fits. The residual is added to what was
        normalized, before the activation.
        """
        if mask is None:
            if _padding.known():
                return _padding.normalize(self, x, partial(self._forward, residual=residual))
            # A trace must not read ``quick``: it would guard it, and may set it later.
            if not is_compiling() and _backends.quick is not None and self.training and self.spec.coefficients:
                y = _backends.quick(self, x, residual)
                if y is not None:
                    return y
        return self._forward(x, mask, residual)

    def _forward(self, x: Tensor, mask: Tensor | None, residual: Tensor | None = None) -> Tensor:
        group = self._group.resolve() if self.training and self._group is not None else None
        shared = group is not None and group.size() > 1
        channel_dim = functional.check(x, mask, self.channel_dim, empty=shared or not self.training, hidden=shared)
        self._check_features(x, channel_dim)
        check_residual(residual, x)
        tensors = x, self.weight, self.bias, mask, channel_dim, self.spec
        after: Any = {"residual": residual, "activation": self.activation}
        if not self.training:
            return _backends.infer(*tensors, self.population, self.config, recall=self._recall(*tensors), **after)[0]
        if shared:
            y = self._synchronized(x, mask, channel_dim, group)  # type: ignore[arg-type]
            return finish(y, residual, mask, channel_dim, self.activation)
        y, statistics = _backends.train(*tensors, population=self.population, momentum=self.momentum, **after)
        if statistics is not None and not recomputing():
            self.population.update_from(x, mask, channel_dim, self.spec, statistics, self.momentum)
        return y

    def _check_features(self, x: Tensor, channel_dim: int) -> None:
        """Refuse an input with another number of features."""
        if x.shape[channel_dim] != self.num_features:
            raise ValueError(
                f"expected {self.num_features} features along dimension {channel_dim}, got {x.shape[channel_dim]} in "
                f"an input of shape {tuple(x.shape)}. If features stand elsewhere, pass channel_dim="
            )

    def _recall(
        self, x: Tensor, _: Any, __: Any, mask: Tensor | None, channel_dim: int, spec: Spec
    ) -> Callable[[Statistics], Statistics] | None:
        """What joins the statistics of a request with those remembered; ``None`` for a layer without memory."""
        if self._memory is None:
            return None
        m, positions = samples_at(x, mask, channel_dim, spec)
        return partial(self._memory.join, m=m, positions=positions)

    def _synchronized(self, x: Tensor, mask: Tensor | None, channel_dim: int, group: ProcessGroup) -> Tensor:
        """Training on the samples of all ranks."""
        kept = self.population.positions_for(positions_of(x, channel_dim, self.spec))
        if self.per_position and not self._agreed and not is_compiling():
            agree_on(kept, group, x.device)
            self._agreed = True
        return train_over_ranks(
            x,
            self.weight,
            self.bias,
            mask,
            Task(channel_dim, self.spec, kept, group, self.population.batch_mean.dtype),
            population=self.population,
            momentum=self.momentum,
            learning=not recomputing(),
        )

    def reset_statistics(self) -> None:
        """Forget the population: mean 0, variance 1. Positions stay known."""
        self.population.reset()

    def reset_parameters(self) -> None:
        """Scale 1, shift 0, and no population."""
        self.reset_statistics()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def get_extra_state(self) -> Tensor:
        """The configuration's prior strengths, infinite for the population: a searched model is loaded as found."""
        return torch.tensor(self.config.priors, dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Take the configuration from a state dict."""
        if isinstance(state, Tensor) and state.is_meta:
            return
        priors = state.tolist() if isinstance(state, Tensor) else state
        if not (isinstance(priors, list) and len(priors) == 4 and all(isinstance(p, float) and p >= 0 for p in priors)):
            raise ValueError(
                "the state dict's configuration must be four prior strengths, numbers from 0 (current mini-batch) to "
                f"infinity (population), got {state!r}"
            )
        self.config = StatisticsConfig.of(priors)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Keep the configuration where the statistics will be refused; say what a BatchNorm's are good for."""
        if prefix + "running_mean" in state_dict:
            warnings.warn(
                f"{prefix}running_mean is a BatchNorm's: load that checkpoint into the model as it was, then call "
                "bln.convert(model), which takes its statistics over",
                stacklevel=2,
            )
        if self.population.refusal(state_dict, prefix + "population."):
            state_dict[prefix + "_extra_state"] = self.get_extra_state()
        super()._load_from_state_dict(state_dict, prefix, *args)

    __prepare_scriptable__ = refuse_scripting

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        """What was chosen: features, positions, configuration, and whatever is not a default."""
        shown = [str(self.num_features)]
        if self.channel_dim != 1:
            shown.append(f"channel_dim={self.channel_dim}")
        if self.groups is not None:
            shown.append(f"groups={self.groups}")
        if self.per_position:
            shown += ["per_position=True"] * (self.groups is not None)
            shown.append(f"position_shape={self.population.position_shape}")
        elif self.groups is None:
            shown.append("per_position=False")
        shown.append(f"config={self.config}")
        usual = {**Spec.of(self.groups, self.per_position, self.eps)._asdict(), "eps": 1e-4, "momentum": 0.1}
        for name in ("eps", "mix_eps", "momentum", "dim_scale"):
            if (value := getattr(self, name)) != usual[name]:
                shown.append(f"{name}={value}")
        if self.activation is not None:
            shown.append(f"activation={self.activation}")
        if self.memory is not None:
            shown.append(f"memory={self.memory.samples}")
        if self.weight is None:
            shown.append("affine=False")
        elif self.bias is None:
            shown.append("bias=False")
        if self._group is not None:
            shown.append(f"process_group={self._group!r}")
        return ", ".join(shown)
