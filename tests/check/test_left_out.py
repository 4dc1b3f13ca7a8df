"""Results that nobody reads, halves of a ratio, files nobody waits for: in planted sources, and on planted looks."""

from __future__ import annotations

import pytest
from planted_looks import rank

from instep.check.finding import Severity
from instep.check.records.gradients import GradientsClipped
from instep.check.records.replicas import ReplicaForward
from instep.check.rule import Rule
from instep.check.rules.accumulation_scale import AccumulationScale
from instep.check.rules.checkpoint_incomplete import CheckpointIncomplete
from instep.check.rules.clipping import Clipping
from instep.check.rules.concurrent_writes import ConcurrentWrites
from instep.check.rules.eval_padding import EvalPadding
from instep.check.rules.gradients_differ import GradientsDiffer
from instep.check.rules.local_metric_decides import LocalMetricDecides
from instep.check.rules.loss_summed import LossSummed
from instep.check.rules.reduce_not_divided import ReduceNotDivided
from instep.check.rules.result_dropped import ResultDropped
from instep.check.rules.seeds import Seeds
from instep.check.rules.state_differs import StateDiffers
from planted_gradients import judged
from state_evidence import line_of, read

EVALUATES = """\
def evaluate(model, loader):
    hits, seen = torch.zeros(()), 0
    for x, y in loader:
        hits += (model(x) == y).sum()
        seen += len(y)
    dist.all_reduce(hits)
    return hits / seen
"""
COUNTS = """\
def train(loader):
    window = torch.zeros(2)
    for x, y in loader:
        window[0] += x.sum()
        if step % 5 == 0:
            dist.all_reduce(window)
            print(window[0])
"""
SLICES = "def main():\n    mine = order[rank::2]\n"
BATCH = "mine = order[rank::2]\nfor x, order in loader:\n    f(x)\n"


class TestResultDropped:
    @pytest.mark.parametrize(
        ("text", "is_lost"),
        [
            ("dist.all_reduce(torch.tensor(hits))\n", True),
            ("dist.all_reduce(p.grad.clone())\n", True),
            ("dist.all_reduce(hits / seen)\n", True),
            ("dist.all_reduce(torch.tensor([1.0], device=device))\n", False),  # waits for the others
            ("dist.all_reduce(torch.zeros(1))\n", False),
            ("dist.all_reduce(hits.view(-1))\n", False),
            ("dist.all_reduce(p.grad.data)\n", False),
            ("dist.broadcast_object_list([seed], src=0)\n", True),
            ("seeds = [seed]\ndist.broadcast_object_list(seeds, src=0)\nprint(seeds[0])\n", False),
            ("def f(seed):\n    seeds = [seed]\n    dist.broadcast_object_list(seeds, src=0)\n    use(seed)\n", True),
            ("def f(hits):\n    t = torch.tensor(hits)\n    dist.all_reduce(t)\n    return hits\n", True),
            ("def f(hits):\n    t = torch.tensor(hits)\n    dist.all_reduce(t)\n    return t\n", False),
            ("def f(ps):\n    for p in ps:\n        g = p.grad.view(-1)\n        dist.all_reduce(g)\n", False),
            ("def f(hits):\n    t = torch.tensor([1.0])\n    dist.all_reduce(t)\n    return hits\n", False),
            ("accelerator.reduce(loss)\n", True),
            ("loss = accelerator.reduce(loss)\n", False),
        ],
    )
    def test_what_is_lost(self, text: str, is_lost: bool) -> None:
        assert len(read(ResultDropped(), text)) == is_lost

    def test_a_reduced_copy_that_a_function_returns(self) -> None:
        text = "def mean(x):\n    t = x.clone()\n    dist.all_reduce(t)\n    return t / 2\nmean(loss)\nprint(loss)\n"
        assert [finding.line for finding in read(ResultDropped(), text)] == [line_of(text, "mean(loss)")]
        assert read(ResultDropped(), text.replace("\nmean(loss)", "\nloss = mean(loss)")) == []


