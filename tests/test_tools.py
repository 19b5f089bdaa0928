"""The layer under the tools people use: compilers, exporters, function transforms, checkpointing, processes."""

import copy
import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

import bln
from bln import BatchLayerNorm, StatisticsConfig

CONFIGS = [str(config) for config in StatisticsConfig.all()]


def same_population(a: nn.Module, b: nn.Module, **tolerance: float) -> None:
    for (name, mine), theirs in zip(a.named_buffers(), b.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


class TestCompile:
    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch.compiler.reset()

    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize(
        "options",
        [
            {}, {"per_position": False, "momentum": None}, {"channel_dim": -1, "momentum": None, "affine": False},
            {"groups": 2}, {"groups": 3, "channel_dim": -1, "momentum": None}, {"groups": 6, "per_position": True},
        ],
        ids=str,
    )  # fmt: skip
    def test_training_whole_graph_equals_eager(self, options, masked):
        """The positions are learned inside the compiled call, and the statistics updated by it."""
        eager = BatchLayerNorm(6, **options)
        layer = copy.deepcopy(eager)
        compiled = torch.compile(layer, fullgraph=True)
        shape = (5, 4, 6) if options.get("channel_dim") == -1 else (5, 6, 4)
        for _ in range(3):
            x = torch.randn(shape, requires_grad=True)
            mask = torch.rand(5, 4) < 0.8 if masked else None
            twin = x.detach().clone().requires_grad_()
            dy = torch.randn(shape)
            y, expected = compiled(x, mask), eager(twin, mask)
            torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)  # fused in another order
            (dx,), (twin_dx,) = (
                torch.autograd.grad(out, at, dy, retain_graph=True) for out, at in ((y, x), (expected, twin))
            )
            torch.testing.assert_close(dx, twin_dx, atol=1e-4, rtol=1e-4)
        same_population(layer, eager, atol=1e-5, rtol=1e-5)
        assert layer.population.position_shape == eager.population.position_shape

    @pytest.mark.parametrize("config", CONFIGS)
    @pytest.mark.parametrize("groups", [None, 2])
    def test_inference_whole_graph_equals_eager(self, config, groups):
        layer = BatchLayerNorm(6, groups=groups, config=config)
        layer(torch.randn(5, 6, 4))
        layer.eval()
        x = torch.randn(3, 6, 4)
        torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), atol=1e-5, rtol=1e-5)

    def test_a_change_of_configuration_is_noticed(self):
        layer = BatchLayerNorm(6)
        layer(torch.randn(5, 6))
        compiled = torch.compile(layer.eval(), fullgraph=True)
        x = torch.randn(3, 6)
        for config in ("TTFF", "FTFF"):
            layer.config = config
            torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("options", [{"position_shape": 9}, {"groups": 3}], ids=str)
    def test_dynamic_batch_and_length(self, options):
        layer = BatchLayerNorm(6, **options)
        eager = copy.deepcopy(layer)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for n, length in ((5, 9), (4, 7), (8, 3)):
            x = torch.randn(n, 6, length)
            torch.testing.assert_close(compiled(x), eager(x), atol=1e-5, rtol=1e-5)
        same_population(layer, eager, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize(("training", "graphs"), [(True, 2), (False, 1)])
    def test_one_graph_is_for_all_lengths(self, training, graphs, masked):
        """In training the longest has one of its own: there all statistics are written, not some of them."""
        layer = BatchLayerNorm(6, channel_dim=-1, position_shape=20).train(training)
        eager = copy.deepcopy(layer)
        counter = CompileCounter()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
        for length in (5, 9, 13, 20, 17, 3, 2, 20, 11, 12, 14):
            x = torch.randn(4, length, 6)
            mask = torch.arange(length) < torch.tensor([[1], [length], [2], [length]]) if masked else None
            torch.testing.assert_close(compiled(x, mask), eager(x, mask))
        same_population(layer, eager)
        assert counter.frame_count == graphs

    def test_float64_statistics_without_dimensions_are_written(self):
        """torch 2.13 does not write to such a buffer itself, in compiled code: only through an alias of it."""
        eager = BatchLayerNorm(6, per_position=False, dtype=torch.float64)
        layer = copy.deepcopy(eager)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            x = torch.randn(5, 6, 4, dtype=torch.float64) + 2
            torch.testing.assert_close(compiled(x), eager(x))
        same_population(layer, eager)

    def test_checkpointing_inside_a_compiled_function_updates_once(self):
        layer = BatchLayerNorm(6, position_shape=4)
        eager = copy.deepcopy(layer)
        x = torch.randn(5, 6, 4, requires_grad=True)
        torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), fullgraph=True)(x).sum().backward()
        eager(x)
        same_population(layer, eager, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("groups", [None, 2])
def test_activation_checkpointing_updates_once(reentrant, groups):
    first, second = (BatchLayerNorm(6, groups=groups) for _ in range(2))
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), first, nn.Linear(6, 6), nn.Tanh(), second)
    plain = copy.deepcopy(net)
    x = torch.randn(5, 6, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    checkpoint(net, x, use_reentrant=reentrant).square().sum().backward()
    plain(twin).square().sum().backward()
    assert net[2].population.updates.tolist() == [1] * 5
    same_population(net, plain)
    torch.testing.assert_close(x.grad, twin.grad)


class TestExport:
    @pytest.mark.parametrize("config", CONFIGS)
    @pytest.mark.parametrize("per_position", [True, False])
    @pytest.mark.parametrize("groups", [None, 2])
    def test_inference_is_exported_as_plain_operations(self, config, per_position, groups):
        layer = BatchLayerNorm(6, groups=groups, config=config, per_position=per_position)
        layer(torch.randn(5, 6, 4))
        layer.eval()
        batch = torch.export.Dim("batch")
        program = torch.export.export(layer, (torch.randn(3, 6, 4),), dynamic_shapes=({0: batch},))
        assert not any("norm" in str(node.target) for node in program.graph.nodes if node.op == "call_function")
        for n in (1, 2, 7):
            x = torch.randn(n, 6, 4)
            torch.testing.assert_close(program.module()(x), layer(x))

    @pytest.mark.parametrize("config", ["TTFF", "FFFF"])
    @pytest.mark.parametrize("strict", [False, True])
    def test_sequences_are_exported_up_to_the_longest(self, config, strict):
        layer = BatchLayerNorm(6, config=config, channel_dim=-1, position_shape=20)
        layer(torch.randn(5, 20, 6))
        layer.eval()
        shapes = ({1: torch.export.Dim("length", max=20)},)
        program = torch.export.export(layer, (torch.randn(4, 10, 6),), dynamic_shapes=shapes, strict=strict)
        for length in (2, 11, 20):
            x = torch.randn(4, length, 6)
            torch.testing.assert_close(program.module()(x), layer(x))

    @pytest.mark.parametrize("options", [{"position_shape": 4}, {"groups": 3}], ids=str)
    def test_training_is_exported_with_its_updates(self, options):
        layer = BatchLayerNorm(6, **options)
        eager = copy.deepcopy(layer)
        module = torch.export.export(layer, (torch.randn(3, 6, 4),)).module()
        x = torch.randn(3, 6, 4)
        torch.testing.assert_close(module(x), eager(x))
        updated = dict(module.named_buffers())
        torch.testing.assert_close(updated["population.batch_mean"], eager.population.batch_mean)


class TestFunctionTransforms:
    def ensemble(self, training, groups):
        norms = [BatchLayerNorm(6, groups=groups) for _ in range(3)]
        nets = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), norm, nn.Linear(6, 2)) for norm in norms]
        for net in nets:
            net(torch.randn(4, 6))
            net.train(training)
        return nets

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("groups", [None, 2])
    def test_vmap_over_stacked_models_trains_each_as_if_alone(self, training, groups):
        nets = self.ensemble(training, groups)
        parameters, buffers = stack_module_state(nets)
        skeleton = copy.deepcopy(nets[0]).to("meta")
        x = torch.randn(3, 8, 6)

        def loss(parameters, buffers, x):
            return functional_call(skeleton, (parameters, buffers), (x,)).square().mean()

        gradients = vmap(grad(loss))(parameters, buffers, x)
        for i, net in enumerate(nets):
            net(x[i]).square().mean().backward()
            for name, parameter in net.named_parameters():
                torch.testing.assert_close(gradients[name][i], parameter.grad)
            for name, buffer in net.named_buffers():
                torch.testing.assert_close(buffers[name][i], buffer)

    @pytest.mark.parametrize("momentum", [0.1, None])
    def test_vmap_over_models_that_never_ran(self, momentum):
        layers = [BatchLayerNorm(4, momentum=momentum) for _ in range(3)]
        parameters, buffers = stack_module_state(layers)
        skeleton, x = copy.deepcopy(layers[0]).to("meta"), torch.randn(3, 5, 4)
        y = vmap(lambda p, b, x: functional_call(skeleton, (p, b), (x,)))(parameters, buffers, x)
        torch.testing.assert_close(y, torch.stack([layer(x[i]) for i, layer in enumerate(layers)]))
        torch.testing.assert_close(buffers["population.batch_var"], x.var(1))

    def test_positions_are_not_learned_inside_a_transform_or_an_export(self):
        layer, x = BatchLayerNorm(4), torch.randn(5, 4, 3)
        for attempt in (lambda: grad(lambda x: layer(x).sum())(x), lambda: torch.export.export(layer, (x,))):
            with pytest.raises(ValueError, match=r"position_shape=\(3,\)"):
                attempt()
            assert layer.population.position_shape is None

    def test_functional_call_on_a_layer_that_does_not_know_its_positions(self):
        layer, x = BatchLayerNorm(4), torch.randn(5, 4, 3)
        buffers = {name: value.clone() for name, value in layer.named_buffers()}
        functional_call(layer, {**dict(layer.named_parameters()), **buffers}, (x,))
        assert buffers["population.batch_mean"].shape == (3, 4)
        assert layer.population.position_shape is None
        layer(x)
        torch.testing.assert_close(buffers["population.batch_mean"], layer.population.batch_mean)

    def test_functional_call_updates_the_given_buffers_alone(self):
        layer = BatchLayerNorm(5)
        layer(torch.randn(4, 5))
        buffers = {name: value.clone() for name, value in layer.named_buffers()}
        before = copy.deepcopy(layer.population)
        functional_call(layer, {**dict(layer.named_parameters()), **buffers}, (torch.randn(4, 5),))
        same_population(layer.population, before, atol=0, rtol=0)
        assert buffers["population.updates"].tolist() == [2] * 5

    @pytest.mark.parametrize("config", [None, "TTFF", "FFFF", "TFTF"])
    @pytest.mark.parametrize(
        "options",
        [{"position_shape": 3}, {"groups": 1}, {"groups": 5, "position_shape": 3, "per_position": True}],
        ids=str,
    )
    def test_per_sample_batches_and_forward_mode(self, config, options):
        layer = BatchLayerNorm(5, dtype=torch.float64, config=config or "TTFF", **options)
        layer(torch.randn(4, 5, 3, dtype=torch.float64))
        if config:
            layer.eval()
        x, v = torch.randn(2, 6, 5, 3, dtype=torch.float64)
        function = layer
        if config is None:
            function = partial(bln.functional.batch_layer_norm, groups=layer.groups, per_position=layer.per_position)
        moved = (function(x + 1e-6 * v) - function(x - 1e-6 * v)) / 2e-6
        torch.testing.assert_close(jvp(function, (x,), (v,))[1], moved, atol=1e-7, rtol=1e-5)
        batches = torch.randn(3, 6, 5, 3, dtype=torch.float64)
        torch.testing.assert_close(vmap(function)(batches), torch.stack([function(batch) for batch in batches]))

    @pytest.mark.parametrize("groups", [None, 1, 5])
    def test_vmap_with_masks(self, groups):
        x, mask = torch.randn(3, 6, 5, 4), torch.rand(3, 6, 4) < 0.7
        mask[:, 0] = True
        together = vmap(lambda x, mask: bln.functional.batch_layer_norm(x, mask=mask, groups=groups))(x, mask)
        alone = [bln.functional.batch_layer_norm(x[i], mask=mask[i], groups=groups) for i in range(3)]
        torch.testing.assert_close(together, torch.stack(alone))


