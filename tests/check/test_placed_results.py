"""Results of all ranks beside rows in another order, and neighbours among one rank's samples, in planted sources."""

from __future__ import annotations

import pytest

from instep.check.rules.eval_padding import EvalPadding
from instep.check.rules.metric_of_one_shard import MetricOfOneShard
from planted_data import made, one_pass
from state_evidence import judge, line_of, read

HEAD = """\
sampler = torch.utils.data.DistributedSampler(test, shuffle=False)
loader = torch.utils.data.DataLoader(test, sampler=sampler)
"""
GATHERS = """\
def gather(t):
    parts = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(parts, t)
    return JOIN
def predict(net, loader):
    out = []
    for x in loader:
        out.append(net(x))
    return gather(torch.cat(out)).cpu()
"""
RIGHT_ORDERS = {
    "interleaved": ("torch.stack(parts, 1).flatten()", "zip(names, preds)"),
    "sorted": ("torch.cat(parts)[order]", "zip(names, preds)"),
    "of ranks": ("torch.cat(parts)", "zip(range(world), preds)"),
    "gathered, too": ("torch.cat(parts)", "zip(gather(torch.cat(names)), preds)"),
    "reduced": ("torch.cat(parts).mean(0)", "zip(names, preds)"),
}


def uses(join: str, use: str) -> str:
    return HEAD + GATHERS.replace("JOIN", join) + f"preds = predict(net, loader)\n{use}\n"


@pytest.mark.parametrize(
    "use",
    [
        "rows = zip(names, preds.argmax(1).tolist())",
        "table = pandas.DataFrame({'id': names, 'label': preds})",
        "table = pandas.read_csv('test.csv')\ntable['label'] = preds.numpy()",
        "for number, row in enumerate(preds):\n    print(names[number], row)",
        "for x, y, index in train_loader:\n    loss = distance(model(x), preds[index])",
        "right = preds == test_dataset.targets",
        "def write(a, b):\n    return list(zip(a, b))\nwrite(names, preds)",
    ],
    ids=["zip", "table", "column", "enumerate", "index", "labels", "parameters"],
)
def test_results_beside_rows_in_order(use: str) -> None:
    text = uses("torch.cat(parts)", use)
    assert {finding.line for finding in read(EvalPadding(), text)} <= {
        line_of(text, "gather(torch.cat(out))"),
        line_of(text, "zip(a, b)") if "zip(a, b)" in text else 0,
    }
    assert len(read(EvalPadding(), text)) == 1
    pieces = text + "mine = test[rank * n : (rank + 1) * n]\n"
    assert not read(EvalPadding(), pieces), "each rank has one piece"


@pytest.mark.parametrize("case", RIGHT_ORDERS)
def test_orders_that_fit(case: str) -> None:
    join, use = RIGHT_ORDERS[case]
    assert not read(EvalPadding(), uses(join, use))


def test_a_list_with_an_element_for_each_rank() -> None:
    text = HEAD + GATHERS.replace("return JOIN", "return list(zip(hosts, parts))")
    assert not read(EvalPadding(), text)
    assert read(EvalPadding(), text.replace("zip(hosts, parts)", "zip(hosts, torch.cat(parts))"))


@pytest.mark.parametrize(("share", "num_findings"), [("turns", 1), ("pieces", 0)])
def test_what_ranks_were_seen_to_evaluate_decides(share: str, num_findings: int) -> None:
    text = uses("torch.cat(parts)", "rows = zip(names, preds)")
    samples = [range(rank, 32, 2) if share == "turns" else range(16 * rank, 16 * rank + 16) for rank in (0, 1)]
    loader = made(is_shuffled=False)
    ranks = [[loader, *one_pass(loader, list(one), training=False)] for one in samples]
    found = [finding for finding in judge(EvalPadding(), ranks, text) if "rank by rank" in finding.message]
    assert len(found) == num_findings


GALLERY = """\
def recall(net, loader):
    features = []
    for x in loader:
        features.append(net.embed(x))
    features = torch.cat(features)
    GATHER
    near = (features @ gallery.T).topk(5).indices
    hits = score(near)
    dist.all_reduce(hits)
    return hits
"""


@pytest.mark.parametrize(
    ("gather", "head", "num_findings"),
    [
        ("gallery = torch.cat(features)", HEAD, 1),
        ("gallery = all_gather(features)", HEAD, 0),
        ("gallery = torch.cat(features)", "loader = torch.utils.data.DataLoader(test)\nrecall(net, loader)\n", 0),
    ],
    ids=["own", "gathered", "whole"],
)
def test_neighbours_among_the_rank_s_own_samples(gather: str, head: str, num_findings: int) -> None:
    text = head + GALLERY.replace("features = torch.cat(features)", "rows = features").replace("GATHER", gather)
    found = [finding.line for finding in read(MetricOfOneShard(), text) if "nearest" in finding.message]
    assert found == [line_of(text, "near =")] * num_findings
