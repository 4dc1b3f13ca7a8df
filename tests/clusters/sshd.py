"""A real sshd on the loopback, with a key of its own: two addresses of this machine are two hosts."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import patience
from ranks import free_port
from rings import require

_PRIVILEGES = Path("/run/sshd")
"""Where sshd puts its unprivileged half; a system that has never started it does not have it."""


@dataclass(frozen=True)
class Hosts:
    """What to give --ssh, and which hosts there are."""

    ssh: str
    folder: Path
    port: int

    def force(self, script: str) -> None:
        """Have hostb run every command through a shell script, which finds it in $SSH_ORIGINAL_COMMAND."""
        (self.folder / "forced").write_text(script)


@contextmanager
def ssh_hosts(folder: Path) -> Iterator[Hosts]:
    """Serve hosta and hostb until the block is left; `down` is a host where nobody listens."""
    require("ssh")
    programs = {
        name: shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in ("sshd", "ssh", "ssh-keygen")
    }
    folder.mkdir()
    for name in ("host_key", "user_key"):
        words = [str(programs["ssh-keygen"]), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    port, config = free_port(), folder / "sshd_config"
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    (folder / "forced").write_text('exec sh -c "$SSH_ORIGINAL_COMMAND"\n')
    config.write_text(_server_settings(folder, port))
    (folder / "ssh_config").write_text(_client_settings(folder, port, free_port()))
    made = os.geteuid() == 0 and not _PRIVILEGES.exists()
    if made:
        _PRIVILEGES.mkdir(mode=0o755)
    log = (folder / "log").open("wb")
    server = subprocess.Popen([str(programs["sshd"]), "-D", "-e", "-f", str(config)], stdout=log, stderr=log)
    try:
        _wait(port, server, folder / "log")
        _log_in(str(programs["ssh"]), folder)
        yield Hosts(f"ssh -F {folder / 'ssh_config'}", folder, port)
    finally:
        server.terminate()
        server.wait()
        log.close()
        if made:
            _PRIVILEGES.rmdir()


def _server_settings(folder: Path, port: int) -> str:
    return f"""
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile {folder}/pid
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
Match LocalAddress 127.0.0.2
  ForceCommand sh {folder}/forced
"""


def _client_settings(folder: Path, port: int, closed: int) -> str:
    return f"""
Host hosta
  HostName 127.0.0.1
Host hostb
  HostName 127.0.0.2
Host down
  HostName 127.0.0.3
  Port {closed}
Host *
  Port {port}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
  LogLevel ERROR
"""


def _wait(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 10 * patience.PATIENCE
    while True:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            socket.create_connection(("127.0.0.2", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)


def _log_in(ssh: str, folder: Path) -> None:
    """See that this user is let in: without PAM, sshd refuses accounts that have no password."""
    done = subprocess.run(
        [ssh, "-F", str(folder / "ssh_config"), "hosta", "true"], capture_output=True, timeout=20 * patience.PATIENCE
    )
    if done.returncode and os.geteuid() != 0:
        pytest.skip("left out: ssh (needs root)")
    assert done.returncode == 0, (folder / "log").read_text()


def fake_version(folder: Path, package: str, version: str) -> str:
    """Return a script for `Hosts.force` that makes a host believe another version of a package is installed there."""
    place = folder / f"{package}-{version}"
    info = place / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    # Ahead of the path that the command sets, or as the only one where it sets none.
    return (
        f'export PYTHONPATH={place}\nexec sh -c "$(printf %s "$SSH_ORIGINAL_COMMAND" '
        f"| sed 's#PYTHONPATH=#PYTHONPATH={place}:#')\"\n"
    )
