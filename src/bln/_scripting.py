"""The error for ``torch.jit.script``."""

from __future__ import annotations

from typing import NoReturn

from torch import nn


def refuse_scripting(module: nn.Module) -> NoReturn:
    """Raise an error with the ways out; TorchScript calls a module's ``__prepare_scriptable__`` first."""
    raise NotImplementedError(
        f"torch.jit.script cannot compile {type(module).__name__}. Ways out: (1) torch.export.export(model, (x,)); "
        "(2) torch.jit.trace(model.eval(), x); (3) torch.compile(model)"
    )
