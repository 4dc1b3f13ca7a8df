"""What the tests of clusters share: one SLURM for all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slurm_cluster import SlurmCluster, slurm_cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A real SLURM of four nodes."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a SLURM")
    with slurm_cluster() as cluster:
        yield cluster
