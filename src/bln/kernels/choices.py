"""Launch choices: the heuristics for training and for inference. Nothing is tried out at a new shape.

Times in comments are those of forward kernels on an H200, in bfloat16 unless said otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import gcd, prod

from .launch import (
    FEATURES,
    LANES,
    LAP,
    Given,
    Launch,
    arrange,
    arrange_across,
    at_once,
    blocks_of,
    cdiv,
    even_positions,
    fitting,
    known,
    laps,
    power_of_two,
    rows_of,
    swept,
)

_RESIDENT = 16384  # values of a slab that registers hold
_BLOCK = 8  # positions, where they lie side by side, of which a program holds whole slabs


def training(given: Given, *, backward: bool, hold: bool = True) -> Launch:
    """The heuristic for training.

    Args:
        given: The input, and the device.
        backward: Two tensors are read, and three sums kept for each column.
        hold: Slabs may be held in registers. Else they are swept over, since other ranks are to be asked in between, or
            statistics of columns alone are wanted.
    """
    held = _held(given, backward) if hold and not (given.masked or given.pooled) else None
    if held is not None:
        return held
    if given.across:
        return _side_by_side(given, backward)
    return _one_slab(given, backward) if given.p == 1 else _slabs(given, backward)


def _held(given: Given, backward: bool) -> Launch | None:
    """Whole slabs in registers, if they are small enough."""
    half = backward if given.itemsize == 4 else given.features > 128  # two tensors in float32; or wide rows, see below
    whole = _RESIDENT // 2 if half else _RESIDENT
    if given.across:
        fit = given.slab * _BLOCK <= whole // 4 and given.p <= 2 * given.processors * _BLOCK
        return _held_across(given) if fit else None
    narrow = given.features <= 128 or (given.c == 256 and not given.few)  # wider rows are swept over well
    return _held_last(given, backward) if given.slab <= whole and narrow else None


def _held_across(given: Given) -> Launch:
    """Some positions for each program: (25, 256, 6) takes 3 us so, 8 if swept over in two launches; with 32 positions
    for each 7.
    """
    n, p, c = given[:3]
    tile, blocks = (power_of_two(n), 1, given.features, _BLOCK), cdiv(p, _BLOCK)
    even, warps = power_of_two(n) == n and p % _BLOCK == 0, max(1, given.slab * _BLOCK // 512)
    return Launch(tile, True, 1, given.long, even, known(c, tile, True), warps, blocks, True, blocks)


def _held_last(given: Given, backward: bool) -> Launch:
    """Few warps that each do much: warps of a program wait for each other, and what is done for columns is done for
    each warp.

    (128, 3136, 64) takes 1.3 times a copy with 64 values for each thread, 1.7 with 32. Backward, where registers are
    short, two tensors of 32 values each: (32, 3136, 128) takes 1.4 times an addition so, 1.8 with 64; but 64 of few
    bits and features: (128, 3136, 64) takes 1.3 so, 1.7 with 32. (32, 784, 256) takes 1.3 times a copy in float32 if
    held, 1.4 swept over; backward 1.3 and 1.8. Few small slabs, (25, 1, 120) backward in float32: 1.8 times an addition
    with 16 values for each thread, 2.2 with 32.
    """
    n, p, c = given[:3]
    features, slab = given.features, given.slab
    short = given.itemsize == 2 and features <= 64 and slab >= 8192  # (128, 3136, 64) takes 1.39 so, else 1.44
    light = not short and (backward or (given.few and slab < 8192))
    each = 512 if backward and given.few and slab < 8192 else 1024 if light else 2048
    warps = max(1, slab // each)
    held, side = (8, 8) if short else (4 if backward else max(4, min(8, features // 16)), 4)
    tile, side = arrange(n, c, warps, slab, held, side)
    programs = min(p, given.processors * max(1, 8 // warps))
    # (256, 3136, 64) takes 1.46 with three blocks ahead, 1.50 with two, but (128, 3136, 64) 1.42 and 1.39.
    ahead = 4 if short and slab > 8192 else 3
    stages = 1 if given.few else fitting(ahead, _bytes(given, backward) * slab, given.shared)
    even, features = power_of_two(n) == n, known(c, tile, False)
    return Launch(tile, False, side, given.long, even, features, warps, p, True, programs, stages=stages)


def _bytes(given: Given, backward: bool) -> int:
    """What is loaded for each value."""
    return (2 if backward else 1) * given.itemsize


def _side_by_side(given: Given, backward: bool) -> Launch:
    """64 positions for each program, no more programs than run at a time, and two tiles under way beside the one worked
    on: (128, 3136, 64) takes 2.1 times a copy so, 2.4 with none, 2.6 with 32 positions.

    Each program leaves partial results as large as a slab, so of smaller inputs there are half as many. But not
    backward in bfloat16, nor in laps, whose slabs are half as large. Two samples at a time, where registers are not
    short: (64, 784, 256) takes 2.8 so, backward 2.6 times an addition, with one 3.4 and 3.1. Of large inputs in
    bfloat16 more is under way: (32, 12544, 64) takes 1.9 with tiles of one sample, five of them ahead, 2.1 with two and
    two, but (128, 3136, 64) pooled 1.94 and 1.86; (64, 784, 256) takes 2.6 with four ahead, 2.8 with two.
    """
    n, p, c, itemsize = given[:4]
    number = laps(p, c)
    large, light = given.values > 2**24, itemsize == 2 and not backward
    ahead = light and large and given.features == 64 and not (given.masked or given.pooled)
    two = given.features < 64 or (light and not ahead)
    if number > 1:
        two = c // number <= LAP and (not backward or itemsize == 2)
    # Inference, which measures in the same way, may have more features of fewer positions, see ``launch.at_once``.
    positions = min(64, power_of_two(p)) if number == 1 and given.features > 256 else 64
    side = gcd(number * p, 4)
    tile, warps = arrange_across(c // number, min(2 if two else 1, power_of_two(n)), positions, side)
    blocks = blocks_of(p, positions, number)[0]
    most = 2 if large or (backward and itemsize == 2) or number > 1 else 1
    splits = max(1, most * given.processors // blocks)
    scarce = blocks < given.processors // 4
    if scarce and number == 1:  # two samples for each at least: (128, 64, 64) takes 11.5 us, else 12.5
        splits = min(splits, cdiv(n, 2))
    elif scarce and given.values < 2**22:  # (128, 64, 256) takes 17 us so, else 19, and backward 18 and 25
        splits = given.processors // blocks
    stages = 4 if most == 1 and itemsize == 4 else 3
    if ahead:
        stages = 6
    elif light and number > 1 and given.values > 2**23:
        stages = 5
    stages = 1 if given.masked else fitting(stages, _bytes(given, backward) * prod(tile), given.shared, programs=2)
    return swept(given, tile, side=side, warps=warps, splits=splits, stages=stages, laps=number)


def _slabs(given: Given, backward: bool) -> Launch:
    """Features last, several positions. A row within a warp, or two or four: (32, 512, 1024) takes 1.6 times a copy
    with 16 features for each thread and two rows at a time, 2.1 with 32.

    What matters most is that enough is under way: with no tile ahead it takes 2.5, with two 2.1, with three 1.9.
    """
    n, p, c, itemsize = given[:4]
    features, processors = given.features, given.processors
    held = min(32 if features > 2048 else 16, max(8, features // 32))
    splits, stages = 1, 4
    # (256, 197, 768) takes 1.6 in four runs of samples in float32, 2.5 in one.
    split = p < processors or given.slab > 2**17
    in_warp = 512 < features <= 1024 and features != c and not backward
    held = 32 if in_warp else _whole(c, held)  # (256, 197, 768) takes 1.8 so, 2.0 with two warps for a row
    # Of few bits 16 bytes at a time, if pieces are whole then, too.
    short = itemsize == 2 and (backward or in_warp) and features > 512 and c % (8 * features // held) == 0
    side, least = 8 if short else 4, 1 if in_warp and not short else 2
    warps = max(least, features // (LANES * held))
    if features <= 128:
        warps, values, stages = (2, 32, 3) if itemsize == 2 else (4, 16, 3)
    elif features <= 256:
        values = 16 if backward and itemsize == 2 else 32
        warps = 4 if backward and itemsize == 4 else warps
    elif c == 512 and given.few and not backward:  # (32, 196, 512) takes 2.3 so, 2.6 with two warps
        held, warps, values, stages = 8, 4, 32, 3
    elif c == 1024 and not (backward or split):  # (32, 512, 1024) takes 1.73 so, 1.78 with half the values
        values, stages = (64, 3) if itemsize == 2 else (32, 5)
    elif backward and features == 1024 and itemsize == 4 and not split:
        warps, values, stages = 4, 32, 6  # (32, 512, 1024) takes 1.6 so, 1.7 with half of all
    else:
        values = max(held, 32 if features <= (512 if backward else 1024) else 16)
    if split:
        if features > 1024 and not backward:
            values = 32  # (128, 49, 2048) takes 2.1 so, 2.4 with one row at a time
        elif features > 512:
            values = held
        # Each program leaves partial results. If slabs are few, so are programs: (256, 49, 512) takes 1.8 times a copy
        # with two for each multiprocessor in float32, 2.2 with six. But (256, 100, 768) takes 1.8 with six, 2.4 with
        # two. And each has some rows: (64, 16, 1024) takes 2.3 times an addition with four or more, 3.7 with two.
        many = given.values > 2**23 and (features == 1024 or (itemsize == 2 and features <= 256))
        most = 6 if features <= 1024 and (many or p >= processors) else 2
        if backward:
            stages = 5 if features > 1024 else 3 if itemsize == 4 else 4
            filled = processors // p * p >= 0.7 * processors
            if (1024 if itemsize == 4 else 2048) < features <= 4096 and filled:
                most = 1  # (128, 49, 2048) takes 1.7 times an addition so in float32, else 1.8
        some = n // (8 if features > 1024 else 4 if backward else 1)
        splits = max(1, min(most * processors // p, max(some, processors // p), n))
    tile, side = arrange(n, c, warps, values, held, side)
    stages = 1 if given.masked else fitting(stages, _bytes(given, backward) * prod(tile), given.shared)
    return swept(given, tile, side=side, warps=warps, splits=splits, stages=stages)


def _whole(c: int, held: int) -> int:
    """Features of a row for each thread, twice as many if pieces of the row are whole then, and only then.

    (32, 512, 640) takes 2.3 times a copy so, 3.0 with masks.
    """
    features = power_of_two(c)
    doubled = features >= 32 and c % (4 * features // held) and c % (2 * features // held) == 0
    return 2 * held if doubled else held


# Rows of up to so many features: warps, features and values of a thread, tiles under way, and programs for each
# multiprocessor. Each program leaves partial results as long as a row: few programs where rows are long. For most lines
# four to seven choices were measured: (401408, 1, 64) takes 1.8 times a copy with this one, 1.9 to 2.3 with others;
# (50176, 1, 256) 2.1, and 2.1 to 2.5; (16384, 1, 1024) 2.0, and 2.0 to 2.3; (4096, 1, 8192) 2.0, and 2.3 with twice as
# many programs.
_ROWS = {
    (False, 4): [
        (128, 4, 8, 32, 3, 3), (256, 4, 8, 32, 4, 3), (512, 2, 16, 32, 5, 2), (1024, 4, 16, 32, 5, 2),
        (2048, 4, 16, 32, 4, 2), (FEATURES, 4, 32, 32, 5, 1),
    ],
    (False, 2): [
        (128, 4, 8, 32, 4, 3), (256, 4, 8, 32, 4, 3), (512, 4, 16, 32, 4, 2), (1024, 4, 16, 32, 5, 2),
        (2048, 4, 16, 32, 4, 2), (4096, 4, 32, 32, 5, 2), (FEATURES, 4, 32, 32, 5, 1),
    ],
    (True, 4): [
        (128, 2, 8, 16, 4, 8), (256, 4, 8, 16, 3, 3), (512, 2, 16, 32, 5, 2), (1024, 2, 16, 16, 4, 4),
        (2048, 4, 16, 16, 5, 2), (4096, 8, 16, 16, 5, 1), (FEATURES, 4, 32, 32, 4, 1),
    ],
    (True, 2): [
        (128, 4, 8, 16, 4, 3), (256, 2, 8, 16, 4, 4), (512, 2, 16, 16, 3, 2), (1024, 2, 16, 16, 4, 4),
        (2048, 4, 16, 16, 5, 2), (4096, 8, 16, 16, 5, 1), (FEATURES, 4, 32, 32, 4, 1),
    ],
}  # fmt: skip


def _one_slab(given: Given, backward: bool) -> Launch:
    """Samples of one position, which all programs share: a dense input, or statistics of all positions together."""
    n, c, itemsize, processors = given.n, given.c, given.itemsize, given.processors
    features = given.features
    warps, held, values, stages, most = next(rest for up_to, *rest in _ROWS[backward, itemsize] if features <= up_to)
    ragged = features > 512 and features != c and not backward
    held = _whole(c, 32 if ragged else held)
    if n * features < 2**18:
        warps = 2  # small tiles, so that there are some programs
    # With rows of 768, 2.2 times a copy with four warps, else 2.5; with rows of 3072, 2.1, and 2.9 with eight.
    warps = max(4 if ragged else warps, features // (LANES * held))
    # Of few bits 16 bytes at a time, if pieces are whole then, too: backward (4096, 1, 4096) takes 2.1 so, 2.3 with 8,
    # and forward (4096, 1, 8192) 2.3, and 2.4. But not (200704, 1, 128), which takes 1.9 with four values, 3.4 with
    # eight: the compiler would load tiles twice.
    short = itemsize == 2 and (features <= 64 or features > (512 if backward else 2048))
    short = short and c % (8 * features // held) == 0
    tile, side = arrange(n, c, warps, values, held, 8 if short else 4)
    stages = 1 if given.masked else fitting(stages, _bytes(given, backward) * prod(tile), given.shared)
    splits = min(most * processors, max(processors, n // 16))
    chosen = swept(given, tile, side=side, warps=warps, splits=splits, stages=stages)
    # In float32 (802816, 1, 64) takes 1.69 times a copy so, 1.75 in runs, (6272, 1, 2048) 1.67 and 1.76; backward,
    # (4096, 1, 4096) takes 1.76 times an addition, and 1.81. With more positions runs are as fast or faster.
    return replace(chosen, strided=True)


@lru_cache(maxsize=4096)
def inference(given: Given) -> Launch:
    """The heuristic for inference. A tile is the same for any n, so that a row is summed in the same order."""
    if not given.across:
        return _inferred_last(given)
    return _inferred_across(given) if at_once(given.p, given.c) else _inferred_in_laps(given)


def _inferred_in_laps(given: Given) -> Launch:
    """As in training."""
    p, c, itemsize = given.p, given.c, given.itemsize
    number, positions = laps(p, c), 64
    side = gcd(number * p, 4)
    tile, warps = arrange_across(c // number, 2 if c // number <= LAP else 1, positions, side)
    splits = max(1, 2 * given.processors // blocks_of(p, positions, number)[0])
    stages = 1 if given.masked else fitting(3 if itemsize == 4 else 5, itemsize * prod(tile), given.shared, programs=2)
    chosen = swept(given, tile, side=side, warps=warps, splits=splits, stages=stages, laps=number)
    return replace(chosen, turned=True)


def _inferred_across(given: Given) -> Launch:
    """Where the statistics of columns lie as the input does, which takes another launch, and where as many programs as
    run at a time have two tiles under way beside the one they work on, (128, 3136, 64) takes 1.3 times a copy, else
    1.7: of loads that disagree on which threads hold what, the compiler would follow the wrong ones.

    Pooled statistics are the same at all positions, and those of a tile have to fill a warp then: (64, 784, 128) takes
    1.6 with 64 positions, 2.8 with 32.
    """
    p, c, itemsize, features = given.p, given.c, given.itemsize, given.features
    turned = p * c >= 2**14
    wide = (features <= 64 and p >= 1024) or (given.pooled and turned)
    side, positions = (4, 64) if wide else (4 if turned else 8 // itemsize, 32)
    side, positions = gcd(p, side), min(positions, power_of_two(p))  # (256, 16, 256) takes 2.0 with 16, 18 with 32
    most = 1 if features * positions >= 8192 else 3 if itemsize == 2 else 2
    tile, warps = arrange_across(c, 1 if turned else 2, positions, side)
    stages = fitting(3, itemsize * prod(tile), given.shared, most) if turned and not given.masked else 1
    samples, blocks = rows_of(tile, True), cdiv(p, positions)
    splits = max(1, most * given.processors // blocks) if turned else _apart(given, samples, blocks, 16 // warps)
    return _inferred(given, tile, side, warps, (samples, positions), splits, turned=turned, stages=stages)


def _inferred_last(given: Given) -> Launch:
    """What matters is that enough is under way: (4096, 1, 4096) in float32 takes 1.1 times a copy with two tiles ahead,
    1.3 with none. And that few programs read the statistics of columns, which are longer than rows.
    """
    p, c, itemsize, features = given.p, given.c, given.itemsize, given.features
    warps = 2 if features <= 1024 else max(4, features // 1024)
    held = max(8, min(32 if features > 2048 else 16, features // 32))
    values, stages = max(held, 32 if features == 1024 else 16), 4 if itemsize == 2 else 3
    # Columns stay with their threads where the rows of a tile are positions: (32, 12544, 64) takes 1.1 times a copy
    # so, else 1.3. But not if more programs are begun than run at a time: with eight for each multiprocessor 1.3.
    rows = max(1, 4 * LANES * held // features)
    swapped = p >= 128 and p % rows == 0 and features <= (1024 if itemsize == 2 else 64)
    if swapped:
        warps, values = 4, held
    short = itemsize == 2 and features >= 1024 and c % (8 * features // held) == 0
    side = gcd(c, 8 if short else 4)  # (4096, 1, 4096) takes 1.2 with eight, 1.4 with four
    tile, side = arrange(2**15, c, warps, values, held, side)
    stages = 1 if given.masked else fitting(stages, prod(tile) * itemsize, given.shared)
    rows = rows_of(tile, False)
    if swapped:
        splits = max(1, (5 if features == 512 else 6) * given.processors // cdiv(p, rows))
    else:
        splits = _apart(given, rows, p, 32 // warps)
    extents = (1, rows) if swapped else (rows, 1)
    return _inferred(given, tile, side, warps, extents, splits, swapped=swapped, stages=stages)


def _apart(given: Given, samples: int, blocks: int, programs: int) -> int:
    """Splits of so many blocks where each program has up to 16 tiles, and fewer if that leaves fewer programs than
    there are to be on all multiprocessors: so many on each, or what wide rows want.
    """
    programs = 4 if given.itemsize == 2 and given.features > 1024 else 8 if given.features == 512 else max(1, programs)
    tiles = cdiv(given.n, samples)
    return cdiv(tiles, max(1, min(16, tiles * blocks // (programs * given.processors))))


def _inferred(
    given: Given,
    tile: tuple[int, int, int, int],
    side: int,
    warps: int,
    extents: tuple[int, int],
    splits: int,
    *,
    swapped: bool = False,
    turned: bool = False,
    stages: int,
) -> Launch:
    """In such tiles of samples and positions, in up to so many runs of samples."""
    n, p, c = given[:3]
    samples, positions = extents
    run = samples * cdiv(cdiv(n, samples), splits)
    even = not given.masked and n % samples == 0 and even_positions(p, positions)
    return Launch(
        tile, given.across, side, given.long, even, known(c, tile, given.across), warps, cdiv(p, positions),
        splits=cdiv(n, run), run=run, swapped=swapped, turned=turned, stages=stages,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def shares(given: Given) -> Launch:
    """For what laps have of rows, at inference. Their features are within a warp, so that warps do not wait for each
    other: (64, 784, 512) takes 2.3 times a copy so in all, 2.9 in the tiles of training.
    """
    p, c, itemsize = given.p, given.c, given.itemsize
    number = laps(p, c)
    features = power_of_two(c // number)
    rows, positions = (2, 64) if features <= LAP else (4, 32)
    most = 16 if itemsize == 2 and given.values > 2**23 else 8
    tile = 1, rows, features // rows, positions
    splits = max(1, most * given.processors // blocks_of(p, positions, number)[0])
    chosen = swept(given, tile, side=4, warps=1, splits=splits, laps=number)
    # Stages are the same for any n: which threads have what, and in which order they add, follows from them.
    # (32, 196, 512) takes 2.9 with four, 3.7 with three, in bfloat16.
    return replace(chosen, stages=fitting(4 if itemsize == 2 else 3, itemsize * prod(tile), given.shared, programs=8))
