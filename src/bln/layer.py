"""``bln.BatchLayerNorm``, the layer: options, forward pass, state dict and representation."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from . import _backends, functional
from ._activation import Activation, check_activation, check_residual
from ._distributed.group import Group
from ._memory import Memory
from ._models import padding as _padding
from ._positions import sizes
from ._scripting import refuse_scripting
from ._spec import Spec, check_channel_dim, check_momentum, option, positive
from .config import StatisticsConfig
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
    ``1/m`` is the one remembered from training. Put the layer after the nonlinearity.

    With ``groups`` it is the form to use in convolutional nets: batch statistics are pooled over positions, as
    BatchNorm's, and feature statistics are those of a sample over a group of features and all positions, as
    GroupNorm's. In a sequence they see later positions too: do not use them in a causal model.

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
            ``"world"`` is the default group, once it is initialized. A rank may hold any number of samples, none
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
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    population: Population
    activation: Activation | None
    _memory: Memory | None

    groups: int | None = option("groups")
    per_position: bool = option("per_position")
    eps: float = option("eps")
    mix_eps: float = option("mix_eps")
    dim_scale: bool = option("dim_scale")

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
        self.num_features = num_features = positive("num_features must be", num_features)
        self.channel_dim = check_channel_dim("channel_dim", channel_dim, 1)
        check_momentum(momentum, "new")
        if isinstance(dtype, torch.dtype) and not (dtype.is_floating_point and dtype.itemsize > 1):
            raise ValueError(f"dtype must be float32, float64, bfloat16 or float16, got {dtype}")
        self.spec = spec = Spec.of(groups, per_position, eps, mix_eps, dim_scale)
        spec.check_features(num_features)
        positions = sizes(position_shape, spec.per_position)
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
    def config(self) -> StatisticsConfig:
        """The statistics ``eval()`` uses; assign a ``StatisticsConfig``, four letters, or priors too."""
        return self._config

    @config.setter
    def config(self, value: StatisticsConfig | str) -> None:
        self._config = StatisticsConfig.parse(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "activation":  # not a property, which nn.Module would bypass for a value that is a module
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
        return None if self._group is None else self._group.process_group

    @process_group.setter
    def process_group(self, value: ProcessGroup | Literal["world"] | None) -> None:
        self._group = None if value is None else Group(value)

    def forward(self, x: Tensor, mask: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Normalize ``x``; with ``mask`` true at real entries, hidden ones enter no statistic and come out 0.

        Without one, a mask given by ``bln.padding`` is used where it fits. The residual is added to what was
        normalized, before the activation.
        """
        if mask is None and _padding.is_active():
            return _padding.call_with_mask(self, x, partial(self._forward, residual=residual))
        if mask is None and self.training and self.spec.coefficients:
            y = _backends.train_quickly(self, x, residual)
            if y is not None:
                return y
        return self._forward(x, mask, residual)

    def _forward(self, x: Tensor, mask: Tensor | None, residual: Tensor | None = None) -> Tensor:
        group = self._group.resolve() if self.training and self._group is not None else None
        elsewhere = group is not None  # other ranks may have samples
        channel_dim = functional.check(
            x, mask, self.channel_dim, self.num_features,
            allow_empty=elsewhere or not self.training, allow_hidden=elsewhere,
        )  # fmt: skip
        check_residual(residual, x)
        call = x, self.weight, self.bias, mask, channel_dim, self.spec, self.population
        after: Any = {"residual": residual, "activation": self.activation}
        if self.training:
            return _backends.train(*call, self.momentum, group=group, **after)[0]
        recall = None if self._memory is None else self._memory.recall(x, mask, channel_dim, self.spec)
        return _backends.infer(*call, self.config, recall, **after)[0]

    def reset_statistics(self) -> None:
        """Forget the population: mean 0, variance 1. Positions stay known."""
        self.population.reset()

    def reset_parameters(self) -> None:
        """Set scale 1 and shift 0, and forget the population."""
        self.reset_statistics()
        for parameter, value in ((self.weight, 1), (self.bias, 0)):
            if parameter is not None:
                nn.init.constant_(parameter, value)

    def get_extra_state(self) -> Tensor:
        """Return the configuration's prior strengths, infinite for the population, so that state dicts hold it."""
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
        """Keep the configuration if the statistics will be refused; warn of the running statistics of a BatchNorm."""
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
        """Return features, positions, configuration, and every option that is not the default."""
        usual = Spec.of(self.groups, self.per_position, self.eps)
        options = [
            ("channel_dim", self.channel_dim, 1),
            ("groups", self.groups, None),
            ("per_position", self.per_position, self.groups is None),
            *[("position_shape", self.population.position_shape, ...)] * self.per_position,
            ("config", self.config, ...),
            ("eps", self.eps, 1e-4),
            ("mix_eps", self.mix_eps, usual.mix_eps),
            ("momentum", self.momentum, 0.1),
            ("dim_scale", self.dim_scale, usual.dim_scale),
            ("activation", self.activation, None),
            ("memory", self.memory and self.memory.samples, None),
            ("affine", self.weight is not None, True),
            ("bias", self.weight is None or self.bias is not None, True),
            ("process_group", self._group, None),
        ]
        shown = [f"{name}={value}" for name, value, default in options if value != default]
        return ", ".join([str(self.num_features), *shown])
