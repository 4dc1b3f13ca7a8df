"""The rules, one line for each."""

from instep.check.rule import Rule
from instep.check.rules.accumulation_scale import AccumulationScale
from instep.check.rules.batchnorm_not_synced import BatchNormNotSynced
from instep.check.rules.checkpoint_incomplete import CheckpointIncomplete
from instep.check.rules.clipping import Clipping
from instep.check.rules.collective_order import CollectiveOrder
from instep.check.rules.concurrent_writes import ConcurrentWrites
from instep.check.rules.ddp_options import DdpOptions
from instep.check.rules.device_sync import DeviceSync
from instep.check.rules.forward_bypasses_ddp import ForwardBypassesDdp
from instep.check.rules.gather_cuts_gradient import GatherCutsGradient
from instep.check.rules.gradients_differ import GradientsDiffer
from instep.check.rules.load_map_location import LoadMapLocation
from instep.check.rules.local_metric_decides import LocalMetricDecides
from instep.check.rules.loss_summed import LossSummed
from instep.check.rules.no_sync_misplaced import NoSyncMisplaced
from instep.check.rules.optimizer_before_wrapping import OptimizerBeforeWrapping
from instep.check.rules.parameters_changed_after_wrapping import ParametersChangedAfterWrapping
from instep.check.rules.process_group_setup import ProcessGroupSetup
from instep.check.rules.rank_dependent_collective import RankDependentCollective
from instep.check.rules.reduce_not_divided import ReduceNotDivided
from instep.check.rules.same_noise import SameNoise
from instep.check.rules.scheduler_steps import SchedulerSteps
from instep.check.rules.wrong_device import WrongDevice
from instep.check.rules.zero_grad import ZeroGrad

RULES: tuple[Rule, ...] = (
    AccumulationScale(),
    BatchNormNotSynced(),
    CheckpointIncomplete(),
    Clipping(),
    CollectiveOrder(),
    ConcurrentWrites(),
    DdpOptions(),
    DeviceSync(),
    ForwardBypassesDdp(),
    GatherCutsGradient(),
    GradientsDiffer(),
    LoadMapLocation(),
    LocalMetricDecides(),
    LossSummed(),
    NoSyncMisplaced(),
    OptimizerBeforeWrapping(),
    ParametersChangedAfterWrapping(),
    ProcessGroupSetup(),
    RankDependentCollective(),
    ReduceNotDivided(),
    SameNoise(),
    SchedulerSteps(),
    WrongDevice(),
    ZeroGrad(),
)
