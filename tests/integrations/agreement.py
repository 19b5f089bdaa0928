"""What a layer of another framework has to agree on with the oracle and with the torch layer."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

import bln
import oracle
import tolerance

CONFIGS = [*map(str, bln.StatisticsConfig.all()), "16 16 F F", "F 2 T 0.5", "3 T 1 F"]
SHAPES = {
    "dense": ((6, 6), -1),
    "sequence": ((5, 7, 4), -1),
    "features first": ((5, 4, 3), 1),
    "image": ((4, 3, 2, 6), -1),
    "features between": ((3, 2, 6, 4), 2),
    "single sample": ((1, 3, 4), -1),
    "single feature": ((4, 3, 1), -1),
}
FORMS = {
    "published": {"per_position": True},
    "pooled": {"per_position": False},
    "grouped": {"per_position": False, "groups": 2},
    "one group": {"per_position": False, "groups": 1},
    "grouped, per position": {"per_position": True, "groups": 2},
}
FLOAT = torch.float32
# Every form with every shape, history and kind of value would take an hour of compiling; these meet every line.
FEW = ("one group", "grouped, per position")
CASES = [
    (shape, form) for shape in SHAPES for form in FORMS if form not in FEW or shape in ("sequence", "features between")
]
HISTORIES = [(momentum, form) for momentum in (None, 0.1, 0.7, 0.0, 1.0) for form in ("published", "pooled")]
HISTORIES += [(momentum, form) for momentum in (None, 0.1) for form in ("grouped", "grouped, per position")]
NOT_FINITE = [(bad, form) for bad in (np.nan, np.inf, -np.inf, 3e38) for form in ("published", "pooled")]
NOT_FINITE += [(bad, form) for bad in (np.nan, 3e38) for form in ("grouped", "grouped, per position")]


def options_of(form: str, d: int) -> dict[str, Any]:
    """What a layer of ``d`` features is made with: as published with other epsilons, or as by default with groups."""
    chosen = FORMS[form]
    if "groups" not in chosen:
        return {**chosen, "groups": None, "eps": 1e-3, "mix_eps": 1e-4, "dim_scale": True}
    return {**chosen, "groups": min(d, chosen["groups"]), "eps": 1e-3, "mix_eps": 0.0, "dim_scale": False}


def numeric(options: dict[str, Any]) -> dict[str, Any]:
    """What the formula takes beside the statistics."""
    return {name: value for name, value in options.items() if name != "per_position"}


def inferring(options: dict[str, Any]) -> dict[str, Any]:
    """What an oracle's population, which knows its groups, takes."""
    return {name: value for name, value in options.items() if name != "groups"}


class Framework(Protocol):
    """A layer seen through NumPy."""

    def make(self, features: int, *, channel_dim: int, **options: Any) -> Any:
        """A layer; options are named and meant as in torch, momentum being the weight of the new value."""

    def set_parameters(self, layer: Any, gamma: np.ndarray, beta: np.ndarray) -> None: ...

    def train(self, layer: Any, x: np.ndarray, mask: np.ndarray | None) -> np.ndarray: ...

    def train_backward(self, layer: Any, x: np.ndarray, dy: np.ndarray, mask: np.ndarray | None) -> tuple[Any, ...]:
        """y and the gradients of x, gamma and beta."""

    def infer(self, layer: Any, x: np.ndarray, mask: np.ndarray | None) -> np.ndarray: ...

    def get(self, layer: Any, name: str) -> np.ndarray: ...


def mini_batch(rng, shape, channel_dim, masked):
    """An input in the user's layout, its mask, and the rows the oracle takes."""
    x = (rng.normal(size=shape) * rng.uniform(0.5, 2) + rng.normal()).astype(np.float32)
    mask = None
    if masked:
        positions = np.moveaxis(x, channel_dim, -1).shape[:-1]
        mask = rng.random(positions) < 0.7
        mask.flat[rng.integers(mask.size)] = True
        x = np.where(np.expand_dims(mask, channel_dim), x, np.float32(rng.choice([0, np.nan, np.inf])))
    return x, mask, np.moveaxis(x, channel_dim, -1).astype(np.float64)


