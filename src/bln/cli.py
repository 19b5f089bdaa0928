"""The command ``bln``: a demonstration, the paper's experiments, their data and their report."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import __version__
from ._install import install

_SEVERAL = ("--batch-size", "--fraction", "--norms", "--severities")
"""Options that take several values: ``--batch-size 1 25``."""
_TWO_WORDS = ("reproduce shift", "reproduce resnet", "reproduce transformer")
"""Commands of two words, with options of their own."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error prints a single line on standard error and exits with code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:  # without the extras that the commands need
        print(f"bln {__version__}")
        return
    try:
        from .experiments.commands import app
    except ImportError as error:
        _fail(f"the command line needs {error.name}: {install('experiments')}")
    from .experiments.runs import RunError

    words = _repeat_options(arguments)
    if " ".join(words[:2]) in _TWO_WORDS:
        words[:2] = [" ".join(words[:2])]
    try:
        app(words, prog_name="bln")
    except (ValueError, RunError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}")


def _fail(message: str) -> None:
    print(f"bln: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _repeat_options(arguments: Sequence[str]) -> list[str]:
    """Rewrite ``--norms bln bn`` as ``--norms bln --norms bn``, which the parser understands."""
    words: list[str] = []
    option = None
    for argument in arguments:
        if argument.startswith("--"):
            option = argument if argument in _SEVERAL else None
            words.append(argument)
        elif option and words[-1] != option:
            words += [option, argument]
        else:
            words.append(argument)
    return words
