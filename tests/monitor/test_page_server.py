"""The server of `instep watch`, without a browser: who may ask, what is sent, and what never is sent again."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import commands
from instep.core.errors import SpecError
from instep.events.read import path_of, read_events
from instep.events.schema import EvalRecord, NoticeRecord
from instep.monitor.page import preview, view
from instep.monitor.page.runs import RunIndex
from instep.monitor.page.serve import listen
from instep.monitor.page.text import list_of_runs
from watched import NASTY, TOKEN, Site, Writer, points, served, write_eventful_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two runs that are over."""
    folder = tmp_path_factory.mktemp("runs")
    write_eventful_run(folder / "eventful", num_steps=800)
    log = Writer(folder / "sweep" / "lr=3e-4", world_size=1)
    log.start()
    log.steps(1, 60)
    log.end("failed", 60, "NumericsError: the loss of step 61 is nan. Its samples: 1.")
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Site]:
    with served(folder) as site:
        yield site


class TestWhoMayAsk:
    @pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", "%00", "ä" * 20])
    @pytest.mark.parametrize("path", ["/", "/api/runs", "/static/page.css"])
    def test_only_who_has_the_token(self, site: Site, token: str, path: str) -> None:
        from urllib.parse import quote

        status, _, text = site.get(path, token=quote(token, safe="%"))
        assert status == 403
        assert "Use the address that `instep watch` printed" in text

    def test_the_address_without_the_last_slash(self, site: Site) -> None:
        status, headers, _ = site.get("")
        assert (status, headers["location"]) == (307, f"/{TOKEN}/")

    @pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1", ""])
    def test_another_name_of_the_loopback_is_refused(self, site: Site, host: str) -> None:
        assert site.get("/", headers={"Host": host})[0] == 403

    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1:99", "[::1]:80"])
    def test_names_of_the_loopback(self, site: Site, host: str) -> None:
        assert site.get("/", headers={"Host": host})[0] == 200

    def test_nothing_but_files_of_ours_can_run(self, site: Site) -> None:
        status, headers, text = site.get("/")
        assert status == 200
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "<script>" not in text
        assert " on" not in text.replace(" on ", "")  # no handlers in attributes

    @pytest.mark.parametrize("name", ["../server.py", "..%2fserver.py", "js/../../view.py", "", "nothing.js"])
    def test_only_the_page_s_own_files(self, site: Site, name: str) -> None:
        assert site.get(f"/static/{name}")[0] == 404

    @pytest.mark.parametrize("name", ["../../secret", "rank-0.log/../../secret", "/etc/passwd", "rank-0.jsonl", ""])
    def test_only_logs_of_runs(self, site: Site, name: str) -> None:
        status, _, answer = site.get("/api/log", run="eventful", name=name)
        assert status == 404
        assert "is no log of this run" in answer["error"]

    @pytest.mark.parametrize("run", ["..", "/etc", "eventful/..", "nobody", ""])
    def test_only_runs_that_were_found(self, site: Site, run: str) -> None:
        for path in ("/api/stream", "/api/logs", "/api/window", "/api/explain"):
            status, _, answer = site.get(path, run=run, name="rank-0.log", **{"from": 0, "to": 1})
            assert status == 404, path
            assert "there is no run" in answer["error"]


