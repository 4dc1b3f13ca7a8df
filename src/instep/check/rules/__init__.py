"""The rules, one line for each."""

from instep.check.rule import Rule
from instep.check.rules.data_not_sharded import DataNotSharded
from instep.check.rules.eval_padding import EvalPadding
from instep.check.rules.file_order_differs import FileOrderDiffers
from instep.check.rules.metric_of_one_shard import MetricOfOneShard
from instep.check.rules.no_set_epoch import NoSetEpoch
from instep.check.rules.per_rank_batch import PerRankBatch
from instep.check.rules.resume_replays import ResumeReplays
from instep.check.rules.seeds import Seeds
from instep.check.rules.set_epoch_swallowed import SetEpochSwallowed
from instep.check.rules.split_differs import SplitDiffers
from instep.check.rules.uneven_inputs import UnevenInputs
from instep.check.rules.worker_seeds_repeat import WorkerSeedsRepeat

RULES: tuple[Rule, ...] = (
    DataNotSharded(),
    EvalPadding(),
    FileOrderDiffers(),
    MetricOfOneShard(),
    NoSetEpoch(),
    PerRankBatch(),
    ResumeReplays(),
    Seeds(),
    SetEpochSwallowed(),
    SplitDiffers(),
    UnevenInputs(),
    WorkerSeedsRepeat(),
)
