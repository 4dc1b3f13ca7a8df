"""What the graph of a loss tells about how it was made."""

import pytest
import torch
import torch.nn.functional as F

from instep.check.observe.loss_graph import LossGraph, read_loss

X = torch.arange(24.0).reshape(6, 4).requires_grad_()
Y = torch.tensor([0, 1, -100, 2, 3, 1])
TOKENS = {"num_targets": 5, "num_ignored": 1}


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda: F.cross_entropy(X, Y), LossGraph(1.0, "mean", **TOKENS)),
        (lambda: F.cross_entropy(X, Y) / 4, LossGraph(0.25, "mean", **TOKENS)),
        (lambda: 0.5 * F.cross_entropy(X, Y) / torch.tensor(2.0), LossGraph(0.25, "mean", **TOKENS)),
        (lambda: F.cross_entropy(X, Y, reduction="sum") / 5, LossGraph(0.2, "sum", **TOKENS)),
        (lambda: F.mse_loss(X, X.detach() + 1) + 0.5 * F.cross_entropy(X, Y), LossGraph(1.0, "mean")),
        (lambda: -X.logsumexp(1).mean(), LossGraph(-1.0, "mean")),
        (lambda: (X * 2).sum(), LossGraph(1.0, "sum")),
        (lambda: X.max(), LossGraph()),
    ],
)
def test_factor_and_reduction(loss, expected):
    graph = read_loss(loss())
    assert graph.factor == pytest.approx(expected.factor)
    assert (graph.reduction, graph.num_targets, graph.num_ignored) == (
        expected.reduction,
        expected.num_targets,
        expected.num_ignored,
    )


def test_label_smoothing():
    graph = read_loss(F.cross_entropy(X, Y, label_smoothing=0.1))
    assert (graph.factor, graph.reduction, graph.num_targets) == (pytest.approx(0.9), "mean", 5)


def test_a_tensor_that_was_changed_in_place_is_not_read():
    scale = torch.tensor(2.0)
    loss = X.mean() * scale
    scale += 1
    assert read_loss(loss) == LossGraph()
