"""Run jobs in several processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def threads(workers: int) -> int:
    """Return the number of threads for each of ``workers`` processes."""
    return max(1, (os.cpu_count() or 1) // workers)


def side_by_side(function: Callable[..., T], jobs: Iterable[tuple[Any, ...]], workers: int) -> Iterator[T]:
    """Call the function with the arguments of each job, and yield results as soon as they are ready."""
    from joblib import Parallel, delayed

    parallel = Parallel(
        n_jobs=workers, backend="loky", batch_size=1, pre_dispatch=workers, return_as="generator_unordered"
    )
    results: Iterator[T] = parallel(delayed(_call)(threads(workers), function, *job) for job in jobs)
    return results


def _call(count: int, function: Callable[..., T], *job: Any) -> T:
    torch.set_num_threads(count)
    return function(*job)