def check_layer(framework: Framework, rng, shape, channel_dim, form, masked):
    """Training output, gradients, population statistics and all 16 configurations, over three mini-batches."""
    d = shape[channel_dim]
    options = options_of(form, d)
    per_position, groups = options["per_position"], options["groups"]
    gamma, beta = (rng.normal(size=d).astype(np.float32) for _ in range(2))
    layer = framework.make(d, channel_dim=channel_dim, **options)
    ours = bln.BatchLayerNorm(d, channel_dim=channel_dim, **options)
    positions = tuple(np.delete(shape, [0, channel_dim % len(shape)])) if per_position else ()
    expected = oracle.Population(positions, d, groups)
    size = 0.0
    for step in range(3):
        x, mask, rows = mini_batch(rng, shape, channel_dim, masked)
        dy = rng.normal(size=shape).astype(np.float32)
        if step == 0:
            framework.train(layer, x, mask)  # builds it
            framework.set_parameters(layer, gamma, beta)
            ours(torch.tensor(x), None if mask is None else torch.tensor(mask))
            ours.weight.data, ours.bias.data = torch.tensor(gamma), torch.tensor(beta)
            expected.update(rows, 0.1, mask, per_position)
        _check_training(framework, layer, ours, x, dy, mask, rows, gamma, beta, options)
        expected.update(rows, 0.1, mask, per_position)
        size = max(size, np.abs(rows if mask is None else rows[mask]).max())
    check_population(framework, layer, expected, size)
    assert framework.get(layer, "updates").tolist() == ours.population.updates.tolist()
    assert framework.get(layer, "samples").tolist() == ours.population.samples.tolist()

    # From the very same population on, so that inference is compared and not the rounding of averages.
    for name, theirs in oracle.NAMES.items():
        value = framework.get(layer, name)
        setattr(expected, theirs, value.astype(np.float64))
        getattr(ours.population, name).copy_(torch.tensor(value))
    ours.eval()
    x, mask, rows = mini_batch(rng, shape, channel_dim, masked)
    for config in CONFIGS:
        layer.config = ours.config = config
        y = np.moveaxis(framework.infer(layer, x, mask), channel_dim, -1)
        wanted = expected.infer(rows, config, gamma, beta, mask=mask, **inferring(options))
        bound = _inference_bound(expected, config, rows, mask, options, wanted, gamma, beta)
        tolerance.close(y, wanted, bound, f"y in {config}")
        torch_y = ours(torch.tensor(x), None if mask is None else torch.tensor(mask)).movedim(channel_dim, -1)
        tolerance.close(y, torch_y.detach().double().numpy(), 2 * bound, f"y in {config} beside torch")


def _check_training(framework, layer, ours, x, dy, mask, rows, gamma, beta, options):
    y, *gradients = framework.train_backward(layer, x, dy, mask)
    leaf = torch.tensor(x, requires_grad=True)
    ours.zero_grad()
    torch_y = ours(leaf, None if mask is None else torch.tensor(mask))
    torch_y.backward(torch.tensor(dy))

    at = layer_axis(ours)
    rows_dy = np.moveaxis(dy, at, -1).astype(np.float64)
    s = oracle.measure(rows, mask, options["per_position"], options["groups"])
    spread = (s.var_B, s.var_F, 1 / np.maximum(s.m, 1))
    wanted = oracle.train(rows, gamma, beta, mask=mask, **options)
    bound = tolerance.output(rows, wanted, *spread, gamma, beta, FLOAT, **numeric(options))
    y, torch_y = np.moveaxis(y, at, -1), torch_y.detach().movedim(at, -1).double().numpy()
    tolerance.close(y, wanted, bound, "y")
    tolerance.close(y, torch_y, 2 * bound, "y beside torch")

    wanted = oracle.train_backward(rows, rows_dy, gamma, mask=mask, **options)
    bounds = tolerance.gradient(rows, wanted[0], rows_dy, *spread, gamma, FLOAT, **numeric(options))
    gradients[0] = np.moveaxis(gradients[0], at, -1)
    theirs = (leaf.grad.movedim(at, -1), ours.weight.grad, ours.bias.grad)
    for name, ours_, expected, bound, other in zip(
        ("dx", "dgamma", "dbeta"), gradients, wanted, bounds, theirs, strict=True
    ):
        tolerance.close(ours_, expected, bound, name)
        tolerance.close(ours_, other.double().numpy(), 2 * bound, f"{name} beside torch")


