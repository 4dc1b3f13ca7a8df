"""The planted Task in a plain PyTorch loop, with DDP on several ranks: plain.py FOLDER none|traceml|torch OPTIONS…

What a tool needs in the script is in `watched_by_…`. All work of a step, also its hooks, checkpoint and evaluation, is
within TraceML's `trace_step` and before torch.profiler's `step()`: they have the chance to see it.
"""

import contextlib
import json

import torch
import torch.distributed as dist
from common import RANK, WORLD_SIZE, Stopwatch, make_loader, parse
from torch.nn.parallel import DistributedDataParallel

WAIT, WARM_UP, ACTIVE = 5, 2, 15


def main():
    args, task = parse()
    if WORLD_SIZE > 1:
        dist.init_process_group(args.comm)
    watched = {"none": not_watched, "traceml": watched_by_traceml, "torch": watched_by_torch}[args.tool]
    with watched(args) as step:
        train(args, task, step)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


@contextlib.contextmanager
def not_watched(args):
    yield lambda model: contextlib.nullcontext()


@contextlib.contextmanager
def watched_by_traceml(args):
    import traceml_ai as traceml

    traceml.init(mode="auto")
    yield traceml.trace_step


@contextlib.contextmanager
def watched_by_torch(args):
    schedule = torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:

        @contextlib.contextmanager
        def step(model):
            yield
            profiler.step()

        yield step
    averages = profiler.key_averages()
    (args.folder / f"rank-{RANK}.txt").write_text(averages.table(sort_by="self_cpu_time_total", row_limit=15))
    entries = sorted(((each.key, each.self_cpu_time_total) for each in averages), key=lambda entry: -entry[1])
    (args.folder / f"rank-{RANK}.json").write_text(json.dumps(entries))


def train(args, task, watched_step):
    loader = make_loader(task, task.train_data(), args)
    eval_loader = make_loader(task, task.eval_data(), args)
    model = torch.compile(task.model()) if args.compile else task.model()
    model = DistributedDataParallel(model) if WORLD_SIZE > 1 else model
    optimizer, watch = task.optimizer(model.parameters()), Stopwatch(args.folder)
    for number, batch in enumerate(loader, 1):
        with watched_step(model):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
            after_step(args, task, number, model, optimizer, eval_loader)
        watch.step()
        if number == args.steps:
            break
    watch.write()


def after_step(args, task, number, model, optimizer, eval_loader):
    if RANK == 0:
        task.on_step(None)
        task.stop(None)
        if args.save_every and number % args.save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.folder / "checkpoint.pt")
    if args.eval_every and number % args.eval_every == 0:
        model.eval()
        with torch.no_grad():
            for batch in eval_loader:
                task.metrics(model, batch)
        model.train()


if __name__ == "__main__":
    main()
