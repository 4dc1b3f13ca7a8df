"""How many processes to start on this node. Pure."""

from instep.core.errors import SpecError


def check_process_count(processes: int | str, cores: int, gpus: int) -> int:
    """Return how many processes auto, gpu, cpu or a number, as LaunchSpec takes them, means on this node."""
    if processes == "gpu" and gpus == 0:
        raise SpecError("processes=gpu asks for one process per GPU, but torch sees no GPU. Use cpu, auto or a number.")
    named: dict[int | str, int] = {"auto": gpus or cores, "gpu": gpus, "cpu": cores}
    count = named[processes] if processes in named else int(processes)
    if count > (most := max(64, 16 * cores)):
        raise SpecError(
            f"processes={count} on a node with {cores} cores and {gpus} GPUs would only wait for each other. "
            f"Use at most {most}; auto starts {named['auto']}."
        )
    return count
