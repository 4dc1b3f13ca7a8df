"""The command `instep watch`: its address, its ends, and what it says without runs or packages."""

from __future__ import annotations

from pathlib import Path

import commands
from watched import Site, Writer, write_eventful_run


def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    write_eventful_run(folder / "eventful", num_steps=20)
    process = commands.start("instep", "watch", str(folder / "eventful"), "--no-open")
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    port, token = int(address.split(":")[2].split("/")[0]), address.split("/")[3]
    assert address == f"http://127.0.0.1:{port}/{token}/"
    assert len(token) >= 20
    site = Site(port)
    assert site.get("/", token=token)[0] == 200
    assert site.get("/", token="x" + token)[0] == 403
    assert site.get("/api/runs", token=token)[2]["named"] == ["eventful"]
    taken = commands.run("instep", "watch", str(folder), "--port", str(port))
    assert taken.returncode == 2
    assert f"port {port} of 127.0.0.1 cannot be used" in taken.stderr
    process.send_signal(2)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "Traceback" not in err


def test_the_command_without_runs_or_packages(tmp_path: Path) -> None:
    nothing = commands.run("instep", "watch", cwd=tmp_path)
    assert nothing.returncode == 2
    assert "there is no folder runs here" in nothing.stderr
    hidden = "import sys; sys.modules.update(starlette=None, uvicorn=None)\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    env = {"PYTHONPATH": f"{tmp_path}:{commands.ROOT / 'src'}"}
    without = commands.run("instep", "watch", cwd=tmp_path, env=env, fresh=True)
    assert without.returncode == 2
    assert "pip install 'instep[page]'" in without.stderr
    Writer(tmp_path / "runs" / "one", world_size=1).start()
    shown = commands.run("instep", "watch", "--terminal", cwd=tmp_path, env=env, fresh=True)
    assert shown.returncode == 0, shown.stderr
    assert "one" in shown.stdout
