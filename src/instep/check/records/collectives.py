"""Collectives that a script issued itself, and how it joined and left its process group."""

from dataclasses import dataclass, field

from instep.check.observations import Observation


@dataclass(frozen=True, kw_only=True)
class CollectiveCalled(Observation):
    """A rank is about to issue a collective."""

    name: str
    """As in `torch.distributed`: `all_reduce`."""
    group: list[int]
    """The ranks of the process group."""
    shape: list[int] | None = None
    """Of the tensor, where it must be the same on all ranks."""
    dtype: str = ""
    op: str = ""
    """Of a reduction: `SUM`."""
    root: int | None = None
    """Of a broadcast, reduce, gather or scatter."""
    value: float | None = None
    """Of a tensor with one element on a CPU."""
    package: str = ""
    """The installed package that called it; empty: the user's code."""


@dataclass(frozen=True, kw_only=True)
class ProcessGroupJoined(Observation):
    """`init_process_group` was called."""

    backend: str
    init_method: str = ""
    has_timeout: bool = False
    has_device: bool = True
    """Whether the rank has chosen its device, by `set_device` or `device_id`; true if the backend needs none."""
    package: str = ""


@dataclass(frozen=True, kw_only=True)
class ProcessGroupLeft(Observation):
    """`destroy_process_group` was called."""


@dataclass(frozen=True, kw_only=True)
class ModelSplit(Observation):
    """The ranks hold different parts of the model or of an activation: they are not replicas."""

    how: str
    """The function that did it."""
    packages: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class HandlesMade(Observation):
    """The script has ended: how many asynchronous collectives a line started."""

    num_made: int
    num_waited: int
    """Whose handle the script has waited for, or asked whether it was complete."""
