"""``Group``: the process group of a layer, which copies share and which can be pickled if it is ``"world"``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Group:
    """The process group of a layer, as passed: copies share it, and only ``"world"`` can be pickled."""

    def __init__(self, process_group: ProcessGroup | Literal["world"]) -> None:
        if dist.is_available() and dist.is_initialized() and process_group is dist.group.WORLD:
            process_group = "world"
        self.process_group: ProcessGroup | Literal["world"] = process_group
        if isinstance(process_group, str):
            if process_group != "world":
                raise ValueError(f"process_group must be a ProcessGroup, 'world' or None, got {process_group!r}")
        elif not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
            raise TypeError(
                f"process_group must be a torch.distributed ProcessGroup, 'world' or None, got {process_group!r}; "
                "new_group gives none to a process that is no member"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.process_group, str):
            return Group, (self.process_group,)
        raise TypeError(
            "a layer with a process group of its own cannot be pickled, since the group lives in this process. Ways "
            "out: (1) save model.state_dict(); (2) layer.process_group = 'world' or None before, the group again after"
        )

    def __repr__(self) -> str:
        if isinstance(self.process_group, str):
            return repr(self.process_group)
        return f"<{self.process_group.size()} ranks>"

    def resolve(self) -> ProcessGroup | None:
        """The group as it is now; ``None`` while it is this process alone."""
        if isinstance(self.process_group, str) and not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD if isinstance(self.process_group, str) else self.process_group
        return group if group is not None and group.size() > 1 else None
