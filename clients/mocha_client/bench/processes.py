"""CPU time and memory of a server on this machine, found by the port it listens on. Linux only; elsewhere, nothing."""

import os
from pathlib import Path

PROC = Path("/proc")
LISTENING = "0A"


def servers(port: int) -> list[int]:
    """Processes of this user that hold a socket listening on `port`, and their children: a server and its workers."""
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (PROC / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            parts = line.split()
            if parts[3] == LISTENING and int(parts[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{parts[9]}]")
    if not inodes:
        return []
    entries = list(PROC.glob("[0-9]*"))
    holders = {int(entry.name) for entry in entries if inodes & _open_files(entry)}
    return [int(entry.name) for entry in entries if {int(entry.name), _parent(entry)} & holders]


def _parent(entry: Path) -> int:
    try:
        return int(_stat(entry)[1])
    except OSError:  # gone
        return 0


def _stat(entry: Path) -> list[str]:
    """What the kernel says of a process, after its name: its state comes first."""
    return (entry / "stat").read_text().rpartition(")")[2].split()


def _open_files(process: Path) -> set[str]:
    found = set()
    try:
        for file in (process / "fd").iterdir():
            try:
                found.add(os.readlink(file))
            except OSError:  # closed meanwhile
                continue
    except OSError:  # another user's, or gone
        pass
    return found


def cpu_seconds(processes: list[int]) -> float:
    """User and system time so far."""
    ticks = 0
    for pid in processes:
        fields = _stat(PROC / str(pid))
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rss_bytes(processes: list[int]) -> int:
    """Resident memory; what processes share counts once for each."""
    pages = sum(int((PROC / str(pid) / "statm").read_text().split()[1]) for pid in processes)
    return pages * os.sysconf("SC_PAGE_SIZE")
