"""Which collective a stack is in: torch's, World's, and what is built on them. Pure."""

from itertools import takewhile

from instep.guard.observation import Frame

_WORLD_FILE = "instep/world/world.py"
_WORLD = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "ordered_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_object": "all_gather",
    "broadcast_object": "broadcast",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "join": "init_process_group",
}
"""torch's names for what World's methods do."""


def user_frame(stack: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost call that the user wrote."""
    return next((frame for frame in stack if frame.users), None)


def library_frames(stack: tuple[Frame, ...]) -> list[Frame]:
    """Return the calls since the user's code, the innermost first."""
    return list(takewhile(lambda frame: not frame.users, stack))


def explicit_depth(stack: tuple[Frame, ...]) -> int | None:
    """Return how deep on the stack, from the innermost call, a collective is; None: none since the user's code."""
    return max((depth for depth, frame in enumerate(library_frames(stack)) if _name(frame)), default=None)


def is_worlds(stack: tuple[Frame, ...]) -> bool:
    """Return whether the collective that a rank is in was called by instep itself."""
    depth = explicit_depth(stack)
    return depth is not None and stack[depth].file.endswith(_WORLD_FILE)


def collective_of(stack: tuple[Frame, ...]) -> str:
    """Return torch's name of the collective that a rank is in; empty: it is in none.

    A blocked backward pass waits for the gradient reduction that DDP has started in it.
    """
    depth = explicit_depth(stack)
    if depth is not None:
        return _name(stack[depth])
    return "backward" if any(frame.function == "_engine_run_backward" for frame in library_frames(stack)) else ""


def _name(frame: Frame) -> str:
    if frame.file.endswith(_WORLD_FILE):
        return _WORLD.get(frame.function, "")
    public = not frame.function.startswith("_") and frame.function != "wrapper"
    if "torch/distributed/" in frame.file:
        return frame.function if public and "torch/distributed/elastic" not in frame.file else ""
    if frame.file.endswith("torch/nn/parallel/distributed.py"):
        return "DistributedDataParallel" if frame.function == "__init__" else "forward under DDP"
    return ""
