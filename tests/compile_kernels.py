"""Compile every kernel for a Hopper GPU, without a GPU: python compile_kernels.py, without Triton's interpreter.

The interpreter ignores Triton's types; this compiles to machine code, and prints each kernel's registers and spills.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from bln._backends.triton import grouped, population, published
from bln._backends.triton.launch import Launch, Shape
from bln._backends.triton.primitives import POPULATION
from bln._spec import Spec

FLOATS = ["mix_eps", "scale", "eps", "inv_entries", "momentum", "w_B", "w_F", "E_B", "Std_B", "E_F", "Std_F"]
INPUTS, COUNTERS = ["x", "y", "dy", "dx", "residual", "d_residual"], ["updates", "samples"]
POINTERS = [
    *POPULATION[:-2], "gamma", "beta", "mask", "statistics", "partial", "counts", "sums", "dots", "dx_terms",
    "gradients", "mean", "var", "row_stats", "row_sums", "feature_stats", "nonfinite", "weights", "current_inverse_m",
    "column_terms",
]  # fmt: skip


def build(kernel, name, dtype, warps, constants, number="fp32"):
    """Compile to machine code and return the PTX; ``constants`` are the arguments a launch would make constant."""
    names = [parameter.name for parameter in kernel.params]
    types = {}
    for each in names:
        if each in constants:
            types[each] = "constexpr"
        elif each in INPUTS:
            types[each] = dtype
        elif each in COUNTERS:
            types[each] = "*i64"
        elif each in POINTERS:
            types[each] = {"mask": "*u8"}.get(each, "*fp32")
        else:
            types[each] = number if each in FLOATS else "i32"
    anywhere = [each.name for each in kernel.params if each.do_not_specialize_on_alignment]
    aligned = [each for each in names if types[each][0] == "*" and each not in anywhere]
    source = ASTSource(
        kernel,
        types,
        {(names.index(each),): value for each, value in constants.items()},
        {(names.index(each),): [["tt.divisibility", 16]] for each in aligned},
    )
    built = triton.compile(source, GPUTarget("cuda", 90, 32), options={"num_warps": warps, "enable_fp_fusion": True})
    print(f"{name:40} {dtype:6} {resources(built.asm['cubin'])}", flush=True)
    return built.asm["ptx"]


def resources(code: bytes) -> str:
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    return f"{registers:>4} registers {spilled:>4} bytes spilled"


def plans(dtype, itemsize):
    """Compile all launches of the grouped form, in both layouts, with and without optional tensors (``full``).

    ``ones`` are launches as torch's compiler makes them: sizes of 1 are constants, and numbers float64.
    """
    for shape, groups, masked, activation, full, ones in (
        (Shape(32, 64, 3136, True), 8, False, "relu", True, False),
        (Shape(32, 64, 3136, False), 8, False, None, False, True),
        (Shape(4, 6, 49, True), 3, True, "gelu", False, False),
        (Shape(4, 1030, 50, False), 2, True, "silu", True, False),
        (Shape(1, 1, 49, True), 1, True, None, True, True),
    ):
        planned = grouped.Plan(shape, itemsize, Spec.of(groups=groups), masked, activation)
        about = f"{tuple(shape[:4])}{' masked' * masked} {activation}"
        number = "fp64" if ones else "fp32"
        absent = [] if masked else ["mask", "counts"]
        absent += [] if full else ["residual", "d_residual", "gamma", "beta"]
        for name, launch in vars(planned).items():
            if not isinstance(launch, Launch) or (itemsize == 2 and name.startswith("join")):
                continue  # kernels that join do not depend on the input's type
            constants = launch.constexprs | dict.fromkeys(absent)
            constants |= dict.fromkeys(["d_residual"] if name == "apply_backward" else [])
            constants |= dict.fromkeys([*POPULATION, "inverse_m"] if name == "join" else [])
            names = [parameter.name for parameter in launch.kernel.params]
            if ones:
                numbers = zip(names[-len(launch.fixed) :], launch.scalars, strict=False)
                constants |= {key: 1 for key, value in numbers if value == 1 and isinstance(value, int)}
            constants = {key: value for key, value in constants.items() if key in names}
            warps = launch.options["num_warps"]
            build(launch.kernel, f"grouped {name} {about}", dtype, warps, constants, number)
        if ones and itemsize == 4:
            build(population.update_unmasked, f"grouped update {about}", dtype, 4, {}, number)


def published_form(dtype, itemsize):
    """Compile all launches of the published form."""
    for n, p, c, channels_first, masked, pooled in (
        (32, 12544, 64, False, False, False), (256, 3136, 64, False, False, False),
        (2, 67200, 256, False, False, False),
        (25, 256, 6, True, False, False), (128, 49, 2048, True, False, False), (256, 197, 768, False, False, False),
        (32, 512, 1024, False, True, False), (64, 3136, 64, True, False, True), (25, 1, 120, False, False, True),
        (4096, 1, 4096, False, False, True), (64, 784, 256, True, True, True), (4, 3136, 64, True, False, False),
        (64, 784, 256, True, False, False), (8, 1, 16384, False, False, True), (9, 7, 5, False, True, False),
    ):  # fmt: skip
        view = Shape(n, c, p, channels_first, pooled)
        values = triton.next_power_of_2(c) * published.min_positions(view, itemsize)
        if channels_first and values > published.MAX_CHANNELS_FIRST:
            continue
        planned = published.Plan(view, itemsize, Spec.of(), masked)
        for name, launch in vars(planned).items():
            if not isinstance(launch, Launch) or (
                itemsize == 2 and name in ("join", "join_backward", "inference_weights", "update")
            ):
                continue  # kernels that join do not depend on the input's type
            absent = [] if masked else ["mask"]
            absent += ["feature_mean", "feature_var"] if name == "normalize" else []
            names = [parameter.name for parameter in launch.kernel.params]
            constants = launch.constexprs | {each: None for each in absent if each in names}
            about = f"{n}, {p}, {c}{' channels first' * channels_first}{' masked' * masked}{' pooled' * pooled}"
            ptx = build(
                launch.kernel, f"{launch.kernel.__name__} {about}", dtype, launch.options["num_warps"], constants
            )
            wide = launch.constexprs.get("VEC", 1) * itemsize == 16 and not masked
            assert not (wide and itemsize == 2 and "ld.global.b16" in ptx), f"{about}: loads of single values"


def main() -> None:
    for dtype, itemsize in (("*bf16", 2), ("*fp32", 4)):
        plans(dtype, itemsize)
        published_form(dtype, itemsize)


if __name__ == "__main__":
    main()
