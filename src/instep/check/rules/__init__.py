"""The rules, one line for each."""

from instep.check.rule import Rule
from instep.check.rules.accumulation_scale import AccumulationScale
from instep.check.rules.clipping import Clipping
from instep.check.rules.ddp_options import DdpOptions
from instep.check.rules.forward_bypasses_ddp import ForwardBypassesDdp
from instep.check.rules.gather_cuts_gradient import GatherCutsGradient
from instep.check.rules.gradients_differ import GradientsDiffer
from instep.check.rules.loss_summed import LossSummed
from instep.check.rules.no_sync_misplaced import NoSyncMisplaced
from instep.check.rules.optimizer_before_wrapping import OptimizerBeforeWrapping
from instep.check.rules.parameters_changed_after_wrapping import ParametersChangedAfterWrapping
from instep.check.rules.wrong_device import WrongDevice
from instep.check.rules.zero_grad import ZeroGrad

RULES: tuple[Rule, ...] = (
    AccumulationScale(),
    Clipping(),
    DdpOptions(),
    ForwardBypassesDdp(),
    GatherCutsGradient(),
    GradientsDiffer(),
    LossSummed(),
    NoSyncMisplaced(),
    OptimizerBeforeWrapping(),
    ParametersChangedAfterWrapping(),
    WrongDevice(),
    ZeroGrad(),
)
