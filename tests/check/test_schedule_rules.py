"""scheduler-steps and local-metric-decides, on planted observations and sources."""

from __future__ import annotations

import textwrap

import pytest

from instep.check.finding import Severity
from instep.check.records.schedules import SchedulerStepped
from instep.check.rules.local_metric_decides import LocalMetricDecides
from instep.check.rules.scheduler_steps import SchedulerSteps
from state_evidence import SCRIPT, judge, line_of, read


def steps(updates: list[int], **more: object) -> list[SchedulerStepped]:
    fields = {"scheduler": 0, "type": "StepLR", "file": SCRIPT, "line": 9, **more}
    return [
        SchedulerStepped(updates=count, backwards=count, position=number, **fields)  # type: ignore[arg-type]
        for number, count in enumerate(updates, 1)
    ]


class TestSchedulerSteps:
    def test_once_after_each_update_is_right(self) -> None:
        assert not judge(SchedulerSteps(), [steps([1, 2, 3, 4, 5])] * 2)

    def test_once_an_epoch_is_right(self) -> None:
        assert not judge(SchedulerSteps(), [steps([10, 20, 30])] * 2)

    def test_before_the_optimizer(self) -> None:
        (finding,) = judge(SchedulerSteps(), [steps([0, 1, 2, 3])] * 2)
        assert "before" in finding.message
        assert finding.line == 9

    def test_steps_that_restore_a_position_are_right(self) -> None:
        restored = steps([0, 0, 0], line=4)
        assert not judge(SchedulerSteps(), [restored + steps([1, 2, 3, 4])] * 2)

    def test_several_times_for_each_update(self) -> None:
        (finding,) = judge(SchedulerSteps(), [steps([1, 1, 2, 2, 3, 3, 4, 4])] * 2)
        assert "2 times" in finding.message
        assert "4 of 4" in finding.evidence

    def test_accelerate_steps_as_often_as_there_are_processes(self) -> None:
        assert not judge(SchedulerSteps(), [steps([1, 1, 2, 2, 3, 3], package="accelerate")] * 2)

    def test_past_its_end(self) -> None:
        cosine = steps([1, 2, 3, 4, 5, 6], type="CosineAnnealingLR", horizon=3)
        (finding,) = judge(SchedulerSteps(), [cosine] * 2)
        assert "T_max=3" in finding.evidence

    EPOCHS = """
        optimizer = torch.optim.SGD([], lr=1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
        for epoch in range(args.epochs):
            for x in loader:
                optimizer.step()
                {inner}
            {outer}
    """

    def test_a_schedule_in_epochs_that_is_stepped_for_each_batch_is_read(self) -> None:
        text = self.EPOCHS.format(inner="scheduler.step()", outer="pass")
        (finding,) = read(SchedulerSteps(), text)
        assert finding.line == line_of(text, "scheduler.step()")

    def test_a_schedule_in_epochs_that_is_stepped_once_an_epoch_is_right(self) -> None:
        assert not read(SchedulerSteps(), self.EPOCHS.format(inner="pass", outer="scheduler.step()"))

    def test_the_first_thing_in_every_epoch_but_the_first_is_right(self) -> None:
        text = "for epoch in range(9):\n    {}scheduler.step()\n    for x in loader:\n        optimizer.step()"
        assert read(SchedulerSteps(), text.format(""))
        assert not read(SchedulerSteps(), text.format("if epoch: "))

    def test_what_ran_rightly_is_not_read(self) -> None:
        text = self.EPOCHS.format(inner="scheduler.step()", outer="pass")
        ran = steps([1, 2, 3], line=line_of(text, "scheduler.step()"))
        assert read(SchedulerSteps(), text)
        assert not judge(SchedulerSteps(), [ran] * 2, text)

    PREPARED = """
        from accelerate import Accelerator
        accelerator = Accelerator()
        {before}
        optimizer, loader = accelerator.prepare(optimizer, loader)
        {after}
        scheduler = accelerator.prepare(get_linear_schedule(optimizer, total))
    """

    def test_a_prepared_schedule_as_long_as_a_prepared_loader(self) -> None:
        assert read(SchedulerSteps(), self.PREPARED.format(before="pass", after="total = 3 * len(loader)"))

    def test_a_loader_that_another_function_prepared_is_another(self) -> None:
        text = "from accelerate import Accelerator\ndef evaluate(loader):\n    loader = accelerator.prepare(loader)\n"
        text += (
            "def train(loader):\n    total = 3 * len(loader)\n    schedule = get_linear_schedule(optimizer, total)\n"
        )
        text += "    loader, schedule = accelerator.prepare(loader, schedule)\n"
        assert not read(SchedulerSteps(), text)
        assert read(SchedulerSteps(), text.replace("    total", "    loader = accelerator.prepare(loader)\n    total"))

    @pytest.mark.parametrize(
        ("before", "after"),
        [("total = 3 * len(loader)", "pass"), ("pass", "total = 3 * len(loader) * accelerator.num_processes")],
    )
    def test_a_prepared_schedule_as_long_as_all_processes_is_right(self, before: str, after: str) -> None:
        assert not read(SchedulerSteps(), self.PREPARED.format(before=before, after=after))