class TestReduceNotDivided:
    def test_a_sum_divided_by_a_count_of_one_rank(self) -> None:
        assert [f.line for f in read(ReduceNotDivided(), EVALUATES)] == [line_of(EVALUATES, "return hits")]

    @pytest.mark.parametrize(
        "change",
        [
            ("    return", "    seen = torch.tensor(seen)\n    dist.all_reduce(seen)\n    return"),
            ("hits / seen", "hits / seen / dist.get_world_size()"),
            ("seen += len(y)", "pass"),
        ],
    )
    def test_counts_of_all_ranks(self, change: tuple[str, str]) -> None:
        assert read(ReduceNotDivided(), EVALUATES.replace(*change)) == []

    def test_a_sum_that_is_summed_again(self) -> None:
        assert [f.line for f in read(ReduceNotDivided(), COUNTS)] == [line_of(COUNTS, "all_reduce")]
        assert read(ReduceNotDivided(), COUNTS + "            window.zero_()\n") == []

    def test_each_parameter_in_turn(self) -> None:
        text = "for p in ps:\n    p.grad += noise(p)\n    dist.all_reduce(p.grad)\n"
        assert read(ReduceNotDivided(), text) == []

    def test_the_largest_as_a_mean(self) -> None:
        text = "def f(loss):\n    dist.all_reduce(loss, op=dist.ReduceOp.MAX)\n    print(loss)\n"
        assert len(read(ReduceNotDivided(), text)) == 1
        assert read(ReduceNotDivided(), text.replace("loss", "slowest_loss")) == []


class TestOrders:
    GATHERED = """\
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    def evaluate(loader):
        preds = torch.cat([model(x) for x, _ in loader])
        parts = [torch.zeros_like(preds) for _ in range(2)]
        dist.all_gather(parts, preds)
        return (torch.cat(parts) == loader.dataset.labels).float().mean()
    """

    def test_labels_in_another_order(self) -> None:
        assert len(read(EvalPadding(), self.GATHERED)) == 1
        assert read(EvalPadding(), self.GATHERED.replace("torch.cat(parts)", "torch.stack(parts, 1).flatten()")) == []

    @pytest.mark.parametrize(
        ("text", "num"),
        [
            ("names = list(set(users))\ntrain = names[:9]\n", 1),
            ("names = list(set(users))\nrng.shuffle(names)\n", 1),
            ("names = sorted(set(users))\ntrain = names[:9]\n", 0),
            ("bucket = hash(word) % 64\n", 1),
            ("bucket = hash((3, 7)) % 64\n", 0),
            ("seed = hash((seed, rank)) % 64\n", 0),
        ],
    )
    def test_orders_and_hashes_of_a_process(self, text: str, num: int) -> None:
        assert len(read(StateDiffers(), text)) == num


class TestFiles:
    MISSING = (
        "def load(path):\n    if not os.path.exists(path):\n        np.save(path, make())\n    return 1\nload(p)\n"
    )
    EARLY = "def f(path):\n    if rank == 0:\n        np.save(path, make())\n    return np.load(path)\n"

    def test_every_rank_writes_what_it_does_not_find(self) -> None:
        assert [f.line for f in read(ConcurrentWrites(), self.MISSING)] == [line_of(self.MISSING, "np.save")]

    @pytest.mark.parametrize(
        "change",
        [
            ("if not", "if rank == 0 and not"),
            ("        np.save(path, make())", "        np.save(tmp, make())\n        os.replace(tmp, path)"),
            ("load(p)", "with FileLock(p):\n    load(p)"),
            ("load(p)", "if rank != 0:\n    dist.barrier()\nload(p)\nif rank == 0:\n    dist.barrier()"),
        ],
    )
    def test_one_rank_at_a_time(self, change: tuple[str, str]) -> None:
        assert read(ConcurrentWrites(), self.MISSING.replace(*change)) == []

    def test_a_file_that_nobody_waits_for(self) -> None:
        assert [f.line for f in read(ConcurrentWrites(), self.EARLY)] == [line_of(self.EARLY, "np.load")]
        assert read(ConcurrentWrites(), self.EARLY.replace("    return", "    dist.barrier()\n    return")) == []


