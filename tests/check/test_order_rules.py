"""Rules on the order and the shares of training data, on planted observations."""

from __future__ import annotations

from typing import Any

import pytest

from instep.check.finding import Severity
from instep.check.observations import Observation
from instep.check.records.data import EpochLoaded, SplitMade
from instep.check.records.replicas import Joined, ReplicaForward
from instep.check.rules.data_not_sharded import DataNotSharded
from instep.check.rules.file_order_differs import FileOrderDiffers
from instep.check.rules.no_set_epoch import NoSetEpoch
from instep.check.rules.per_rank_batch import PerRankBatch
from instep.check.rules.resume_replays import ResumeReplays
from instep.check.rules.set_epoch_swallowed import SetEpochSwallowed
from instep.check.rules.split_differs import SplitDiffers
from instep.check.rules.uneven_inputs import UnevenInputs
from planted_data import FILE, SCRIPT, judged, made, one_pass, ranks, read

EVEN = [6, 2, 0, 4, 14, 8, 12, 10, 16, 30, 18, 28, 20, 26, 22, 24]
ODD = [number + 1 for number in EVEN]
CALLS = SCRIPT.replace("    for x", "    sampler.set_epoch(epoch)\n    for x")


def epochs(first: list[int], second: list[int], **fields: Any) -> list[Observation]:
    """Return a rank's two epochs."""
    loader = made(**fields)
    return [loader, *one_pass(loader, first), *one_pass(loader, second, number=1)]


class TestSetEpoch:
    def test_an_order_that_repeats_is_found_at_the_loop_over_epochs(self) -> None:
        (finding,) = judged(NoSetEpoch(), ranks(epochs(EVEN, EVEN), epochs(ODD, ODD)))
        assert (finding.severity, finding.file, finding.line) == (Severity.ERROR, FILE, 3)
        assert "16 of 16" in finding.evidence

    def test_another_order_is_sound(self) -> None:
        assert not judged(NoSetEpoch(), ranks(epochs(EVEN, EVEN[::-1]), epochs(ODD, ODD[::-1])))

    def test_data_that_is_not_shuffled_may_repeat(self) -> None:
        ordered = sorted(EVEN)
        assert not judged(NoSetEpoch(), ranks(epochs(ordered, ordered), epochs(ordered, ordered)))

    def test_before_a_second_epoch_it_is_a_warning(self) -> None:
        loader = made()
        one = [loader, *one_pass(loader, EVEN, exhausted=False)]
        (finding,) = judged(NoSetEpoch(), ranks(one, one))
        assert (finding.severity, finding.line) == (Severity.WARNING, 3)
        assert not judged(NoSetEpoch(), ranks(one, one), SCRIPT.replace("for epoch in range(3):", "if True:"))

    def test_a_call_without_effect_is_swallowed(self) -> None:
        observed = ranks(epochs(EVEN, EVEN), epochs(ODD, ODD))
        assert not judged(NoSetEpoch(), observed, CALLS)
        (finding,) = judged(SetEpochSwallowed(), observed, CALLS)
        assert (finding.severity, finding.line) == (Severity.ERROR, 4)
        assert not judged(SetEpochSwallowed(), ranks(epochs(EVEN, EVEN[::-1]), epochs(ODD, ODD[::-1])), CALLS)

    def test_a_wrapper_that_keeps_the_epoch_to_itself_is_cited(self) -> None:
        wrapper = "class Wrapper:\n    def __iter__(self):\n        yield\n    def set_epoch(self, epoch):\n"
        swallows, passes_on = "        self.epoch = epoch\n", "        self.sampler.set_epoch(epoch)\n"
        (finding,) = judged(
            SetEpochSwallowed(), ranks(epochs(EVEN, EVEN), epochs(ODD, ODD)), wrapper + swallows + CALLS
        )
        assert finding.line == 5
        assert [finding.line for finding in read(SetEpochSwallowed(), wrapper + swallows + CALLS)] == [5]
        assert not read(SetEpochSwallowed(), wrapper + passes_on + CALLS)

    def test_the_source_alone(self) -> None:
        assert [finding.line for finding in read(NoSetEpoch(), SCRIPT)] == [3]
        assert not read(NoSetEpoch(), CALLS)
        assert not read(NoSetEpoch(), SCRIPT.replace("shuffle=True", "shuffle=False"))