class TestWhatIsSent:
    def test_all_numbers_are_the_log_s(self, site: Site, folder: Path) -> None:
        with site.stream("eventful") as messages:
            message = messages.whole()
        last = {event["step"]: event for event in read_events(folder / "eventful") if event["event"] == "step"}
        assert points(message, "train", "loss") == {step: event["loss"] for step, event in last.items()}
        assert points(message, "train", "lr") == {step: event["lr"] for step, event in last.items()}
        assert points(message, "train", "scalars/kl") == {step: e["scalars"]["kl"] for step, e in last.items()}
        assert message["facts"]["values"]["loss"] == last[800]["loss"]
        assert message["tables"]["train"]["last"]["loss"] == last[800]["loss"]
        evals = {
            event["step"]: event["metrics"] for event in read_events(folder / "eventful") if event["event"] == "eval"
        }
        assert points(message, "eval", "accuracy") == {step: metrics["accuracy"] for step, metrics in evals.items()}
        assert message["facts"]["metrics"] == evals[800]

    def test_marks_have_their_sentences(self, site: Site) -> None:
        with site.stream("eventful") as messages:
            marks = messages.whole()["marks"]
        kinds = [mark["kind"] for mark in marks]
        assert {"nan", "restart", "failure", "lost", "save", "notice", "end"} == set(kinds)
        texts = {mark["kind"]: mark["text"] for mark in marks}
        assert texts["restart"] == "restart 1, on 4 processes"
        assert texts["failure"] == "rank 3: RuntimeError: worker 3 is out of cheese"
        assert texts["nan"].startswith("the loss of step 240 is nan")
        assert NASTY in texts["notice"]  # as it is: the page shows text as text

    def test_phases_are_sums(self, site: Site, folder: Path) -> None:
        with site.stream("eventful") as messages:
            phases = messages.whole()["phases"]
        for rank in range(4):
            records = [event for event in read_events(folder / "eventful", rank) if event["event"] == "phases"]
            assert phases[str(rank)]["whole"]["num_steps"] == sum(record["num_steps"] for record in records)
            assert phases[str(rank)]["whole"]["phases"]["data"] == pytest.approx(
                sum(record["phases"]["data"] for record in records), abs=1e-3
            )

    def test_the_verdict(self, site: Site) -> None:
        with site.stream("eventful") as messages:
            messages.whole()
        verdict = site.get("/api/explain", run="eventful")[2]
        assert verdict["bounded_by"] == "input"
        assert "rank 2" in verdict["text"]

    def test_the_list_of_runs(self, site: Site) -> None:
        answer = site.get("/api/runs")[2]
        runs = {run["name"]: run for run in answer["runs"]}
        assert set(runs) == {"eventful", "sweep/lr=3e-4"}
        assert answer["named"] == []
        assert (runs["eventful"]["step"], runs["eventful"]["num_steps"]) == (800, 800)
        assert runs["eventful"]["is_complete"]
        assert runs["sweep/lr=3e-4"]["status"] == "failed"

    def test_logs_end_first_then_earlier(self, site: Site, folder: Path) -> None:
        files = site.get("/api/logs", run="eventful")[2]["files"]
        assert [file["rank"] for file in files] == [0, 1, 2, 3]
        end = site.get("/api/log", run="eventful", name="rank-1.log")[2]
        assert end["text"].splitlines()[-1] == f"the end {NASTY}"  # without colours
        before = site.get("/api/log", run="eventful", name="rank-1.log", before=end["begin"])[2]
        assert before["end"] == end["begin"]
        text = (folder / "eventful" / "logs" / "rank-1.log").read_text().replace("\x1b[31m", "").replace("\x1b[0m", "")
        assert text.endswith(before["text"] + end["text"])

    @pytest.mark.parametrize("query", [{"from": 5, "to": 1}, {"from": "x", "to": 1}, {}])
    def test_a_window_that_is_none(self, site: Site, query: dict[str, str]) -> None:
        assert site.get("/api/window", run="eventful", **query)[0] == 400

    def test_a_window_has_every_step(self, site: Site) -> None:
        with site.stream("eventful") as messages:
            messages.whole()
        window = site.get("/api/window", run="eventful", **{"from": 100, "to": 200})[2]
        steps = [bucket[0] for bucket in window["train"]["loss"]]
        assert steps == list(range(99, 202))


