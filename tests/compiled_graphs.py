"""Print the compiled graphs of a training step with the grouped layer on a GPU, without a GPU.

    python compiled_graphs.py [bfloat16|float32] [fixed|dynamic]

Run without Triton's interpreter. A CPU tensor poses as one on a GPU, Triton is told of a Hopper GPU, and nothing runs:
the graphs are captured where the compiler hands them to Inductor. Each is a line of JSON: its name, the kernels that it
launches itself, and this project's operators that stayed opaque.
"""

import json
import sys

import torch
import torch._functorch.config
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import bln
from bln import _backends


class Driver:
    """The part of a GPU's driver that tracing needs."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


class Block(nn.Module):
    """A convolution, a norm, a shortcut and a ReLU, as in a residual net."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(64, 64, 1, bias=False), bln.BatchLayerNorm(64, groups=8)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)) + x)


class Captured(Exception):
    """Raised where the forward graph would run."""


def describe(name):
    def compile_graph(graph, inputs):
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        kernels = [kernel_side_table.get_kernel(n.kwargs["kernel_idx"]) for n in calls if "kernel_idx" in n.kwargs]
        hidden = sorted({str(node.target) for node in calls if str(node.target).startswith("bln")})
        print(json.dumps({"graph": name, "kernels": [k.fn.__name__ for k in kernels], "hidden": hidden}))

        def run(*arguments):
            raise Captured

        return run

    return compile_graph


def main(dtype="bfloat16", size="fixed"):
    driver.set_active(Driver())
    _backends._on_gpu = lambda x: True
    torch._functorch.config.force_non_lazy_backward_lowering = True
    graphs = aot_autograd(
        fw_compiler=describe("forward"), bw_compiler=describe("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    compiled = torch.compile(Block(), backend=graphs, fullgraph=True, dynamic=size == "dynamic")
    x = torch.randn(16, 64, 14, 14, requires_grad=True).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
        try:
            compiled(x)
        except Captured:
            return
    raise AssertionError("the compiler made no graph")


if __name__ == "__main__":
    main(*sys.argv[1:])
