"""``python -m bln`` is the command ``bln``."""

from .cli import main

main()
