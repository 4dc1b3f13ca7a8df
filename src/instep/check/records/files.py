"""Files that a script wrote and read, and what a checkpoint holds."""

from dataclasses import dataclass, field

from instep.check.observations import Observation


@dataclass(frozen=True, kw_only=True)
class FileWritten(Observation):
    """A rank opened a file to write to it."""

    path: str
    function: str
    """What wrote it: `torch.save`, `open`."""
    appends: bool = False
    num_shards: int = 1
    """Over how many ranks the tensors that were saved are divided: this file holds one part; 1: they are whole."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Observation):
    """The user's code called `torch.save`, or a function like it."""

    path: str
    holds: list[str] = field(default_factory=list)
    """What was recognised in the object: of `model`, `optimizer`, `scheduler`, `scaler`, `progress`, `generator`."""
    uses: list[str] = field(default_factory=list)
    """What the training has used up to here: of `optimizer`, `scheduler`, `scaler`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointLoaded(Observation):
    """The user's code called `torch.load`."""

    path: str
    has_map_location: bool
    devices: list[str] = field(default_factory=list)
    """The devices of the tensors that came out, such as `cuda:0`."""
    own_device: str = "cpu"
    """The rank's own device."""


@dataclass(frozen=True, kw_only=True)
class WeightsLoaded(Observation):
    """The user's code called `load_state_dict(…, strict=False)` of a module."""

    num_entries: int
    """Of the module."""
    num_loaded: int
    given: str = ""
    """A name in the state that the module does not have."""
    missing: str = ""
    """A name of the module that the state does not have."""
    prefix: str = ""
    """A wrapper's prefix that makes the two alike: `module.`; empty: none."""