class TestScales:
    def test_a_hook_that_sums(self) -> None:
        text = "def hook(state, bucket):\n    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()\n"
        text += "model.register_comm_hook(None, hook)\n"
        assert len(read(LossSummed(), text)) == 1
        assert read(LossSummed(), text.replace("buffer()", "buffer().div_(2)")) == []

    def test_a_loss_that_the_framework_divides(self) -> None:
        text = "accelerator = Accelerator(gradient_accumulation_steps=n)\naccelerator.backward(loss / n)\n"
        assert len(read(AccumulationScale(), text)) == 1
        assert read(AccumulationScale(), text.replace("loss / n", "loss")) == []

    @pytest.mark.parametrize(
        ("rule", "text", "cure"),
        [
            (
                LossSummed(),
                "for p in model.parameters():\n    dist.all_reduce(p.data)\n",
                ("(p.data)\n", "(p.data)\n    p.data /= 2\n"),
            ),
            (
                GradientsDiffer(),
                "for x in d:\n    f(x).backward()\n    for p in m.parameters():\n        dist.broadcast(p, 0)\n",
                ("    for p", "    dist.all_reduce(w.grad)\n    for p"),
            ),
        ],
    )
    def test_weights_by_hand(self, rule: Rule, text: str, cure: tuple[str, str]) -> None:
        assert len(read(rule, text)) == 1
        assert read(rule, text.replace(*cure)) == []

    def test_norms_of_shards(self) -> None:
        text = "def step(p):\n    w = p.to_local()\n    p.add_(1, alpha=0.1 * w.norm())\n"
        assert len(read(Clipping(), text)) == 1
        assert read(Clipping(), text.replace("    p.add", "    dist.all_reduce(x)\n    p.add")) == []

    def test_limits_of_each_rank(self) -> None:
        def clip(limit: float) -> GradientsClipped:
            fields = {"order": 1, "optimizers": [0], "function": "f", "norm": 1.0, "pending_scale": 1.0}
            return GradientsClipped(file="train.py", line=3, limit=limit, sharded=False, **fields)  # type: ignore[arg-type]

        (finding,) = judged(Clipping(), [clip(1.0)], [clip(1.1)])
        assert (finding.severity, finding.line) == (Severity.ERROR, 3)
        assert judged(Clipping(), [clip(1.0)], [clip(1.0)]) == []

    def test_a_rate_that_follows_the_rank_s_own_loss(self) -> None:
        text = "for x in loader:\n    loss = f(x)\n    loss.backward()\n    if loss.item() > 2:\n"
        text += "        for group in opt.param_groups:\n            group['lr'] *= 0.5\n"
        assert len(read(LocalMetricDecides(), text)) == 1
        assert read(LocalMetricDecides(), text.replace("loss.item() > 2", "step > 2")) == []

    def test_an_entry_that_a_resume_leaves_out(self) -> None:
        text = "s = torch.load('last.pt')\nm.load_state_dict(s['model'])\no.load_state_dict(s['opt'])\n"
        text += "for x in loader:\n    f(x).backward()\n    torch.save({'model': m.state_dict(),"
        text += " 'opt': o.state_dict(), 'sched': sched.state_dict(), 'epoch': 1}, 'last.pt')\n"
        assert any("`sched`" in finding.message for finding in read(CheckpointIncomplete(), text))
        text = text.replace("for x", "sched.load_state_dict(s['sched'])\nfor x", 1)
        assert not any("`sched`" in finding.message for finding in read(CheckpointIncomplete(), text))

    def test_averaged_weights_that_are_not_saved(self) -> None:
        text = "state = torch.load('last.pt')\nfor x in loader:\n    loss(x).backward()\n    ema.update(model)\n"
        text += "    torch.save({'model': m.state_dict(), 'optimizer': o.state_dict(), 'epoch': 1}, 'last.pt')\n"
        assert any("averaged" in finding.message for finding in read(CheckpointIncomplete(), text))
        text = text.replace("'epoch'", "'ema': ema.state_dict(), 'epoch'")
        assert not any("averaged" in finding.message for finding in read(CheckpointIncomplete(), text))


