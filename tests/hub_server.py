"""A Hub on loopback: the part of its protocol that huggingface_hub uses, with faults on demand.

Files lie on a second name of this machine ("localhost" beside "127.0.0.1"), as the real Hub's lie on another host: the
description of a file is on the redirect, and a token must not follow it.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


@dataclass
class HubRepo:
    """A repository: its files by path."""

    files: dict[str, bytes]
    licence: str | None = "apache-2.0"
    gated: bool = False
    commit: str = COMMIT
    stated: dict[str, str] = field(default_factory=dict)
    """SHA-256 stated of a file, where it is not the right one."""


class HubServer(ThreadingHTTPServer):
    """Serves `repos`. Faults are attributes; the requests that came are in `requests`.

    Attributes:
        cuts: connections of files that end too early, each after so many bytes; used up one by one.
        answers: (status, headers) given instead of the next answers to a file's GET; used up one by one.
        api_answers: the same for the description of a repository.
        ranges: whether Range is understood.
        logged_in: tokens that may see gated repositories.
        sent: bytes of files that went out.
        pause_after: an answer with a file waits after so many bytes, sets `paused`, and goes on when `go_on` is set.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, HubRepo] = {}
        self.cuts: list[int] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.api_answers: list[tuple[int, dict[str, str]]] = []
        self.ranges = True
        self.logged_in: set[str] = set()
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.sent = 0
        self.lock = threading.Lock()
        self.extra_paths: list[str] = []
        self.pause_after: int | None = None
        self.paused, self.go_on = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.server.lock:
            self.server.requests.append((self.command, path, dict(self.headers)))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if path.startswith("/files/"):
            self._file(path.removeprefix("/files/"))
        elif api is not None:
            self._describe(api[1], api[2])
        elif file is not None:
            self._resolve(file[1], file[2], file[3])
        else:
            self._error(404, "EntryNotFound")

    def _repo(self, name: str, revision: str | None) -> HubRepo | None:
        repo = self.server.repos.get(name)
        if repo is None:
            self._error(401, "RepoNotFound")
            return None
        if revision not in (None, "main", repo.commit):
            self._error(404, "RevisionNotFound")
            return None
        return repo

    def _describe(self, name: str, revision: str | None) -> None:
        if self._fault(self.server.api_answers):
            return
        repo = self._repo(name, revision)
        if repo is None:
            return
        siblings: list[dict[str, Any]] = [
            {
                "rfilename": path,
                "size": len(data),
                "blobId": hashlib.sha1(data).hexdigest(),
                "lfs": {"sha256": self._sha256(repo, path), "size": len(data), "pointerSize": 100},
            }
            for path, data in repo.files.items()
        ]
        siblings += [{"rfilename": path, "size": 10} for path in self.server.extra_paths]
        body = {
            "_id": "1",
            "id": name,
            "modelId": name,
            "sha": repo.commit,
            "private": False,
            "gated": "manual" if repo.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "cardData": {"license": repo.licence} if repo.licence else {},
            "siblings": siblings,
        }
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo = self._repo(name, revision)
        if repo is None:
            return
        if repo.gated:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if token not in self.server.logged_in:
                self._error(403 if token else 401, "GatedRepo")
                return
        if path not in repo.files:
            self._error(404, "EntryNotFound")
            return
        headers = {
            "X-Repo-Commit": repo.commit,
            "X-Linked-Etag": f'"{self._sha256(repo, path)}"',
            "X-Linked-Size": str(len(repo.files[path])),
            "Location": f"http://localhost:{self.server.server_address[1]}/files/{name}/{path}",
        }
        self._send(302, b"", headers)

    def _file(self, where: str) -> None:
        owner, name, path = where.split("/", 2)
        if "Authorization" in self.headers:
            self._error(400, "a token came along")
            return
        if self.command == "GET" and self._fault(self.server.answers):
            return
        data = self.server.repos[f"{owner}/{name}"].files[path]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop, status, headers = 0, len(data), 200, {"Content-Type": "application/octet-stream"}
        if asked is not None and self.server.ranges:
            start = int(asked[1])
            stop = min(int(asked[2]) + 1, len(data)) if asked[2] else len(data)
            if start >= len(data):
                self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            status = 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        body = data[start:stop]
        cut = None
        with self.server.lock:
            if self.server.cuts and len(body) > self.server.cuts[0]:
                cut = self.server.cuts.pop(0)
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        part = body if cut is None else body[:cut]
        pause = self.server.pause_after
        if pause is not None and len(part) > pause:
            self._count(part[:pause])
            self.server.paused.set()
            self.server.go_on.wait(60)
            part = part[pause:]
        self._count(part)
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()

    def _count(self, data: bytes) -> None:
        self.wfile.write(data)
        with self.server.lock:
            self.server.sent += len(data)

    def _fault(self, answers: list[tuple[int, dict[str, str]]]) -> bool:
        with self.server.lock:
            if not answers:
                return False
            status, headers = answers.pop(0)
        self._send(status, b"trouble", headers)
        return True

    def _sha256(self, repo: HubRepo, path: str) -> str:
        return repo.stated.get(path) or hashlib.sha256(repo.files[path]).hexdigest()

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code, "Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
