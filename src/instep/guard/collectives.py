"""Where on a stack a rank waits for others: torch's collectives, World's, and what stands on them. Pure."""

from __future__ import annotations

from instep.guard.sighting import Frame

_WORLD_FILE = "instep/world/world.py"
_WORLD = {
    "sum": "all_reduce",
    "fold": "all_reduce",
    "gather": "all_gather",
    "tell": "broadcast",
    "tell_all": "all_gather",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "join": "init_process_group",
}
"""What World's methods are, in torch's words."""


def user_frame(stack: tuple[Frame, ...]) -> Frame | None:
    """Give the innermost call that the person wrote."""
    return next((frame for frame in stack if frame.users), None)


def explicit_depth(stack: tuple[Frame, ...]) -> int | None:
    """Tell how deep on the stack, from the innermost, a collective was called; None: not since the person's code."""
    found = None
    for depth, frame in enumerate(stack):
        if frame.users:
            break
        if _name(frame):
            found = depth
    return found


def is_worlds(stack: tuple[Frame, ...]) -> bool:
    """Tell whether the collective that a rank is in is one of instep's own."""
    depth = explicit_depth(stack)
    return depth is not None and stack[depth].file.endswith(_WORLD_FILE)


def collective_of(stack: tuple[Frame, ...]) -> str:
    """Name the collective that a rank is in, as torch does; empty if it is in none.

    A backward pass that is blocked waits for the reduction of gradients that DDP has begun in it.
    """
    depth = explicit_depth(stack)
    if depth is not None:
        return _name(stack[depth])
    for frame in stack:
        if frame.users:
            break
        if frame.function == "_engine_run_backward":
            return "backward"
    return ""


def _name(frame: Frame) -> str:
    if frame.file.endswith(_WORLD_FILE):
        return _WORLD.get(frame.function, "")
    public = not frame.function.startswith("_") and frame.function != "wrapper"
    if "torch/distributed/" in frame.file:
        return frame.function if public and "torch/distributed/elastic" not in frame.file else ""
    if frame.file.endswith("torch/nn/parallel/distributed.py"):
        return "DistributedDataParallel" if frame.function == "__init__" else "forward under DDP"
    return ""
