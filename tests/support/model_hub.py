"""A small hub on this machine: it serves models, in parts, fails in every way in which a hub can, and takes uploads."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub

COMMIT, OTHER_COMMIT = "a" * 40, "b" * 40


@dataclass
class ModelHub:
    """What it has, how it behaves, and what was asked of it."""

    address: str = ""
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)  # model -> its files, uploaded ones too
    private: set[str] = field(default_factory=set)  # models that were made as private ones
    commit: str = COMMIT  # of the default branch of each model
    asked: list[tuple[str, str]] = field(default_factory=list)  # (method, path) in their order
    sent: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # file -> ranges of bytes asked for
    status: dict[str, list[int]] = field(default_factory=dict)  # part of a path -> answers, the last one stays
    gated: bool = False
    retry_after: str | None = None
    slow_s: float = 0.0  # waited before each answer to a question about a model
    byte_s: float = 0.0  # waited between pieces of 64 KiB of a file
    spoilt: set[str] = field(default_factory=set)  # files whose content is sent with other bytes than their hash says
    cut_after: int | None = None  # bytes after which the connection breaks, once for each file
    has_ranges: bool = True
    is_cut: set[str] = field(default_factory=set)
    listing: bytes | None = None  # answered in place of a listing
    etag: str | None = None  # answered in place of each file's
    elsewhere: str | None = None  # address of the host to which it sends for weights
    is_xet: bool = False  # whether it names Xet storage for the weights
    tokens: set[str] = field(default_factory=set)  # tokens that came with questions

    def gets(self) -> list[str]:
        """Files that were asked for, in their order."""
        paths = [path for way, path in self.asked if way == "GET" and "/res" in path]
        return [path.split("/resolve/")[1].split("/", 1)[1] for path in paths]

    def questions(self) -> int:
        return sum(path.startswith("/api/") for _, path in self.asked)


def _sha256(name: str, content: bytes) -> str | None:
    return hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else None


def _git(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def folder_files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@contextmanager
def model_hub(name: str, files: dict[str, bytes]) -> Iterator[ModelHub]:
    """A hub with one model that runs while the body does; name it by HF_ENDPOINT."""
    hub = ModelHub(models={name: files})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            return None

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path))
            hub.tokens |= {self.headers["Authorization"]} if "Authorization" in self.headers else set()
            time.sleep(hub.slow_s)
            if self._fails(path):
                return None
            if hub.gated:
                return self._answer(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "accept the terms"})
            words = path.strip("/").split("/")
            if words[0] == "api":
                return self._listing("/".join(words[2:4]), words[5] if len(words) > 5 else "main")
            model, revision, file = "/".join(words[:2]), words[3], "/".join(words[4:])
            content = hub.models.get(model, {}).get(file)
            if content is None or revision not in ("main", hub.commit, COMMIT):
                return self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": hub.commit})
            return self._file(file, content, hub.commit if revision == "main" else revision)

        def _fails(self, path: str) -> bool:
            """Whether another status than the usual one was answered, as the test has asked."""
            for part, statuses in hub.status.items():
                if part in path and statuses:
                    status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
                    if status != 200:
                        headers = {} if hub.retry_after is None else {"Retry-After": hub.retry_after}
                        self._answer(status, b'{"error": "as the test says"}', headers)
                        return True
            return False

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer: dict[str, Any] = {"errors": [], "warnings": []}
            name = "/".join(self.path.removeprefix("/api/models/").split("/")[:2])
            if self._fails(self.path):
                return
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                hub.models.setdefault(name, {})
                hub.private |= {name} if asked.get("private") or asked.get("visibility") == "private" else set()
                answer = {"url": f"{hub.address}/{name}", "name": name}
            elif "/preupload/" in self.path:
                paths = [item["path"] for item in json.loads(body)["files"]]
                entry = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
                answer = {"files": [{"path": path, **entry} for path in paths]}
            elif "/commit/" in self.path:
                lines = [line["value"] for line in map(json.loads, body.splitlines()) if line["key"] == "file"]
                hub.models[name] |= {line["path"]: base64.b64decode(line["content"]) for line in lines}
                url = f"{hub.address}/{name}/commit/{OTHER_COMMIT}"
                answer = {"commitUrl": url, "commitOid": OTHER_COMMIT, "success": True}
            self._answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def _listing(self, model: str, revision: str) -> None:
            if hub.listing is not None:
                return self._answer(200, hub.listing, {"Content-Type": "application/json"})
            if model not in hub.models:
                return self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            if revision not in ("main", hub.commit, COMMIT):
                return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            siblings = []
            for file, content in hub.models[model].items():
                entry: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": _git(content)}
                sha256 = _sha256(file, content)
                if sha256:
                    entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
                siblings.append(entry)
            commit = hub.commit if revision == "main" else revision
            body = json.dumps({"id": model, "modelId": model, "sha": commit, "siblings": siblings}).encode()
            return self._answer(200, body, {"Content-Type": "application/json"})

        def _file(self, file: str, content: bytes, commit: str) -> None:
            etag = hub.etag or _sha256(file, content) or _git(content)
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if hub.elsewhere and _sha256(file, content):
                headers |= {"X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(len(content))}
                if hub.is_xet:
                    headers |= {"X-Xet-Hash": "e" * 64, "X-Xet-Refresh-Route": f"{hub.address}/api/xet"}
                return self._answer(302, b"", {**headers, "Location": hub.elsewhere + self.path})
            if self.command == "HEAD":
                return self._answer(200, content, headers)
            start = 0
            asked = self.headers.get("Range")
            if asked and hub.has_ranges:
                start = int(asked.removeprefix("bytes=").split("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            part = bytes(reversed(content))[start:] if file in hub.spoilt else content[start:]
            hub.sent.setdefault(file, []).append((start, len(content)))
            self.send_response(206 if start else 200)
            for key, value in {**headers, "Content-Length": str(len(part))}.items():
                self.send_header(key, value)
            self.end_headers()
            stop = len(part)
            if hub.cut_after is not None and file not in hub.is_cut:
                hub.is_cut.add(file)
                stop = min(stop, hub.cut_after)
            try:
                for begin in range(0, stop, 65536):
                    self.wfile.write(part[begin : min(begin + 65536, stop)])
                    began_s = time.monotonic()
                    while begin + 65536 < stop and time.monotonic() - began_s < hub.byte_s:  # a test may end that
                        time.sleep(min(0.02, hub.byte_s))
            except OSError:
                self.close_connection = True
                return None
            if stop < len(part):
                self.close_connection = True
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def read_hub_settings_again() -> None:
    """For a process forked from one that has loaded the hub's library, which reads the variables when it is loaded."""
    importlib.reload(huggingface_hub.constants)
