"""A progress bar over batches, and the refusal of batches that can be iterated only once."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Sized
from typing import Any, TypeVar

T = TypeVar("T")


def track(items: Iterable[T], description: str) -> Generator[T]:
    """Iterate over ``items`` with a progress bar, where rich is installed and standard error is a terminal."""
    try:
        from rich.console import Console
        from rich.progress import track as rich_track
    except ImportError:
        yield from items
        return
    total = len(items) if isinstance(items, Sized) else None
    console = Console(file=sys.stderr)
    yield from rich_track(
        items, description, total=total, console=console, transient=True, disable=not console.is_terminal
    )


def check_repeatable(batches: Any, why: str) -> None:
    """Refuse an iterator; ``why`` ends the error."""
    if isinstance(batches, Iterator):
        raise TypeError(f"{type(batches).__name__} can be gone through once only, and {why}")