class TestWhatGrows:
    def test_only_what_is_new_is_sent(self, tmp_path: Path) -> None:
        log = Writer(tmp_path / "run", world_size=1)
        log.start(num_steps=5000)
        log.steps(1, 3000)
        with served(tmp_path / "run") as site, site.stream("run") as messages:
            first = messages.whole()
            assert first["reset"]
            assert first["tables"]["train"]["level"] == 2
            log.steps(3001, 3001, loss=0.125)
            log.write(NoticeRecord(text="something happened"))
            update = messages.until(lambda message: message.get("marks"))
            assert not update["reset"]
            assert points(update, "train", "loss")[3001] == 0.125
            assert len(points(update, "train", "loss")) <= 3
            assert [mark["text"] for mark in update["marks"]] == ["something happened"]
            assert len(json.dumps(update)) < 3000

    def test_a_lost_connection_is_taken_up_where_it_ended(self, tmp_path: Path) -> None:
        log = Writer(tmp_path / "run", world_size=1)
        log.start(num_steps=500)
        log.steps(1, 100)
        with served(tmp_path / "run") as site:
            with site.stream("run") as messages:
                messages.whole()
                cursors = messages.cursors
            log.steps(101, 110)
            with site.stream("run", last_event_id=cursors) as messages:
                update = messages.until(lambda message: "reset" in message)
                assert not update["reset"]
                assert sorted(points(update, "train", "loss")) == list(range(101, 111))
            for nonsense in ("no json", "[]", '{"run": 3}', '{"run": {"view": "x", "tables": {"train": [-1, "a"]}}}'):
                with site.stream("run", last_event_id=nonsense) as messages:
                    messages.whole()

    def test_steps_that_a_restart_makes_again_replace_the_old(self, tmp_path: Path) -> None:
        log = Writer(tmp_path / "run", world_size=1)
        log.start()
        log.steps(1, 50)
        with served(tmp_path / "run") as site, site.stream("run") as messages:
            messages.whole()
            log.start(attempt=1, first_step=40)
            log.steps(41, 45, loss=9.0)
            update = messages.until(lambda message: 45 in points(message, "train", "loss"))
            assert update["tables"]["train"]["from"] == 40
            assert points(update, "train", "loss") == dict.fromkeys(range(41, 46), 9.0)
            assert {"lost", "restart"} <= {mark["kind"] for mark in update["marks"]}

    def test_a_run_that_begins_anew_is_another_one(self, tmp_path: Path) -> None:
        run_dir = tmp_path / "run"
        log = Writer(run_dir, world_size=1)
        log.start()
        log.steps(1, 50)
        with served(tmp_path) as site, site.stream("run") as messages:
            messages.whole()
            run_dir.rename(tmp_path / "run.old-1")
            log = Writer(run_dir, world_size=1)
            log.start()
            log.steps(1, 2, loss=4.0)
            update = messages.until(lambda message: message.get("reset"))
            assert points(update, "train", "loss") == {1: 4.0, 2: 4.0}

    def test_a_client_that_goes_away_leaves_nothing_behind(self, tmp_path: Path) -> None:
        log = Writer(tmp_path / "run", world_size=1)
        log.start()
        log.steps(1, 5)
        with served(tmp_path / "run") as site:
            for _ in range(5):
                with site.stream("run") as messages:
                    messages.whole()
            with socket.create_connection(("127.0.0.1", site.port)) as rude:
                rude.sendall(f"GET /{TOKEN}/api/stream?run=run HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            log.steps(6, 7)
            with site.stream("run") as messages:
                messages.until(lambda message: message["facts"]["step"] == 7)
            assert site.get("/api/runs")[0] == 200
        # `served` joins the server's thread: a stream that went on would keep it.
        assert not [thread.name for thread in threading.enumerate() if "uvicorn" in thread.name]

    def test_a_long_log_is_previewed_then_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (preview, view):
            monkeypatch.setattr(module, "LONG_BYTES", 2**16)
        monkeypatch.setattr("instep.monitor.page.server.SLICE_S", 0.001)
        log = Writer(tmp_path / "run", world_size=1)
        log.start(num_steps=5000)
        log.steps(1, 4000)
        log.write(NoticeRecord(text="at the end"))
        with served(tmp_path / "run") as site, site.stream("run") as messages:
            first = messages.whole()
            sample = points(first, "train", "loss")
            assert first["progress"] is not None
            assert min(sample) < 50
            assert max(sample) > 3900
            whole = messages.until(lambda message: message.get("reset"))
            assert whole["progress"] is None
            assert whole["facts"]["step"] == 4000
            assert [mark["text"] for mark in whole["marks"]] == ["at the end"]
            logged = {
                event["step"]: event["loss"] for event in read_events(tmp_path / "run") if event["event"] == "step"
            }
            assert all(logged[step] == loss for step, loss in sample.items())


class TestBadInput:
    def test_a_damaged_log_is_shown_as_far_as_it_is_good(self, tmp_path: Path) -> None:
        log = Writer(tmp_path / "run", world_size=2)
        log.start()
        log.steps(1, 5)
        log.raw('{"event": "step", "time": 1.0, "st\n\x00\x00\xff\n[1, 2]\n{"event": "step", "time": 2}\n')
        log.steps(6, 8)
        path_of(tmp_path / "run", 1).write_bytes(b"\x80\x81 nothing of this is JSON \xff\n" * 3)
        with served(tmp_path / "run") as site, site.stream("run") as messages:
            message = messages.whole()
            assert sorted(points(message, "train", "loss")) == list(range(1, 9))
            assert "rank-0.jsonl: lines 8, 9, 10 left out" in message["damaged"]
            assert "rank-1.jsonl: lines 1, 2, 3" in message["damaged"]
            assert site.get("/api/runs")[2]["runs"][0]["step"] == 8

    def test_numbers_that_json_does_not_have(self, tmp_path: Path) -> None:
        log = Writer(tmp_path / "run", world_size=1)
        log.start()
        log.steps(1, 3, loss=float("nan"))
        log.write(EvalRecord(step=3, metrics={"accuracy": float("inf")}, seconds=0.1))
        with served(tmp_path / "run") as site, site.stream("run") as messages:
            message = messages.whole()
            assert message["facts"]["values"]["loss"] == "nan"
            assert message["facts"]["metrics"]["accuracy"] == "inf"
            assert points(message, "train", "loss") == {}
            assert site.get("/api/runs")[0] == 200

    def test_the_list_of_runs_of_which_one_is_damaged(self, tmp_path: Path) -> None:
        for name in ("good", "damaged"):
            log = Writer(tmp_path / name, world_size=1)
            log.start()
            log.steps(1, 3)
        log.raw('{"event": "step", "time": "x", "step": null}\n{"event": "eval", "time": 1, "metrics": {"a": "b"}}\n')
        lines = RunIndex([tmp_path]).summaries()
        assert {line["name"]: line["step"] for line in lines} == {"good": 3, "damaged": 3}
        list_of_runs(lines, time.time())

    def test_a_run_that_was_continued_for_more_steps(self, tmp_path: Path) -> None:
        log = Writer(tmp_path / "run", world_size=1)
        log.start()
        (line,) = RunIndex([tmp_path]).summaries()
        planned = line["num_steps"]
        log.steps(planned, planned + 1)
        (line,) = RunIndex([tmp_path]).summaries()
        assert "num_steps" not in line

    def test_a_terminal_shows_numbers_that_json_does_not_have(self, tmp_path: Path) -> None:
        log = Writer(tmp_path / "run", world_size=1)
        log.start()
        log.steps(1, 3, loss=float("nan"))
        log.write(EvalRecord(step=3, metrics={"accuracy": float("inf")}, seconds=0.1))
        done = commands.run("instep", "watch", "--terminal", str(tmp_path / "run"))
        assert done.returncode == 0, done.stderr
        assert "loss nan" in done.stdout
        assert commands.run("instep", "watch", "--terminal", str(tmp_path)).returncode == 0

    def test_a_run_that_has_only_been_prepared(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "spec.json").write_text("{}")
        with served(tmp_path / "run") as site, site.stream("run") as messages:
            assert messages.next()["facts"]["status"] == "starting"
            log = Writer(tmp_path / "run", world_size=1)
            log.start()
            log.steps(1, 2)
            assert messages.until(lambda message: message["facts"]["step"] == 2)

    @pytest.mark.parametrize("content", ["nothing", "file", "empty"])
    def test_what_is_no_run(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "here"
        if content == "file":
            path.write_text("")
        elif content == "empty":
            path.mkdir()
        with pytest.raises(SpecError, match=r"here (does not exist|is a file|is not a run)"):
            RunIndex([path])

    def test_runs_of_one_name_in_two_folders(self, tmp_path: Path) -> None:
        for folder in ("a", "b"):
            Writer(tmp_path / folder / "run", world_size=1).start()
        index = RunIndex([tmp_path / "a", tmp_path / "b"])
        assert {line["name"] for line in index.summaries()} == {"run", str(tmp_path / "b" / "run")}
        assert index.path(str(tmp_path / "b" / "run")) == tmp_path / "b" / "run"

    def test_a_port_that_is_taken(self) -> None:
        with listen("127.0.0.1", 0) as taken:
            assert taken.proto == socket.IPPROTO_TCP  # else asyncio leaves Nagle's delay on: 40 ms for each answer
            port = taken.getsockname()[1]
            with pytest.raises(SpecError, match=f"port {port} of 127.0.0.1 cannot be used .Address already in use"):
                listen("127.0.0.1", port)
        with pytest.raises(SpecError, match=r"--host no\.such"):
            listen("no.such.host.invalid", 0)


def test_idle_it_costs_next_to_nothing(tmp_path: Path) -> None:
    log = Writer(tmp_path / "run", world_size=2)
    log.start()
    log.steps(1, 5)
    with served(tmp_path / "run") as site, site.stream("run") as messages:
        messages.whole()
        begun, cpu = time.monotonic(), time.process_time()
        time.sleep(2)
        assert (time.process_time() - cpu) / (time.monotonic() - begun) < 0.05
