"""How elastic learns which machines start ranks together: from us, who know it already.

[Note: No rendezvous of elastic's]
Elastic's own rendezvous keeps its state pickled in a store that listens on every interface, so whoever reaches that
port can run code in the launching process. Here the machines of a round are known before elastic is asked to start it:
one machine needs no store but one in its own memory, several use the board's, and nothing that comes from there is
unpickled.

Room: elastic's interface for rendezvous. Ranks: none; this is the process that launches them.
"""

from __future__ import annotations

from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "instep"


class Handshake(RendezvousHandler):
    """Machines that are known to each other, for one start of their ranks."""

    def __init__(self, store: Store, own: int, count: int, address: str) -> None:
        self._store, self._own, self._address = store, own, address
        self.count = count
        """How many machines there are."""

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Say who this machine is among how many, and at which free port of the first one the ranks meet."""
        meeting = RendezvousStoreInfo.build(self._own, self._store, self._address)
        return RendezvousInfo(self._store, self._own, self.count, meeting)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0  # who comes later is the leading process's business

    def get_run_id(self) -> str:
        return BACKEND

    def shutdown(self) -> bool:
        return True


def alone() -> Handshake:
    """Let this machine start ranks by itself."""
    return Handshake(HashStore(), 0, 1, "127.0.0.1")


def among(store: Store, name: str, own: int, count: int, address: str) -> Handshake:
    """Let this machine start ranks as number `own` of several, in a round of that name."""
    return Handshake(PrefixStore(name, store), own, count, address)


def _given(parameters: RendezvousParameters) -> RendezvousHandler:
    found = parameters.config["handshake"]
    assert isinstance(found, RendezvousHandler)
    return found


rendezvous_handler_registry.register(BACKEND, _given)
