"""What several tests of the launcher need."""

from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


def is_alive(pid):
    """Say whether a process runs; a zombie, which nobody here may be able to reap, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
