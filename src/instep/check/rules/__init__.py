"""The rules, one line for each."""

from instep.check.rule import Rule
from instep.check.rules.batchnorm_not_synced import BatchNormNotSynced
from instep.check.rules.checkpoint_incomplete import CheckpointIncomplete
from instep.check.rules.collective_order import CollectiveOrder
from instep.check.rules.concurrent_writes import ConcurrentWrites
from instep.check.rules.device_sync import DeviceSync
from instep.check.rules.load_map_location import LoadMapLocation
from instep.check.rules.local_metric_decides import LocalMetricDecides
from instep.check.rules.process_group_setup import ProcessGroupSetup
from instep.check.rules.rank_dependent_collective import RankDependentCollective
from instep.check.rules.reduce_not_divided import ReduceNotDivided
from instep.check.rules.same_noise import SameNoise
from instep.check.rules.scheduler_steps import SchedulerSteps

RULES: tuple[Rule, ...] = (
    BatchNormNotSynced(),
    CheckpointIncomplete(),
    CollectiveOrder(),
    ConcurrentWrites(),
    DeviceSync(),
    LoadMapLocation(),
    LocalMetricDecides(),
    ProcessGroupSetup(),
    RankDependentCollective(),
    ReduceNotDivided(),
    SameNoise(),
    SchedulerSteps(),
)
