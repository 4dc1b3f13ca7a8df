"""The two MPIs that the tests run under."""

from __future__ import annotations

import os

MPI = {
    "openmpi": ("/usr/bin/mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"),
    "mpich": ("/usr/bin/mpirun.mpich",),
}


def mpirun(kind: str) -> tuple[str, ...]:
    """Give the words that start a command twice."""
    program = MPI[kind][0]
    assert os.access(program, os.X_OK), f"{program} cannot be found. Run tests/clusters/install."
    return (*MPI[kind], "-n", "2")
