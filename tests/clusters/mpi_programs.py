"""The two MPIs that the tests run under."""

from __future__ import annotations

from rings import require

MPI = {
    "openmpi": ("/usr/bin/mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"),
    "mpich": ("/usr/bin/mpirun.mpich",),
}


def mpirun(kind: str) -> tuple[str, ...]:
    """Return the words that start a command twice."""
    require("MPI")
    return (*MPI[kind], "-n", "2")
