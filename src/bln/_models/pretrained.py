"""Load a converted model of Hugging Face transformers."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from torch import nn

from .convert import convert

M = TypeVar("M", bound=nn.Module)


def load_pretrained(kind: type[M], *args: Any, groups: int = 8, **kwargs: Any) -> M:
    """Load what a model converted by ``bln.convert`` saved with ``save_pretrained``.

    ``kind.from_pretrained`` builds the model with its original norms and drops the statistics of BLN. This function
    converts first and then loads, configurations included; missing, unexpected or mismatched keys are refused.

    Args:
        kind: The model's class, such as ``transformers.BertForSequenceClassification``.
        *args: Passed on to ``from_pretrained``: first of all the folder, or the name on the hub.
        groups: As it was given to ``bln.convert``.
        **kwargs: Passed on likewise.

    Returns:
        The model, in ``eval()``. Set again what a state dict does not hold, such as another ``momentum``.

    Examples:
        Needs ``pip install ".[transformers]"``::

            model = bln.convert(BertForSequenceClassification.from_pretrained(name))
            ...                                            # train
            model.save_pretrained("folder")
            model = bln.load_pretrained(BertForSequenceClassification, "folder")
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module) and hasattr(kind, "from_pretrained")):
        raise TypeError(
            f"expected a model class with from_pretrained, such as transformers.BertForSequenceClassification, got "
            f"{kind!r}; for one chosen by an Auto class, type(AutoModel.from_config(config)) is the class"
        )

    class Converted(kind):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "bln.convert")  # the first conversion gave them
                convert(self, groups=groups)

    Converted.__name__, Converted.__module__ = kind.__name__, kind.__module__  # both are saved, and looked up
    kwargs["ignore_mismatched_sizes"] = True  # they are refused below, with the ways out
    model, info = Converted.from_pretrained(*args, **kwargs, output_loading_info=True)
    wrong = {what: sorted(map(str, info[what])) for what in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        shown = "; ".join(f"{len(keys)} {what}, first {keys[0]}" for what, keys in wrong.items() if keys)
        raise ValueError(
            f"this is no checkpoint of a {kind.__name__} as bln.convert makes it: {shown}. Ways out: (1) of a model "
            f"with its own norms: bln.convert({kind.__name__}.from_pretrained(...)); (2) converted with other groups "
            f"than {groups}: give groups=; (3) with other BLN layers: build the model as it was, then "
            "load_state_dict(safetensors.torch.load_file(...))"
        )
    model.__class__ = kind
    return model  # type: ignore[no-any-return]
