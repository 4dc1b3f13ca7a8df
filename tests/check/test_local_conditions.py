"""Conditions that only one rank knows, in planted sources: clocks, signals, its own loss, errors that it catches."""

from __future__ import annotations

import pytest

from instep.check.finding import Severity
from instep.check.rules.rank_dependent_collective import RankDependentCollective
from state_evidence import line_of, read

CLOCKS = {
    "break": """\
import time
start = time.time()
for x in loader:
    loss = model(x)
    loss.backward()
    if time.time() - start > args.budget:
        save()
        break
""",
    "while": """\
import time
end = time.monotonic() + 60
while time.monotonic() < end:
    model(x).backward()
""",
    "object": """\
import time
class Budget:
    def __init__(self, s):
        self.end = time.time() + s
    def is_over(self):
        return time.time() > self.end
budget = Budget(5)
def train():
    for x in loader:
        step(x)
        if budget.is_over():
            return
def step(x):
    model(x).backward()
""",
    "sig": """\
import signal
stop = False
def handle(a, b):
    global stop
    stop = True
signal.signal(signal.SIGTERM, handle)
for e in range(3):
    for x in loader:
        model(x).backward()
        if stop:
            torch.save(m, p)
            sys.exit(0)
""",
    "sigattr": """\
import signal
class T:
    def __init__(self):
        self.stop = False
        signal.signal(signal.SIGTERM, self._on)
    def _on(self, *a):
        self.stop = True
    def fit(self):
        for x in self.loader:
            model(x).backward()
            if self.stop:
                break
""",
    "event": """\
import signal, threading
stop = threading.Event()
signal.signal(signal.SIGUSR1, lambda s, f: stop.set())
for x in loader:
    model(x).backward()
    if stop.is_set():
        break
""",
    "save": """\
import time
last = time.time()
for x in loader:
    model(x).backward()
    if time.time() - last > 600:
        save()
        last = time.time()
def save():
    state = get_model_state_dict(m)
""",
    "flag": """\
import time
from datetime import datetime
done = False
start = datetime.now()
while not done:
    for x in loader:
        model(x).backward()
        if (datetime.now() - start).seconds > 10:
            done = True
            break
""",
}
AGREED_CLOCKS = {
    "agreed": """\
import time
start = time.time()
for x in loader:
    model(x).backward()
    flag = torch.tensor(float(time.time() - start > 5))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if flag.item() > 0:
        break
""",
    "bcast": """\
import time
for x in loader:
    model(x).backward()
    stop = [time.time() > end]
    dist.broadcast_object_list(stop, src=0)
    if stop[0]:
        break
""",
    "helper": """\
import time
def agreed(flag):
    t = torch.tensor([int(flag)])
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return bool(t.item())
for x in loader:
    model(x).backward()
    if agreed(time.time() - start > 5):
        break
""",
    "log": """\
import time
t = time.time()
for x in loader:
    model(x).backward()
    if time.time() - t > 10:
        print('speed', n / (time.time() - t))
        t = time.time()
""",
    "connect": """\
import time
end = time.time() + 5
while time.time() < end:
    connect()
""",
    "sig": """\
import signal
class T:
    def __init__(self):
        self.stop = False
        signal.signal(signal.SIGTERM, self._on)
    def _on(self, *a):
        self.stop = True
    def should_stop(self):
        t = torch.tensor(int(self.stop))
        dist.all_reduce(t)
        return t.item() > 0
    def fit(self):
        for x in self.loader:
            model(x).backward()
            if self.should_stop():
                break
""",
    "save0": """\
import time
for x in loader:
    model(x).backward()
    if rank == 0 and time.time() - last > 600:
        torch.save(m, p)
        last = time.time()
""",
    "rank0": """\
import time
stop = torch.zeros(1)
for x in loader:
    model(x).backward()
    if rank == 0 and time.time() - last > 600:
        stop.fill_(1)
    dist.broadcast(stop, 0)
    if stop.item():
        break
""",
}
SKIPS = {
    "cont": """\
for x, y in loader:
    loss = crit(model(x), y)
    if torch.isnan(loss):
        continue
    loss.backward()
""",
    "pos": """\
for x, y in loader:
    loss = crit(model(x), y)
    if torch.isfinite(loss):
        loss.backward()
        optimizer.step()
""",
    "large": """\
for x, y in loader:
    loss = crit(model(x), y)
    if loss > 100:
        continue
    loss.backward()
""",
    "math": """\
import math
for x, y in loader:
    loss = crit(model(x), y)
    if not math.isfinite(loss):
        optimizer.zero_grad()
        continue
    loss.backward()
""",
    "helper": """\
def bad(v):
    return not torch.isfinite(v).all()
for x, y in loader:
    loss = crit(model(x), y)
    if bad(loss):
        continue
    loss.backward()
""",
    "step fn": """\
def train_step(model, x):
    loss = model(x).mean()
    v = loss.item()
    if v != v or v > 50:
        return None
    loss.backward()
    optimizer.step()
for x in loader:
    train_step(model, x)
""",
    "none": """\
for batch in loader:
    if batch is None:
        continue
    model(batch).backward()
""",
    "empty": """\
for x, y in loader:
    if len(x) == 0:
        continue
    model(x).backward()
""",
    "mask": """\
for x, y in loader:
    keep = y >= 0
    if keep.sum() == 0:
        continue
    model(x[keep]).backward()
""",
    "oom": """\
for x in loader:
    try:
        loss = model(x)
        loss.backward()
        optimizer.step()
    except RuntimeError as e:
        if 'out of memory' not in str(e):
            raise
        torch.cuda.empty_cache()
""",
    "oom2": """\
for x in loader:
    try:
        loss = model(x)
    except torch.cuda.OutOfMemoryError:
        continue
    loss.backward()
""",
    "upd": """\
for x, y in loader:
    loss = crit(model(x), y)
    loss.backward()
    if loss.item() < 10:
        optimizer.step()
""",
}
NO_SKIPS = {
    "agreed": """\
for x, y in loader:
    loss = crit(model(x), y)
    ok = torch.isfinite(loss).float()
    dist.all_reduce(ok, op=dist.ReduceOp.MIN)
    if ok.item() == 0:
        continue
    loss.backward()
""",
    "raise": """\
for x, y in loader:
    loss = crit(model(x), y)
    if not torch.isfinite(loss):
        raise SystemExit
    loss.backward()
""",
    "norm": """\
for x, y in loader:
    loss = crit(model(x), y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
""",
    "accum": """\
for i, (x, y) in enumerate(loader):
    if i < start:
        continue
    loss = model(x)
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
""",
    "amp": """\
for x, y in loader:
    loss = crit(model(x), y)
    if scaler is not None:
        scaler.scale(loss).backward()
    else:
        loss.backward()
""",
    "zero": """\
for x, y in loader:
    loss = crit(model(x), y)
    if not torch.isfinite(loss):
        loss = 0 * loss.nan_to_num()
    loss.backward()
""",
    "partial": """\
for x, y in loader:
    if x.size(0) != batch_size:
        continue
    model(x).backward()
""",
    "try": """\
try:
    for x in loader:
        model(x).backward()
except KeyboardInterrupt:
    pass
""",
    "try2": """\
for x in loader:
    try:
        model(x).backward()
    except RuntimeError:
        print(x.shape)
        raise
""",
    "phase": """\
for phase in ['train', 'val']:
    for x, y in loaders[phase]:
        loss = crit(model(x), y)
        if phase == 'train':
            loss.backward()
            optimizer.step()
""",
    "resume": """\
for epoch in range(3):
    for i, x in enumerate(loader):
        if epoch == first and i < skip:
            continue
        model(x).backward()
""",
    "sent": """\
for epoch in range(3):
    for x in loader:
        model(x).backward()
        optimizer.step()
    if rank == 0:
        stop = stopper(epoch)
    sent = [stop if rank == 0 else None]
    dist.broadcast_object_list(sent, 0)
    if rank != 0:
        stop = sent[0]
    if stop:
        break
""",
    "fnagree": """\
def all_ok(loss):
    t = torch.isfinite(loss).float()
    dist.all_reduce(t, op=dist.ReduceOp.MIN)
    return t.item() > 0
for x, y in loader:
    loss = crit(model(x), y)
    if not all_ok(loss):
        continue
    loss.backward()
""",
}


@pytest.mark.parametrize("name", [*CLOCKS, *SKIPS])
def test_what_one_rank_decides(name: str) -> None:
    (finding,) = read(RankDependentCollective(), {**SKIPS, **CLOCKS}[name])
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize("text", [*AGREED_CLOCKS.values(), *NO_SKIPS.values()], ids=[*AGREED_CLOCKS, *NO_SKIPS])
def test_what_all_ranks_decide(text: str) -> None:
    assert not read(RankDependentCollective(), text)


def test_the_clock_is_named_where_the_loop_is_left() -> None:
    (finding,) = read(RankDependentCollective(), CLOCKS["object"])
    assert finding.line == line_of(CLOCKS["object"], "if budget")
    assert f"line {line_of(CLOCKS['object'], 'return time.time')}" in finding.evidence
