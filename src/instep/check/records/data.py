"""What a rank's DataLoaders yielded: which samples, in which order, for training or for evaluation."""

from dataclasses import dataclass, field

from instep.check.observations import Observation


@dataclass(frozen=True, kw_only=True)
class LoaderMade(Observation):
    """A DataLoader was constructed."""

    loader: str
    """Its name on every rank: `file:line#n` for the n-th one that this line made."""
    dataset: str
    """The class of its dataset."""
    length: int
    """Samples in its dataset; -1: the dataset does not say."""
    is_iterable: bool
    sampler: str
    """The class of what gives the order: the batch sampler if it is not torch's own, else the sampler."""
    num_drawn: int
    """Samples that the sampler draws on this rank in an epoch; -1: it does not say."""
    batch_size: int
    """Samples in a batch; 0: the batch sampler decides, or batches come whole."""
    drops_last: bool
    """Whether the loader or its sampler drops what does not fill a batch or a round of ranks."""
    num_workers: int
    has_distributed_sampler: bool
    """Whether a DistributedSampler is in use: directly, or inside another sampler."""
    sampler_seed: int = -1
    """The seed of that DistributedSampler."""
    is_shuffled: bool = False
    """Whether that DistributedSampler, or torch's RandomSampler, shuffles."""
    with_replacement: bool = False


@dataclass(frozen=True, kw_only=True)
class PassBegan(Observation):
    """An iteration over a DataLoader began."""

    loader: str
    number: int
    """0 for the first iteration over this loader."""
    num_batches: int
    """How many batches the loader says it has; -1: it does not say."""
    content: str
    """A digest of what the dataset holds, in its order; empty: nothing could be read."""
    sorted_content: str
    """The same without the order."""
    root: str
    """A digest of the dataset below all Subsets; equal to `content` where there is none."""
    members: list[int] = field(default_factory=list)
    """A fixed sample of the root's indices that this loader can yield, where it uses a part of the root; sorted."""
    sampler_epoch: int = -1
    """The epoch that the DistributedSampler was set to; -1: there is none."""
    reductions: int = 0
    """Collectives that reduce or gather which the rank had called."""


@dataclass(frozen=True, kw_only=True)
class BatchYielded(Observation):
    """A DataLoader yielded a batch."""

    loader: str
    number: int
    """Of the pass."""
    batch: int
    """0 for the first batch of the pass."""
    indices: list[int]
    """Of its samples, in the root dataset; empty: the loader has none."""
    rows: list[int]
    """A hash of each of its rows; empty: the batch could not be taken apart."""
    is_evaluating: bool
    """Whether gradients were off, or the last call of `train()` or `eval()` was `eval()`."""
    backwards: int
    """Backward passes that followed earlier batches of this pass."""
    reductions: int


@dataclass(frozen=True, kw_only=True)
class PassEnded(Observation):
    """An iteration over a DataLoader ended, or the script did."""

    loader: str
    number: int
    is_exhausted: bool
    """Whether the loader had no more batches."""
    backwards: int
    reductions: int


@dataclass(frozen=True, kw_only=True)
class EpochSeen(Observation):
    """A DataLoader was trained on to its end."""


@dataclass(frozen=True, kw_only=True)
class SecondEpochSeen(Observation):
    """A DataLoader was iterated for training a second time."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSeen(Observation):
    """A DataLoader was evaluated on to its end."""


@dataclass(frozen=True, kw_only=True)
class LoadersEnded(Observation):
    """The script ended."""

    reductions: int


@dataclass(frozen=True, kw_only=True)
class EpochSet(Observation):
    """`DistributedSampler.set_epoch` was called."""

    epoch: int


@dataclass(frozen=True, kw_only=True)
class SplitMade(Observation):
    """A part of a dataset was made with a list of indices: a Subset, of `random_split` or by hand."""

    split: str
    """Its name on every rank: `file:line#n` for the n-th one that this line made."""
    length: int
    digest: int
    """A hash of these members."""
    members: list[int]
    """A fixed sample of its indices in the root dataset; sorted."""
    root: str
    """A digest of that root dataset."""


@dataclass(frozen=True, kw_only=True)
class EpochLoaded(Observation):
    """A file was loaded that says how far a training was."""

    epoch: int
    """-1: it does not say."""
    step_in_file: int
    """-1: it does not say."""