class TestLocalMetricDecides:
    def test_a_metric_that_differs(self) -> None:
        plateau = [steps([4, 8], type="ReduceLROnPlateau", metric=metric) for metric in (0.5, 0.6)]
        (finding,) = judge(LocalMetricDecides(), plateau)
        assert finding.severity is Severity.ERROR
        assert "2 of 2" in finding.evidence

    def test_a_metric_of_all_ranks_is_right(self) -> None:
        assert not judge(LocalMetricDecides(), [steps([4, 8], type="ReduceLROnPlateau", metric=0.5)] * 2)

    def test_only_one_rank_steps(self) -> None:
        (finding,) = judge(LocalMetricDecides(), [steps([4], metric=0.5), []])
        assert "Only rank 0" in finding.message

    STOP = """
        def evaluate(model, loader):
            loss = model(loader).mean()
            {reduce}
            return loss.item()
        def main():
            val_loader = torch.utils.data.DataLoader(data, sampler={sampler})
            for epoch in range(9):
                for x in loader:
                    model(x).backward()
                val_loss = evaluate(model, val_loader)
                if val_loss < best:
                    best, bad = val_loss, 0
                else:
                    bad += 1
                if bad >= patience:
                    break
    """

    def test_early_stopping_by_a_local_metric(self) -> None:
        text = self.STOP.format(reduce="pass", sampler="shard")
        (finding,) = read(LocalMetricDecides(), text)
        assert finding.line == line_of(text, "bad >= patience")
        assert finding.severity is Severity.WARNING

    def test_early_stopping_by_an_averaged_metric_is_right(self) -> None:
        assert not read(LocalMetricDecides(), self.STOP.format(reduce="dist.all_reduce(loss)", sampler="shard"))

    def test_a_metric_over_data_that_every_rank_has_is_right(self) -> None:
        text = self.STOP.format(reduce="pass", sampler="shard").replace(", sampler=shard", "")
        assert not read(LocalMetricDecides(), text)

    def test_a_sum_that_only_rank_0_has_decides_about_a_collective(self) -> None:
        text = self.STOP.format(reduce="dist.reduce(loss, 0)", sampler="shard")
        text = text.replace("best, bad = val_loss, 0", "dist.barrier()").replace("break", "pass")
        (finding,) = read(LocalMetricDecides(), text)
        assert "collectives" in finding.message

    @pytest.mark.parametrize(("sync", "num_findings"), [("", 1), (", sync_dist=True", 0)])
    def test_lightning_logs_what_a_schedule_monitors(self, sync: str, num_findings: int) -> None:
        text = f"""
            class Module:
                def validation_step(self, batch):
                    self.log("val_loss", loss{sync})
                def configure_optimizers(self):
                    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
                    return {{"lr_scheduler": {{"scheduler": plateau, "monitor": "val_loss"}}}}
        """
        assert len(read(LocalMetricDecides(), text)) == num_findings

    EVALUATE = """
        def evaluate(model, loader):
            total, count = 0.0, 0
            for x, y in loader:
                total += model(x).sum().item()
                count += len(x)
            return total / count
        def train_one_epoch(model, loader):
            for x in loader:
                model(x).backward()
    """
    FLAG = """
        def main():
            stop, best, stale = False, float("inf"), 0
            val_loader = torch.utils.data.DataLoader(data, sampler=shard)
            while not stop:
                train_one_epoch(model, loader)
                current = evaluate(model, val_loader)
                {reduce}
                if current < best - 1e-4:
                    best, stale = current, 0
                else:
                    stale += 1
                    if stale > 3:
                        stop = True
    """
    LATER = """
        def main():
            best, bad = 1e9, 0
            for epoch in range(9):
                train_one_epoch(model, loader)
                val_loss = evaluate(model, val_loader)
                if val_loss < best:
                    best, bad = val_loss, 0
                else:
                    bad += 1
                shown = torch.tensor([val_loss])
                dist.all_reduce(shown)
                if rank == 0:
                    print(shown.item() / world_size)
                if bad >= 3:
                    break
    """
    AGREED = """
        def main():
            for epoch in range(9):
                train_one_epoch(model, loader)
                val_loss = evaluate(model, val_loader)
                flag = torch.tensor(float(val_loss > best))
                if world_size > 1:
                    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
                if flag.item():
                    break
    """
    CLASSES = """
        class Stopper:
            def __init__(self, patience):
                self.patience, self.best, self.bad_epochs = patience, None, 0
            def __call__(self, value):
                if self.best is None or value < self.best:
                    self.best = value
                    self.bad_epochs = 0
                else:
                    self.bad_epochs += 1
                return self.bad_epochs >= self.patience
        class Trainer:
            def train_epoch(self):
                self.model(x).backward()
            def validate(self):
                losses = [self.model(x).item() for x in self.val_loader]
                return sum(losses) / len(losses), {accuracy}
            def fit(self):
                stopper = Stopper(3)
                for epoch in range(9):
                    self.train_epoch()
                    val_loss, accuracy = self.validate()
                    if stopper({metric}):
                        break
    """
    METHODS = """
        class Trainer:
            def update(self, val_loss):
                if val_loss < self.best:
                    self.best, self.bad_epochs = val_loss, 0
                else:
                    self.bad_epochs += 1
            def fit(self):
                for epoch in range(9):
                    train_one_epoch(model, loader)
                    loss = {evaluate}
                    self.update(loss)
                    if self.bad_epochs > self.patience:
                        return
    """

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            (FLAG.format(reduce="pass"), "while not stop"),
            (FLAG.format(reduce="dist.all_reduce(torch.tensor(current))"), "while not stop"),
            (LATER, "if bad >= 3"),
            (CLASSES.format(accuracy="self.reduce_mean(hits)", metric="val_loss"), "if stopper("),
            (METHODS.format(evaluate="evaluate(model, val_loader)"), "if self.bad_epochs >"),
        ],
    )
    def test_local_metrics_that_come_a_long_way(self, text: str, line: str) -> None:
        text = textwrap.dedent(self.EVALUATE) + textwrap.dedent(text)
        (finding,) = read(LocalMetricDecides(), text)
        assert finding.line == line_of(text, line)

    @pytest.mark.parametrize(
        "text",
        [
            FLAG.format(reduce="current = average_over_ranks(current)"),
            FLAG.format(reduce="current = torch.tensor(current); dist.all_reduce(current)"),
            FLAG.replace("sampler=shard", "batch_size=4").format(reduce="pass"),
            AGREED,
            CLASSES.format(accuracy="self.reduce_mean(hits)", metric="accuracy"),
            METHODS.format(evaluate="self.reduce_mean(evaluate(model, val_loader))"),
            METHODS.format(evaluate="accelerator.gather(evaluate(model, val_loader)).mean()"),
            LATER.replace("if bad >= 3", "if epoch >= 3"),
            LATER.replace("if bad >= 3", "if shown.item() < args.target_loss"),
        ],
    )
    def test_averaged_metrics_that_come_a_long_way_are_right(self, text: str) -> None:
        assert not read(LocalMetricDecides(), textwrap.dedent(self.EVALUATE) + textwrap.dedent(text))