class TestNotSharded:
    def both(self, one: list[int], other: list[int], rows: bool = True, **fields: Any) -> list[list[Observation]]:
        """Return a training pass of two ranks; without `rows` those are augmented."""
        loader = made(**fields)
        hashed = [one, other] if rows else [[100 + n for n in one], [200 + n for n in other]]
        return [
            [loader, *one_pass(loader, mine, rows=hashes)] for mine, hashes in zip((one, other), hashed, strict=True)
        ]

    @pytest.mark.parametrize("rows", [True, False])
    def test_the_same_samples_on_all_ranks(self, rows: bool) -> None:
        every = {"has_distributed_sampler": False, "sampler": "RandomSampler", "num_drawn": 32}
        (finding,) = judged(DataNotSharded(), ranks(*self.both(EVEN + ODD, ODD + EVEN, rows, **every)))
        assert (finding.severity, finding.line) == (Severity.ERROR, 2)
        assert "32 of the 32" in finding.evidence

    def test_the_same_batches_are_said_to_be_the_same(self) -> None:
        (finding,) = judged(DataNotSharded(), ranks(*self.both(EVEN, EVEN)))
        assert "4 of 4 batches" in finding.evidence

    def test_shares_are_sound(self) -> None:
        assert not judged(DataNotSharded(), ranks(*self.both(EVEN, ODD)))

    def test_parts_that_are_divided_again(self) -> None:
        loader = made(length=16, num_drawn=8)
        halves = [
            [loader, *one_pass(loader, part[:8], began={"root": "r", "members": sorted(part)})] for part in (EVEN, ODD)
        ]
        (finding,) = judged(DataNotSharded(), ranks(*halves))
        assert (finding.severity, finding.line) == (Severity.ERROR, 2)
        assert "draws 8 of them" in finding.evidence
        own = made(length=16, num_drawn=16, has_distributed_sampler=False, sampler="RandomSampler")
        parts = [[own, *one_pass(own, part, began={"root": "r", "members": sorted(part)})] for part in (EVEN, ODD)]
        assert not judged(DataNotSharded(), ranks(*parts))
        same = [
            [loader, *one_pass(loader, half, began={"root": "r", "members": sorted(EVEN)})]
            for half in (EVEN[:8], EVEN[8:])
        ]
        assert not judged(DataNotSharded(), ranks(*same))  # every rank has the same part, for training

    @pytest.mark.parametrize(
        "text",
        [
            "part = data[rank::world_size]\nsampler = DistributedSampler(part)\n",
            "part = Subset(data, range(rank, len(data), world_size))\nsampler = DistributedSampler(part)\n",
            "part = data.shard(num_shards=world_size, index=rank)\ntrain = Loader(part)\naccelerator.prepare(train)\n",
            "rows = np.array_split(rows, world_size)[rank]\nsampler = DistributedSampler(Data(rows))\n",
            "def load():\n    x = read()\n    x = x[rank * n : (rank + 1) * n]\n    return TensorDataset(x)\n"
            "data = load()\nsampler = DistributedSampler(data, shuffle=True)\n",
        ],
    )
    def test_parts_that_are_divided_again_are_read(self, text: str) -> None:
        (finding,) = read(DataNotSharded(), text)
        assert finding.severity == Severity.WARNING
        assert "rank" in text.splitlines()[finding.line - 1]  # where the rank takes its part

    @pytest.mark.parametrize(
        "text",
        [
            "sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)\n",
            "part = data[rank::world_size]\nloader = DataLoader(part)\n",
            "part = data[node_rank::nodes]\nDistributedSampler(part, num_replicas=local_size, rank=local_rank)\n",
            "valid = data[rank::world_size]\nsampler = DistributedSampler(train)\n",
            "train, valid = data[:9], data[9 + rank :: world_size]\nsampler = DistributedSampler(train)\n",
            "def load():\n    return data, data[rank::2]\ntrain, valid = load()\nsampler = DistributedSampler(train)\n",
        ],
    )
    def test_data_that_is_divided_once_is_right(self, text: str) -> None:
        assert not read(DataNotSharded(), text)

    def test_equal_rows_prove_nothing(self) -> None:
        loader = made()
        passes = [[loader, *one_pass(loader, mine, rows=[7] * 16)] for mine in (EVEN, ODD)]
        assert not judged(DataNotSharded(), ranks(*passes))

    def test_equal_indices_in_different_datasets_are_sound(self) -> None:
        loader = made(has_distributed_sampler=False)
        passes = [
            [loader, *one_pass(loader, EVEN, rows=[base + n for n in EVEN], began={"content": root, "root": root})]
            for base, root in ((100, "a"), (200, "b"))
        ]
        assert not judged(DataNotSharded(), ranks(*passes))

    def test_tensor_parallel_ranks_must_see_the_same(self) -> None:
        assert not judged(
            DataNotSharded(), ranks(*self.both(EVEN, EVEN)), SCRIPT + "parallelize_module(model, mesh, {})\n"
        )

    def test_a_batch_that_is_divided_later_is_sound(self) -> None:
        passes = self.both(EVEN, EVEN)
        halves = [
            ReplicaForward(wrapper="ddp", group_size=2, input_hash=rank + 7, num_rows=2, has_grad=True)
            for rank in (0, 1)
        ]
        observed = ranks(*([half, *mine] for half, mine in zip(halves, passes, strict=True)))
        for records in observed.by_rank(ReplicaForward):
            records.pop(0)  # the planted one, of whole batches
        assert not judged(DataNotSharded(), observed)

    def test_workers_that_each_read_the_stream(self) -> None:
        stream = made(
            is_iterable=True, num_workers=2, has_distributed_sampler=False, sampler="_InfiniteConstantSampler"
        )
        rows = [row for start in range(0, 16, 4) for row in EVEN[start : start + 4] * 2]
        mine = [stream, *one_pass(stream, rows)]
        other = [stream, *one_pass(stream, [row + 1 for row in rows])]
        (finding,) = judged(DataNotSharded(), ranks(mine, other))
        assert "2 workers yielded the same 4 rows" in finding.evidence
        apart = [stream, *one_pass(stream, EVEN)], [stream, *one_pass(stream, ODD)]
        assert not judged(DataNotSharded(), ranks(*apart))

    def test_inputs_without_a_loader(self) -> None:
        def inputs(*hashes: int) -> list[Observation]:
            return [
                ReplicaForward(wrapper="ddp", group_size=2, input_hash=value, num_rows=4, has_grad=True)
                for value in hashes
            ]

        (finding,) = judged(DataNotSharded(), ranks(inputs(5, 6, 7), inputs(5, 6, 7)))
        assert finding.severity == Severity.WARNING
        assert not judged(DataNotSharded(), ranks(inputs(5, 6, 7), inputs(8, 9, 10)))