class TestLiveState:
    LOSS = "for x in loader:\n    cut = 0.9 * cut + x.mean()\n    loss = (x * (x > cut)).mean()\n    loss.backward()\n"

    def test_what_goes_into_the_loss(self) -> None:
        ranks = [rank(*({"numbers": {"cut": own + number}} for number in range(3))) for own in (1.0, 2.0)]
        (finding,) = judged(StateDiffers(), *ranks, source="cut = 0.0\n" + self.LOSS)
        assert finding.severity == Severity.WARNING
        assert judged(StateDiffers(), ranks[0], ranks[0], source="cut = 0.0\n" + self.LOSS) == []

    @pytest.mark.parametrize(
        "source",
        [
            self_made.replace("(x > cut)", "(x > 0)")
            for self_made in ("cut = 0.0\n" + LOSS, "cut = 0.0\n" + LOSS + "print(cut)\n")
        ]
        + ["for x in loader:\n    cut = x.mean()\n    loss = (x * (x > cut)).mean()\n    loss.backward()\n"]
        + ["for cut, x in loader:\n    loss = cut * x\n    loss.backward()\n"],
    )
    def test_what_does_not(self, source: str) -> None:
        ranks = [rank(*({"numbers": {"cut": own + number}} for number in range(3))) for own in (1.0, 2.0)]
        assert judged(StateDiffers(), *ranks, source=source) == []

    @pytest.mark.parametrize(
        ("update", "num"),
        [
            ("self.cut = 0.9 * self.cut + 0.1 * x.mean()", 1),
            ("self.cut += x.mean()", 1),
            ("self.cut = batch[1]", 0),
            ("self.cut = self.cut + np.random.beta(1, 1)", 0),
        ],
    )
    def test_attributes_of_a_batch(self, update: str, num: int) -> None:
        source = f"class T:\n    def step(self, x):\n        {update}\n        (x * self.cut).backward()\n"
        ranks = [rank(*({"numbers": {"t.cut": own + number}} for number in range(3))) for own in (1.0, 2.0)]
        assert len(judged(StateDiffers(), *ranks, source=source)) == num

    def test_what_is_collected_for_the_batches_of_one_turn(self) -> None:
        source = (
            "gain = 0.0\nfor turn in turns:\n    gain = play(turn)\n    for t in turn:\n        gain = t + 0.9 * gain\n"
        )
        source += "    for x in turn:\n        loss = (x * gain).mean()\n        loss.backward()\n"
        ranks = [rank(*({"numbers": {"gain": own + number}} for number in range(3))) for own in (1.0, 2.0)]
        assert judged(StateDiffers(), *ranks, source=source) == []
        assert len(judged(StateDiffers(), *ranks, source=source.replace("    gain = play(turn)\n", ""))) == 1

    TUNES = "@torch.no_grad()\ndef tune(net):\n    return net(x)\n\ndef main():\n    cut, cutoff = 0, tune(net)\n"

    @pytest.mark.parametrize(
        ("name", "source", "num"),
        [
            ("cutoff", TUNES, 1),
            ("cutoff", TUNES.replace("    cut, cutoff = 0,", "    if rank == 0:\n        cutoff ="), 0),
            ("cutoff", TUNES.replace("@torch.no_grad()", ""), 0),
            ("local_cutoff", TUNES.replace("cut, cutoff = 0,", "local_cutoff ="), 0),
        ],
    )
    def test_what_an_evaluation_fits_to_a_part(self, name: str, source: str, num: int) -> None:
        together = ReplicaForward(wrapper="ddp", group_size=2, input_hash=1, num_rows=1, has_grad=True)
        ranks = [[*rank({"numbers": {name: own}}, moment="evaluated"), together] for own in (0.3, 0.6)]
        assert len(judged(StateDiffers(), *ranks, source=source)) == num

    def test_a_running_sum_is_no_average(self) -> None:
        source = "def main():\n    for turn in turns:\n        running = torch.zeros(2)\n        running += parts\n"
        ranks = [rank(*({"tensors": {"running": own + number}} for number in range(3))) for own in (10, 20)]
        assert judged(StateDiffers(), *ranks, source=source) == []
        assert len(judged(StateDiffers(), *ranks, source=source.replace("zeros(2)", "load(path)"))) == 1

    def test_layers(self) -> None:
        looks = [{"layers": {"model.drop": f"training=True, p={p}"}} for p in (0.1, 0.3)]
        (finding,) = judged(StateDiffers(), rank(looks[0]), rank(looks[1]), source="if rank == 0:\n    drop.p = 0.1\n")
        assert (finding.severity, finding.line) == (Severity.WARNING, 2)

    def test_rank_0_may_evaluate_alone_at_the_end(self) -> None:
        looks = [rank({"layers": {"model": f"training={mode}"}}, moment="left") for mode in (True, False)]
        assert judged(StateDiffers(), *looks, source="if rank == 0:\n    model.eval()\n") == []

    def test_learning_rates(self) -> None:
        looks = [{"settings": {"0.0.lr": lr}} for lr in (0.1, 0.2)]
        source = 'for group in optimizer.param_groups:\n    group["lr"] = loss.item()\n'
        (finding,) = judged(StateDiffers(), rank(looks[0]), rank(looks[1]), source=source)
        assert (finding.severity, finding.line) == (Severity.ERROR, 2)
        assert judged(StateDiffers(), rank(looks[0]), rank(looks[1]), source="schedule.step()\n") == []

    @pytest.mark.parametrize(
        ("source", "num"), [(SLICES, 1), ("mine = order[:8]\n", 0), (BATCH, 0), (SLICES.replace("main", "other"), 0)]
    )
    def test_orders(self, source: str, num: int) -> None:
        together = ReplicaForward(wrapper="ddp", group_size=2, input_hash=1, num_rows=1, has_grad=True)
        ranks = [[*rank({"orders": {"order": own}}), together] for own in (1, 2)]
        found = judged(Seeds(), *ranks, source="order = 1\n" + source)
        assert len(found) == num
