"""The first process of a pod: arrange its own namespaces, then become the container's command. See pods.py."""

import json
import os
import socket
import subprocess
import sys


def be_a_pod(hostname, hosts, mounts, command):
    """Take the name, mount what the pod mounts, and go on as the command."""
    socket.sethostname(hostname)
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    for parent in ("/run", "/mnt"):  # so that mount points can be made there, for this pod only
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", parent], check=True)
    for source, where in mounts:
        os.makedirs(where, exist_ok=True)
        how = ["--bind", source] if source else ["-t", "tmpfs", "tmpfs"]
        subprocess.run(["mount", *how, where], check=True)
    os.execvp(command[0], command)


if __name__ == "__main__":
    be_a_pod(**json.loads(sys.argv[1]))