class TestSplits:
    def split(self, name: str, members: list[int]) -> SplitMade:
        return SplitMade(
            split=name, length=len(members), digest=hash(tuple(members)), members=members, root="c", file=FILE, line=9
        )

    def test_a_validation_sample_that_another_rank_trains_on(self) -> None:
        whole = list(range(32))
        mine = [self.split("a", whole[:24]), self.split("b", whole[24:])]
        theirs = [self.split("a", whole[8:]), self.split("b", whole[:8])]
        (finding,) = judged(SplitDiffers(), ranks(mine, theirs))
        assert (finding.severity, finding.line) == (Severity.ERROR, 9)
        assert "8 of 8" in finding.evidence

    def test_equal_splits_and_shares_of_one_part_are_sound(self) -> None:
        whole = list(range(32))
        same = [self.split("a", whole[:24]), self.split("b", whole[24:])]
        assert not judged(SplitDiffers(), ranks(same, same))
        shares = [[self.split("a", whole[rank:24:2]), self.split("b", whole[24:])] for rank in (0, 1)]
        assert not judged(SplitDiffers(), ranks(*shares))

    def test_rows_tell_where_indices_do_not(self) -> None:
        train, valid = made(), made(loader=f"{FILE}:3#0")

        def rank(trains: list[int], validates: list[int]) -> list[Observation]:
            return [train, valid, *one_pass(train, trains), *one_pass(valid, validates, training=False)]

        leaking = ranks(rank(list(range(16)), list(range(16, 32))), rank(list(range(16, 32)), list(range(16))))
        assert judged(SplitDiffers(), leaking)
        assert not judged(SplitDiffers(), ranks(rank(EVEN, list(range(50, 66))), rank(ODD, list(range(66, 82)))))


class TestFileOrder:
    def orders(self, *orders: str, sorted_content: str = "s") -> list[list[Observation]]:
        loader = made()
        return [
            [loader, *one_pass(loader, EVEN, began={"content": order, "sorted_content": sorted_content})]
            for order in orders
        ]

    def test_the_same_things_in_another_order(self) -> None:
        (finding,) = judged(FileOrderDiffers(), ranks(*self.orders("a", "b")))
        assert "2 orders" in finding.evidence
        assert not judged(FileOrderDiffers(), ranks(*self.orders("a", "a")))
        assert not judged(FileOrderDiffers(), ranks(*self.orders("", "")))

    @pytest.mark.parametrize(
        ("listing", "finding"),
        [
            ("self.files = os.listdir(root)", True),
            ("self.files = list(Path(root).glob('*.npy'))", True),
            ("self.files = sorted(os.listdir(root))", False),
            ("self.files = os.listdir(root); self.files.sort()", False),
            ("self.length = len(os.listdir(root))", False),
        ],
    )
    def test_listings_in_a_dataset(self, listing: str, finding: bool) -> None:
        text = "import os\nDistributedSampler(None)\nclass Files(Dataset):\n    def __init__(self, root):\n"
        text += f"        {listing}\n"
        assert [finding.line for finding in read(FileOrderDiffers(), text)] == ([5] if finding else [])

    def test_listings_of_checkpoints_do_not_matter(self) -> None:
        text = "import glob\nDistributedSampler(None)\n"
        text += "def last_checkpoint(path):\n    return max(glob.glob(path), key=len)\n"
        assert not read(FileOrderDiffers(), text)
        assert not read(FileOrderDiffers(), text.replace("max(glob.glob(path), key=len)", "glob.glob(path)[-1]"))


