"""A progress bar, shown where rich is installed and standard error is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Sized
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], description: str) -> Generator[T]:
    """Iterate over ``items`` with a progress bar on standard error."""
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
