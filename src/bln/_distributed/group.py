"""The process group that a layer was given: its copies share it, and only ``world`` can be pickled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Group:
    """The process group a layer was given: copies of the layer share it, and only the world can be pickled."""

    def __init__(self, given: ProcessGroup | Literal["world"]) -> None:
        if dist.is_available() and dist.is_initialized() and given is dist.group.WORLD:
            given = "world"
        self.given: ProcessGroup | Literal["world"] = given
        if isinstance(given, str):
            if given != "world":
                raise ValueError(f"process_group must be a ProcessGroup, 'world' or None, got {given!r}")
        elif not (dist.is_available() and isinstance(given, dist.ProcessGroup)):
            raise TypeError(
                f"process_group must be a torch.distributed ProcessGroup, 'world' or None, got {given!r}; new_group "
                "gives none to a process that is no member"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.given, str):
            return Group, (self.given,)
        raise TypeError(
            "a layer with a process group of its own cannot be pickled, since the group lives in this process. Ways "
            "out: (1) save model.state_dict(); (2) layer.process_group = 'world' or None before, the group again after"
        )

    def __repr__(self) -> str:
        if isinstance(self.given, str):
            return repr(self.given)
        return f"<{self.given.size()} ranks>"

    def resolve(self) -> ProcessGroup | None:
        """The group as it is now; ``None`` while it is this process alone."""
        if isinstance(self.given, str) and not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD if isinstance(self.given, str) else self.given
        return group if group is not None and group.size() > 1 else None
