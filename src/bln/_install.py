"""The command that installs optional dependencies, for error messages. Imports nothing else."""

from __future__ import annotations

_FROM = "."
"""What pip installs: a checkout until the distribution is published, then ``batch-layer-norm``."""
_WHERE = " in a checkout of BLN"
"""Where to run the command; empty once the distribution is published."""


def install(*extras: str) -> str:
    """Return the command that installs these extras.

    >>> install("experiments", "ray")
    'pip install ".[experiments,ray]" in a checkout of BLN'
    """
    return f'pip install "{_FROM}[{",".join(extras)}]"{_WHERE}'