def layer_axis(layer: bln.BatchLayerNorm) -> int:
    return layer.channel_dim


def check_population(framework: Framework, layer: Any, expected: oracle.Population, size: float) -> None:
    """A mean rounds as its values do, a variance as their squares; m/(m-1) is at most 2."""
    unit = tolerance.ROUNDINGS * tolerance.epsilon(FLOAT)
    for name, theirs in oracle.NAMES.items():
        bound = unit * (2 * max(size, 1) ** 2 if name.endswith("var") else max(size, 1))
        tolerance.close(framework.get(layer, name), getattr(expected, theirs), bound, name)


def _inference_bound(population, config, rows, mask, options, wanted, gamma, beta):
    s = oracle.measure(rows, mask, options["per_position"], options["groups"])
    _, var_B, _, var_F = population.choose(s, config)
    # A population mean may be larger than the input: it is subtracted, so it counts among the inputs' sizes.
    values = np.append(rows.ravel(), [np.abs(population.mean_B).max(), np.abs(population.mean_F).max()])
    inverse_m = np.where(population.updates > 0, population.inverse_m, 1 / np.maximum(s.m, 1))
    return tolerance.output(values, wanted, var_B, var_F, inverse_m, gamma, beta, FLOAT, **numeric(options))


class Window(oracle.Population):
    """The first positions of an oracle's population, as a shorter sequence uses them."""

    def __init__(self, population, positions):
        index = (*(slice(size) for size in positions), ...)
        for name, value in vars(population).items():
            whole = name.startswith("group") or (population.groups is not None and name.endswith("_F"))
            setattr(self, name, value if whole else value[index])


def check_history(framework: Framework, rng, momentum, form):
    """Mini-batches of different sizes, masks and lengths, one after another."""
    d, longest = 4, 5
    options = options_of(form, d)
    per_position = options["per_position"]
    known = {"position_shape": longest} if per_position else {}
    layer = framework.make(d, channel_dim=-1, momentum=momentum, **known, **options)
    ours = bln.BatchLayerNorm(d, channel_dim=-1, momentum=momentum, **known, **options)
    expected = oracle.Population((longest,) if per_position else (), d, options["groups"])
    size = 0.0
    for n, length, masked in ((4, 5, False), (1, 3, False), (6, 4, True), (2, 1, True), (3, 5, True)):
        x, mask, rows = mini_batch(rng, (n, length, d), -1, masked)
        framework.train(layer, x, mask)
        ours(torch.tensor(x), None if mask is None else torch.tensor(mask))
        Window(expected, (length,) if per_position else ()).update(rows, momentum, mask, per_position)
        size = max(size, np.abs(rows if mask is None else rows[mask]).max())
    check_population(framework, layer, expected, size)
    for name in ("updates", "samples"):
        np.testing.assert_array_equal(framework.get(layer, name), getattr(ours.population, name), err_msg=name)

    x, mask, rows = mini_batch(rng, (2, 4, d), -1, True)
    window = Window(expected, (4,) if per_position else ())
    for config in ("TTFF", "FTTF", "TTTT"):
        layer.config = config
        wanted = window.infer(rows, config, mask=mask, **inferring(options))
        bound = _inference_bound(window, config, rows, mask, options, wanted, np.ones(d), np.zeros(d))
        # The population itself is rounded: its variance by the square of size / deviation.
        np.testing.assert_allclose(framework.infer(layer, x, mask), wanted, atol=50 * bound.max(), rtol=1e-4)


def check_not_finite(framework: Framework, rng, bad, masked, form):
    """A mini-batch with one bad value changes nothing, and the next one enters."""
    layer = framework.make(4, channel_dim=-1, **options_of(form, 4))
    mask = np.ones((4, 5), bool) if masked else None
    x = rng.normal(size=(4, 5, 4)).astype(np.float32)
    framework.train(layer, x, mask)
    names = [*oracle.NAMES, "updates", "samples"]
    before = {name: framework.get(layer, name).copy() for name in names}
    broken = x.copy()
    broken[2, 3, 1] = bad
    framework.train(layer, broken, mask)
    for name in names:
        np.testing.assert_array_equal(framework.get(layer, name), before[name], err_msg=name)
    framework.train(layer, x, mask)
    assert framework.get(layer, "updates").max() == 2
