"""Watches a run from inside: no process started, no socket opened, no pickle read, nothing outside its folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

FORBIDDEN = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "subprocess.Popen", "os.system")
FORBIDDEN_STARTS = ("os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn", "pickle.")
SECRET = "outside-secret"  # part of the path of what must not be read


def watch(report: str, limit_bytes: int, helpers: bool = False) -> None:
    """In the new process: note what is forbidden in the file `report`, and allow `limit_bytes` more of memory.
    `helpers`: processes of our own may be forked and talked to (they speak pickle through a pipe)."""
    import resource

    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + limit_bytes, resource.RLIM_INFINITY))
    Path(report).touch()
    starts = tuple(start for start in FORBIDDEN_STARTS if not (helpers and start in ("os.fork", "pickle.")))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        text = str(arguments)[:300]
        wrong = event in FORBIDDEN or event.startswith(starts)
        wrong &= not text.startswith("('uname', ")  # Python's own platform module
        wrong &= not (event == "socket.bind" and text.endswith("('::1', 0))"))  # older urllib3: is there IPv6?
        wrong |= event in ("open", "os.listdir", "os.scandir") and SECRET in text
        if wrong:
            descriptor = os.open(report, os.O_WRONLY | os.O_APPEND)
            os.write(descriptor, f"{event} {text}\n".encode())
            os.close(descriptor)

    sys.addaudithook(hook)
