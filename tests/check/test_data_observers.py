"""What observers read of batches, datasets, samplers and generators; a script and its corrected twin, end to end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import commands
from instep.check.observe.datasets import content_of, members_of, root_content, root_index
from instep.check.observe.generators import default_states, held_states
from instep.check.observe.rows import hash_rows, hash_tensors
from instep.check.observe.samplers import sampler_facts

X = torch.arange(40.0).reshape(10, 4)
DATA = TensorDataset(X, torch.arange(10))


class Text(Dataset[str]):
    """The characters of a text."""

    def __init__(self, text: str, name: str = "") -> None:
        self.text, self.name = text, name

    def __getitem__(self, index: int) -> str:
        return self.text[index]


class TestRows:
    @pytest.mark.parametrize(
        "batch",
        [
            (X, torch.arange(10)),
            {"x": X, "nested": [X.bool(), X.to(torch.bfloat16)]},
            [X, [f"text {number}" for number in range(10)]],
            [torch.ones(number + 1) for number in range(10)],
            X[:, :1].expand(10, 7),
        ],
    )
    def test_each_row_has_a_hash_that_follows_it(self, batch: Any) -> None:
        rows = hash_rows(batch, 10)
        assert len(set(rows)) == 10
        assert rows == hash_rows(batch, 10)

    def test_rows_keep_their_hash_in_another_batch(self) -> None:
        order = torch.randperm(10)
        assert [hash_rows((X, X))[index] for index in order] == hash_rows((X[order], X[order]))

    @pytest.mark.parametrize("batch", ["text", 5, None, torch.tensor(1.0), torch.eye(3).to_sparse(), []])
    def test_what_has_no_rows(self, batch: Any) -> None:
        assert hash_rows(batch) == []

    def test_one_hash_of_an_input(self) -> None:
        assert (
            hash_tensors(((X,), {"mask": X})) == hash_tensors(((X.clone(),), {"mask": X})) != hash_tensors(((X,), {}))
        )
        assert hash_tensors("nothing") == 0


class TestDatasets:
    def test_digests_know_the_order_and_the_content(self) -> None:
        turned = TensorDataset(X.flip(0), torch.arange(10).flip(0))
        assert content_of(DATA) == content_of(TensorDataset(X.clone(), torch.arange(10)))
        assert content_of(DATA).in_order != content_of(turned).in_order
        assert content_of(DATA).any_order == content_of(turned).any_order
        assert content_of(DATA).any_order != content_of(TensorDataset(X + 1, torch.arange(10))).any_order

    def test_a_text_is_content_and_a_name_is_not(self) -> None:
        texts = [Text("a" * 5000), Text("b" * 5000), Text("a" * 5000, name="another")]
        first, other, renamed = (content_of(text) for text in texts)
        assert "" != first.in_order != other.in_order
        assert first == renamed
        assert content_of(Text("short")).in_order == ""

    def test_subsets_lead_to_the_root(self) -> None:
        inner = Subset(Subset(DATA, [9, 7, 5, 3]), [1, 2])
        assert [root_index(inner, number) for number in (0, 1)] == [7, 5]
        assert members_of(inner, None) == [5, 7]
        assert root_content(inner) == content_of(DATA).in_order

    def test_indices_of_hugging_face_datasets(self) -> None:
        datasets = pytest.importorskip("datasets")
        parts = datasets.Dataset.from_dict({"x": list(range(20))}).train_test_split(test_size=5, seed=1)
        assert root_content(parts["train"]) == root_content(parts["test"])
        assert members_of(parts["test"], None) == sorted(parts["test"]["x"])

    def test_keys_instead_of_numbers(self) -> None:
        assert root_index(DATA, "a key") == root_index(DATA, "a key") != root_index(DATA, ("another", 1))


class TestSamplers:
    def test_a_distributed_sampler_is_found_inside_a_batch_sampler(self) -> None:
        sampler = DistributedSampler(DATA, 2, 0, seed=3)
        facts = sampler_facts(DataLoader(DATA, batch_sampler=BatchSampler(sampler, 2, False)))
        assert (facts["has_distributed_sampler"], facts["sampler_seed"], facts["is_shuffled"]) == (True, 3, True)

    def test_torchs_own(self) -> None:
        facts = sampler_facts(DataLoader(DATA, 2, shuffle=True, drop_last=True))
        assert (facts["sampler"], facts["num_drawn"], facts["drops_last"]) == ("RandomSampler", 10, True)
        drawn = RandomSampler(DATA, replacement=True, num_samples=3)
        assert sampler_facts(DataLoader(DATA, sampler=drawn))["with_replacement"]


class TestGenerators:
    def test_looking_draws_nothing_and_drawing_is_seen(self) -> None:
        before = default_states()
        assert default_states() == before
        for name, draw in (("torch", lambda: torch.rand(1)), ("numpy", numpy.random.rand), ("random", random.random)):
            draw()
            after = default_states()
            assert {key for key in before if before[key] != after[key]} == {name}
            before = after

    def test_those_that_a_dataset_holds(self) -> None:
        class Holds(Dataset[int]):
            def __init__(self) -> None:
                self.rng, self.generator, self.python = numpy.random.default_rng(0), torch.Generator(), random.Random(1)

        dataset = Holds()
        before = held_states(dataset)
        assert set(before) == {"dataset.rng", "dataset.generator", "dataset.python"}
        dataset.rng.random(), dataset.python.random(), torch.rand(1, generator=dataset.generator)
        assert not {key for key, state in held_states(dataset).items() if before[key] == state}


SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

print("first seed", torch.initial_seed())
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
x = torch.randn(97, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1, keepdim=True))
train, val = random_split(data, [64, 33], generator=torch.Generator().manual_seed(BUG * rank))
sampler = DistributedSampler(train)
loader = DataLoader(train, 16 // world_size, sampler=sampler)
part = DistributedSampler(val, shuffle=False) if BUG else None
evaluation = DataLoader(val if BUG else Subset(val, range(rank, 33, world_size)), 8, sampler=part)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    print(len(next(iter(loader))[0]))  # a look at a batch, before the epoch is set
    if not BUG:
        sampler.set_epoch(epoch + 1)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        total = sum(((model.module(inputs) - targets) ** 2).sum() for inputs, targets in evaluation)
    if not BUG:
        dist.all_reduce(total)
    print(total)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("bug", [True, False])
def test_a_script_and_its_corrected_twin(bug: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("BUG", str(bug)))
    done = commands.run("instep", "check", "-n", "2", "--json", str(script), timeout_s=60)
    assert done.stdout.strip(), done.stderr
    seeds = {line.rpartition(" ")[2] for line in done.stderr.splitlines() if "first seed" in line}
    assert len(seeds) == 2, "ranks that seed nothing draw different numbers, as under torchrun"
    ours = {"no-set-epoch", "set-epoch-swallowed", "split-differs", "eval-padding", "metric-of-one-shard", "seeds"}
    spoke = {name for name in ours if f'"{name}"' in done.stdout.strip().splitlines()[-1]}
    # The call that never happens is in the source: so it counts as swallowed.
    assert spoke == ({"set-epoch-swallowed", "split-differs", "eval-padding", "metric-of-one-shard"} if bug else set())