class TestUneven:
    def test_a_rank_that_trains_on_alone(self) -> None:
        loader = made()
        short, long = [loader, *one_pass(loader, EVEN[:8])], [loader, *one_pass(loader, ODD, exhausted=False)]
        (finding,) = judged(UnevenInputs(), ranks(short, long))
        assert (finding.severity, finding.line) == (Severity.ERROR, 4)
        assert "after 2, while rank 1 went on to batch 4" in finding.evidence
        assert not judged(UnevenInputs(), ranks([*short, Joined()], [*long, Joined()]))
        assert not judged(UnevenInputs(), ranks(long, long))

    def test_lengths_foretell_it(self) -> None:
        loader = made()
        passes = [
            [loader, *one_pass(loader, EVEN[:8], exhausted=False, began={"num_batches": number})] for number in (9, 10)
        ]
        (finding,) = judged(UnevenInputs(), ranks(*passes))
        assert finding.severity == Severity.WARNING


class TestBatchSize:
    def test_it_is_noted_where_nothing_depends_on_the_number_of_ranks(self) -> None:
        loader = made()
        observed = ranks([loader, *one_pass(loader, EVEN)], [loader, *one_pass(loader, ODD)])
        (finding,) = judged(PerRankBatch(), observed)
        assert (finding.severity, finding.line) == (Severity.NOTE, 2)
        assert finding.fix.startswith("- batch_size=4\n+ batch_size=4 // world_size")
        (finding,) = judged(PerRankBatch(), observed, SCRIPT.replace("batch_size=4", "batch_size=args.bs + 1"))
        assert finding.fix.startswith("- batch_size=(args.bs + 1)\n+ batch_size=(args.bs + 1) // world_size")
        for sound in (
            SCRIPT.replace("batch_size=4", "batch_size=8 // world_size"),
            SCRIPT.replace("batch_size=4", "batch_size=args.per_device_batch"),
            SCRIPT + "lr = args.lr * dist.get_world_size()\n",
        ):
            assert not judged(PerRankBatch(), observed, sound)


class TestResume:
    SAVES = SCRIPT + "        if step % 100 == 0:\n            torch.save(state, path)\n"
    RESUMES = "import torch\nckpt = torch.load(path)\nstart = ckpt['epoch']\n"

    def test_a_save_inside_an_epoch_and_no_way_to_go_on_there(self) -> None:
        assert [finding.line for finding in read(ResumeReplays(), self.RESUMES + self.SAVES)] == [3]

    @pytest.mark.parametrize(
        "sound",
        [
            RESUMES + SCRIPT,
            RESUMES + SAVES.replace("in loader", "in islice(loader, ckpt['batches'], None)"),
            RESUMES
            + SAVES.replace("        loss =", "        if i < ckpt['i']:\n            continue\n        loss ="),
            SAVES,
            RESUMES + SCRIPT + "    for name in names:\n        torch.save(evaluator.eval, name)\n",
            "import torch\nmodel.load_state_dict(torch.load(path))\n" + SAVES,
            "import torch\nweights = torch.load(path)\nmodel.load_state_dict(weights)\n" + SAVES,
        ],
    )
    def test_sound_ways(self, sound: str) -> None:
        assert not read(ResumeReplays(), sound)

    def test_an_epoch_that_is_skipped_and_one_that_is_replayed(self) -> None:
        loader, loaded = made(), EpochLoaded(epoch=0, step_in_file=-1, file=FILE, line=1, step=2)
        broken_off = [loader, *one_pass(loader, EVEN[:8], exhausted=False), loaded]
        skipped = [*broken_off, *one_pass(loader, [], number=1, step=2)]
        assert "no batches" in judged(ResumeReplays(), ranks(skipped, skipped))[0].message
        replayed = [*broken_off, *one_pass(loader, EVEN, number=1, step=2)]
        assert "8 samples of the epoch came again" in judged(ResumeReplays(), ranks(replayed, replayed))[0].evidence
        continued = [*broken_off, *one_pass(loader, EVEN[8:], number=1, step=2)]
        assert not judged(ResumeReplays(), ranks(continued, continued))

    def test_the_epoch_of_the_file_and_of_the_sampler(self) -> None:
        loader, loaded = made(), EpochLoaded(epoch=3, step_in_file=-1, file=FILE, line=1)
        for sampler_epoch, number in ((0, 1), (4, 0)):
            mine = [loaded, loader, *one_pass(loader, EVEN, began={"sampler_epoch": sampler_epoch})]
            assert len(judged(ResumeReplays(), ranks(mine, mine))) == number
