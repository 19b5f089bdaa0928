"""timm, also without torchvision: models need of it the names that are imported, and none of what they do."""

import sys
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from unittest.mock import MagicMock

from torch import nn


class Names(ModuleType):
    """A module that has a class of every name."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__") or name == "feature_extraction":
            raise AttributeError(name)
        return type(name, (nn.Module,), {})


@contextmanager
def names_of_torchvision():
    names = ("torchvision", "torchvision.datasets", "torchvision.ops", "torchvision.ops.misc", "torchvision.transforms")
    modules = {name: Names(name) for name in names}
    # torchvision's modes of interpolation become keys of a dict when timm is imported.
    modules["torchvision.transforms.functional"] = functional = Names("torchvision.transforms.functional")
    functional.InterpolationMode = MagicMock()
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules |= modules
    yield
    for name in modules:
        del sys.modules[name]


if find_spec("torchvision"):
    import timm
else:
    with names_of_torchvision():
        import timm

__all__ = ["timm"]
