"""Compile every kernel for a Hopper GPU, with no GPU: python compile_kernels.py, without Triton's interpreter.

The interpreter runs Python and does not know Triton's types; this does, up to the machine code. Prints the registers
and spilled bytes of each.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from bln._spec import Spec
from bln.kernels import backward, choices, forward, inference, population, sharing, synchronized, tiles
from bln.kernels.launch import Given
from bln.kernels.plan import Launch, Plan, Shape

FLOATS = ["mix_eps", "scale", "eps", "inverse_m", "own_inverse_m", "entries_factor", "m_factor", "momentum"]
FLOATS += ["E_B", "Std_B", "E_F", "Std_F"]
POPULATION = ["batch_mean", "batch_var", "feature_mean", "feature_var", "kept_inverse_m", "updates", "samples"]
INPUTS, COUNTERS = ["x", "second", "y", "dy", "dx", "residual", "d_residual"], ["updates", "samples"]
POINTERS = [
    "gamma",
    "beta",
    "statistics",
    "partials",
    "gradients",
    "rows",
    "joined",
    *POPULATION[:-2],
    "counts",
    "hidden",
    "finite",
    "message",
    "messages",
    "mask",
    "shares",
]


def build(kernel, name, dtype, warps, constants, pointers=(), number="fp32"):
    """To machine code; ``constants`` are what a launch would make constant."""
    names = [parameter.name for parameter in kernel.params]
    constants = {"CHAINED": tiles.VERSION >= (3, 5), **constants} if "CHAINED" in names else constants
    types = {}
    for each in names:
        if each in constants:
            types[each] = "constexpr"
        elif each in INPUTS:
            types[each] = dtype
        elif each in COUNTERS:
            types[each] = "*i64"
        elif each in POINTERS or each in pointers:
            types[each] = {"hidden": "*u8", "mask": "*u8"}.get(each, "*fp32")
        else:
            long = each == "N" and constants.get("LONG")  # there may be as many rows as values
            types[each] = number if each in FLOATS else "i64" if long else "i32"
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


def resources(code: bytes) -> str:
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    return f"{registers:>4} registers {spilled:>4} bytes spilled"


def share(kernels, given, dtype):
    """The sweeps of which other ranks hear in between."""
    back = kernels is backward
    chosen = choices.training(given, backward=back, hold=False)
    constants = {key: value for key, value in chosen.constants.items() if key.isupper()}
    constants |= {"MASKED": False, "POOLED": given.pooled, "EARLY": False, "hidden": None}
    constants |= chosen.in_sweeps
    if back:
        constants |= {"sums": None} if chosen.late else {}
        phases = [
            {"SUM": first, "DIFFERENTIATE": not first, "SHARED": True, "gradients": None} for first in (True, False)
        ]
    else:
        one = {
            "ALL": chosen.concluding(given.p, given.c, given.pooled),
            "AVERAGE": False,
            "SPREAD": False,
            **dict.fromkeys(POPULATION),
        }
        phases = [{"MEASURE": False, "NORMALIZE": True, "SHARED": True, **one}]
    for phase in phases:
        name = f"{kernels.__name__.split('.')[-1]} shared {given.n}, {given.p}, {given.c}"
        build(kernels.sweep, name, dtype, chosen.warps, constants | phase, ["inverse_m", "sums"])


def plans(dtype, itemsize):
    """Build all launches of the grouped layer, in both layouts, with and without what may be there.

    ``ones`` are launches as torch's compiler makes them: sizes of 1 are constants, numbers float64.
    """
    for shape, groups, masked, activation, full, ones in (
        (Shape(32, 64, 3136, True), 8, False, "relu", True, False),
        (Shape(32, 64, 3136, False), 8, False, None, False, True),
        (Shape(4, 6, 49, True), 3, True, "gelu", False, False),
        (Shape(4, 1030, 50, False), 2, True, "silu", True, False),
        (Shape(1, 1, 49, True), 1, True, None, True, True),
    ):
        planned = Plan(shape, itemsize, Spec.of(groups=groups), masked, activation)
        about = f"{tuple(shape)}{' masked' * masked} {activation}"
        number = "fp64" if ones else "fp32"
        absent = [] if masked else ["mask", "counts"]
        absent += [] if full else ["residual", "d_residual", "gamma", "beta"]
        for name, launch in vars(planned).items():
            if not isinstance(launch, Launch) or (itemsize == 2 and name.startswith("join")):
                continue  # what joins does not know the input's type
            constants = launch.constants | dict.fromkeys(absent)
            constants |= dict.fromkeys(["d_residual"] if name == "apply_backward" else [])
            constants |= dict.fromkeys([*POPULATION, "inverse_m"] if name == "join" else [])
            names = [parameter.name for parameter in launch.kernel.params]
            if ones:
                numbers = zip(names[-len(launch.rest) :], launch.numbers, strict=False)
                constants |= {key: 1 for key, value in numbers if value == 1 and isinstance(value, int)}
            constants = {key: value for key, value in constants.items() if key in names}
            warps = launch.options["num_warps"]
            build(launch.kernel, f"grouped {name} {about}", dtype, warps, constants, ["inverse_m"], number)


def main() -> None:
    for dtype, itemsize in (("*bf16", 2), ("*fp32", 4)):
        plans(dtype, itemsize)
        for n, p, c, across, masked, pooled in (
            (32, 12544, 64, False, False, False), (256, 3136, 64, False, False, False),
            (25, 256, 6, True, False, False), (128, 49, 2048, True, False, False), (256, 197, 768, False, False, False),
            (32, 512, 1024, False, True, False), (64, 3136, 64, True, False, True), (25, 1, 120, False, False, False),
            (5120, 1, 128, False, False, False), (4096, 1, 512, False, True, False),
            (64, 784, 256, True, False, False), (64, 784, 256, True, False, True), (2**31, 1, 2, False, False, False),
        ):  # fmt: skip
            about = f"{n}, {p}, {c}{' across' * across}{' masked' * masked}{' pooled' * pooled}"
            given = Given(n, p, c, itemsize, across, masked, pooled, processors=132, shared=232448)
            for kernels, back in ((forward, False), (backward, True)):
                chosen = choices.training(given, backward=back)
                constants = {key: value for key, value in chosen.constants.items() if key.isupper()}
                name = f"{kernels.__name__.split('.')[-1]} {about}"
                if not masked:
                    share(kernels, given, dtype)
                if chosen.resident:
                    build(kernels.resident, name, dtype, chosen.warps, constants)
                    if chosen.blocks == 1 and not back:
                        constants |= {"AVERAGE": False, "SPREAD": n > 1}
                        build(forward.single, f"single {about}", dtype, chosen.warps, constants)
                    continue
                constants |= {"MASKED": masked, "POOLED": pooled, "EARLY": chosen.early, "SHARED": False}
                constants |= chosen.in_sweeps
                constants |= {} if masked else {"hidden": None, **({"counts": None} if back else {})}
                constants |= {"sums": None} if back and chosen.late else {}
                names = ("SUM", "DIFFERENTIATE") if back else ("MEASURE", "NORMALIZE")
                alone = not chosen.in_two(pooled)
                for first in (True,) if alone else (True, False):
                    phases = dict(zip(names, (first, alone or not first), strict=True))
                    phases |= {"partials": None} if alone else {}
                    if not back:
                        concluding = 0 if first else chosen.concluding(p, c, pooled)
                        phases |= {"ALL": concluding, "AVERAGE": False, "SPREAD": bool(concluding)}
                        phases |= {} if concluding and not masked else dict.fromkeys(POPULATION)
                    pointers = ["inverse_m", "sums"] if masked else ["sums"]
                    build(kernels.sweep, name, dtype, chosen.warps, constants | phases, pointers)
                    if first and not (back or alone):  # of columns alone, for inference
                        columns = constants | phases | {"statistics": None}
                        build(kernels.sweep, f"{name} of columns", dtype, chosen.warps, columns, pointers)
            chosen = choices.inference(given)
            constants = {key: value for key, value in chosen.constants.items() if key.isupper()}
            constants |= {"MEAN_F": False, "VAR_F": False, "MASKED": masked, "POOLED": pooled}
            constants |= {"SWAPPED": chosen.swapped, "TURNED": chosen.turned and not pooled, **chosen.in_laps}
            constants |= {} if masked else {"hidden": None}
            constants |= {} if chosen.laps > 1 else {"rows": None}
            build(
                inference._normalize, f"inference {about}", dtype, chosen.warps, constants,
                ["inverse_m", "rows", *["own_inverse_m"] * masked],
            )  # fmt: skip
            if chosen.laps > 1:
                chosen = choices.shares(given)
                constants = {key: value for key, value in chosen.constants.items() if key.isupper()}
                build(inference._shares, f"shares {about}", dtype, chosen.warps, constants | chosen.in_laps, ["rows"])
    for dtype, side in (("*bf16", 8), ("*fp32", 4)):
        constants = {"SIDE_P": 1, "SIDE_C": side, "BLOCK": 64}
        build(tiles.turn, "turn", dtype, 4, constants | {"second": None})
        build(tiles.turn, "turn", dtype, 4, constants)
    for across, block in ((False, 16), (True, 8)):
        build(sharing.merge, "merge", "*fp32", 4, {"ACROSS": across, "EARLY": False, "BS": 256, "BLOCK": block})
    for sums in ({}, {"sums": None}):
        build(sharing.unite, "unite", "*fp32", 4, {"EARLY": False, "TILE": (4, 32, 1, 4), **sums}, ["shares", "sums"])
        constants = {"EARLY": False, "BR": 4096, "BS": 128, "BLOCK": 8, **sums}
        build(sharing.pool, "pool", "*fp32", 4, constants, ["sums", "pooled"])
    for flat in (False, True):
        constants = {"FLAT": flat, "EARLY": False, "BS": 1024, "BLOCK": 8}
        build(backward.add, "add", "*fp32", 8, constants, ["parts", "total"])
    for pooled in (True, False):
        build(synchronized.pack, "pack", "*fp32", 4, {"ACROSS": True, "POOLED": pooled, "BS": 256, "BLOCK": 8})
        constants = {"ACROSS": True, "POOLED": pooled, "LEARN": True, "AVERAGE": pooled}
        constants |= {"BS": 2, "BP": 16, "BC": 64, "BF": 1024}
        build(synchronized.join, "join", "*fp32", 4, constants, ["inverse_m"])
    for average in (True, False):
        constants = {"ACROSS": False, "SIDE": 4, "AVERAGE": average, "SPREAD": True, "BP": 8, "BC": 64, "BF": 1024}
        build(population.enter, "population", "*fp32", 4, constants, ["inverse_m"])
        build(population.enter, "population", "*fp32", 4, constants | {"finite": None}, ["inverse_m"])


if __name__ == "__main__":
    main()