def test_averaged_models_keep_the_statistics_type():
    net = nn.Sequential(nn.Linear(3, 3), BatchLayerNorm(3))
    averaged = torch.optim.swa_utils.AveragedModel(net)
    net(torch.randn(4, 3))
    averaged.update_parameters(net)
    bln.calibrate(averaged, [torch.randn(4, 3)], progress=False)
    assert averaged.module[1].population.updates.tolist() == [1] * 5


def test_distributed_data_parallel_with_lazily_shaped_buffers(tmp_path):
    """Two processes, different data: buffers that grew after wrapping are still the ones rank 0 broadcasts."""
    script = tmp_path / "ddp.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, torch, torch.distributed as dist, bln
            from torch import nn
            rank = int(sys.argv[1])
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
            torch.manual_seed(0)
            net = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Tanh(), bln.BatchLayerNorm(4), nn.Flatten(), nn.Linear(24, 2))
            ddp = nn.parallel.DistributedDataParallel(net)
            torch.manual_seed(rank + 1)
            for _ in range(3):
                ddp(torch.randn(5, 3, 8)).square().sum().backward()
            assert net[2].population.position_shape == (6,)
            ddp(torch.randn(5, 3, 8))
            assert net[2].population.updates.tolist() == [[4] * 6] * 5
            gradients = [torch.empty_like(net[2].weight.grad) for _ in range(2)]
            dist.all_gather(gradients, net[2].weight.grad)
            assert torch.equal(*gradients)
            # Each forward starts from rank 0's statistics: one more, on the same data, must give the same everywhere.
            torch.manual_seed(9)
            ddp(torch.randn(5, 3, 8))
            means = [torch.empty_like(net[2].population.batch_mean) for _ in range(2)]
            dist.all_gather(means, net[2].population.batch_mean)
            assert torch.equal(*means)
            print("done", rank, flush=True)
            os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts at its end
            """
        )
    )
    # The loopback interface, whatever this machine's name resolves to.
    environment = {**os.environ, "PYTHONPATH": str(Path(bln.__file__).parents[1]), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "rendezvous")], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, output
        assert f"done {rank}" in output


def test_importing_bln_is_light():
    """Nothing but torch and the standard library, and a fifth of the time that torch itself takes (1 s)."""
    code = textwrap.dedent(
        """
        import sys, time
        start = time.process_time()
        import torch
        before, middle = set(sys.modules), time.process_time()
        import bln
        share = (time.process_time() - middle) / (middle - start)
        extras = ("numpy", "rich", "pandas", "optuna", "sklearn", "scipy", "matplotlib", "triton", "keras", "jax")
        print(share, [name for name in extras if name in set(sys.modules) - before])
        """
    )
    smallest = float("inf")
    for _ in range(3):  # the first may have to compile it
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        share, extras = done.stdout.split(maxsplit=1)
        assert extras.strip() == "[]"
        smallest = min(smallest, float(share))
    assert smallest < 0.2
