"""The rules, one line for each."""

from instep.check.rule import Rule
from instep.check.rules.accumulation_scale import AccumulationScale
from instep.check.rules.batchnorm_not_synced import BatchNormNotSynced
from instep.check.rules.checkpoint_incomplete import CheckpointIncomplete
from instep.check.rules.clipping import Clipping
from instep.check.rules.collective_order import CollectiveOrder
from instep.check.rules.concurrent_writes import ConcurrentWrites
from instep.check.rules.data_not_sharded import DataNotSharded
from instep.check.rules.ddp_options import DdpOptions
from instep.check.rules.device_sync import DeviceSync
from instep.check.rules.eval_padding import EvalPadding
from instep.check.rules.file_order_differs import FileOrderDiffers
from instep.check.rules.forward_bypasses_ddp import ForwardBypassesDdp
from instep.check.rules.gather_cuts_gradient import GatherCutsGradient
from instep.check.rules.gradients_differ import GradientsDiffer
from instep.check.rules.handle_not_waited import HandleNotWaited
from instep.check.rules.load_map_location import LoadMapLocation
from instep.check.rules.load_mismatch import LoadMismatch
from instep.check.rules.local_metric_decides import LocalMetricDecides
from instep.check.rules.loss_summed import LossSummed
from instep.check.rules.metric_of_one_shard import MetricOfOneShard
from instep.check.rules.no_set_epoch import NoSetEpoch
from instep.check.rules.no_sync_misplaced import NoSyncMisplaced
from instep.check.rules.optimizer_before_wrapping import OptimizerBeforeWrapping
from instep.check.rules.parameters_changed_after_wrapping import ParametersChangedAfterWrapping
from instep.check.rules.per_rank_batch import PerRankBatch
from instep.check.rules.process_group_setup import ProcessGroupSetup
from instep.check.rules.rank_dependent_collective import RankDependentCollective
from instep.check.rules.reduce_not_divided import ReduceNotDivided
from instep.check.rules.result_dropped import ResultDropped
from instep.check.rules.resume_replays import ResumeReplays
from instep.check.rules.same_noise import SameNoise
from instep.check.rules.scheduler_steps import SchedulerSteps
from instep.check.rules.seeds import Seeds
from instep.check.rules.set_epoch_swallowed import SetEpochSwallowed
from instep.check.rules.split_differs import SplitDiffers
from instep.check.rules.state_differs import StateDiffers
from instep.check.rules.uneven_inputs import UnevenInputs
from instep.check.rules.worker_seeds_repeat import WorkerSeedsRepeat
from instep.check.rules.wrong_device import WrongDevice
from instep.check.rules.zero_grad import ZeroGrad

RULES: tuple[Rule, ...] = (
    AccumulationScale(),
    BatchNormNotSynced(),
    CheckpointIncomplete(),
    Clipping(),
    CollectiveOrder(),
    ConcurrentWrites(),
    DataNotSharded(),
    DdpOptions(),
    DeviceSync(),
    EvalPadding(),
    FileOrderDiffers(),
    ForwardBypassesDdp(),
    GatherCutsGradient(),
    GradientsDiffer(),
    HandleNotWaited(),
    LoadMapLocation(),
    LoadMismatch(),
    LocalMetricDecides(),
    LossSummed(),
    MetricOfOneShard(),
    NoSetEpoch(),
    NoSyncMisplaced(),
    OptimizerBeforeWrapping(),
    ParametersChangedAfterWrapping(),
    PerRankBatch(),
    ProcessGroupSetup(),
    RankDependentCollective(),
    ReduceNotDivided(),
    ResultDropped(),
    ResumeReplays(),
    SameNoise(),
    SchedulerSteps(),
    Seeds(),
    SetEpochSwallowed(),
    SplitDiffers(),
    StateDiffers(),
    UnevenInputs(),
    WorkerSeedsRepeat(),
    WrongDevice(),
    ZeroGrad(),
)
