"""A hub on 127.0.0.1 that speaks what the client libraries of both hubs use of their APIs.

Hugging Face's: the listing with digests, files behind `resolve` (large ones through a redirect to
a store, as there), byte ranges, and its error codes. ModelScope's: the listing and files. A fault
cuts, damages or holds what is sent.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SO_LINGER, SOL_SOCKET
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

STORED_APART = (".safetensors", ".bin", ".model", "tokenizer.json", ".gguf", ".pth")
TOKEN = "hf_right"


@dataclass
class Repo:
    files: dict[str, bytes]
    commit: str = "a" * 40
    branches: tuple[str, ...] = ("main", "master", "v1")
    gated: bool = False


@dataclass
class Fault:
    """What goes wrong with a file: answers end after some bytes (on release), or are damaged."""

    kind: str
    after: int = 0
    release: threading.Event = field(default_factory=threading.Event)


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.faults: dict[str, Fault] = {}
        self.sent: dict[str, int] = {}
        self.requests: list[str] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        self.server.requests.append(f"{self.command} {self.path}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), {k: v[0] for k, v in parse_qs(url.query).items()}
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self.hf_listing(found[1], found[2] or "main", "blobs" in query)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.hf_file(*found.groups())
        elif found := re.fullmatch(r"/store/([^/]+/[^/]+)/(.+)", path):
            # the store knows nothing of tokens: the client must not hand ours on to it
            self.content(self.server.repos[found[1]].files[found[2]], found[2], {})
        elif found := re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo/files", path):
            self.ms_listing(found[1], query["Revision"])
        elif found := re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo", path):
            self.ms_file(found[1], query)
        else:
            self.answer(404, b"{}", {})

    # Hugging Face

    def hf_repo(self, name: str, revision: str, file: bool) -> Repo | None:
        repo = self.server.repos.get(name)
        if repo is None:
            self.answer(401, b'{"error":"Repository Not Found"}', {"X-Error-Code": "RepoNotFound"})
            return None
        if revision not in (*repo.branches, repo.commit):
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return None
        if file and repo.gated and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return None
        return repo

    def hf_listing(self, name: str, revision: str, blobs: bool) -> None:
        if (repo := self.hf_repo(name, revision, file=False)) is None:
            return
        siblings = []
        for file, data in repo.files.items():
            entry: dict[str, Any] = {"rfilename": file}
            if blobs:
                blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                entry |= {"size": len(data), "blobId": blob}
                if file.endswith(STORED_APART):
                    sha = hashlib.sha256(data).hexdigest()
                    entry |= {"lfs": {"sha256": sha, "size": len(data), "pointerSize": 130}}
            siblings.append(entry)
        listing = {"id": name, "modelId": name, "sha": repo.commit, "siblings": siblings}
        self.answer(200, json.dumps(listing).encode(), {})

    def hf_file(self, name: str, revision: str, file: str) -> None:
        if (repo := self.hf_repo(name, revision, file=True)) is None:
            return
        data = repo.files[file]
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        if file.endswith(STORED_APART):
            linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": headers["ETag"]}
            store = f"{self.server.url}/store/{name}/{file}"
            self.answer(302, b"", headers | linked | {"Location": store})
        else:
            self.content(data, file, headers)

    # ModelScope

    def ms_repo(self, name: str, revision: str, file: bool) -> Repo | None:
        repo = self.server.repos.get(name)
        if repo is None or revision not in repo.branches:
            self.answer(404, b'{"Code":10010205001,"Message":"not found","Success":false}', {})
            return None
        if file and repo.gated:
            self.answer(403, b'{"Code":403,"Message":"access denied","Success":false}', {})
            return None
        return repo

    def ms_listing(self, name: str, revision: str) -> None:
        if (repo := self.ms_repo(name, revision, file=False)) is None:
            return
        files: list[dict[str, Any]] = [
            {
                "Path": path,
                "Name": path.rpartition("/")[2],
                "Type": "blob",
                "Size": len(data),
                "Sha256": hashlib.sha256(data).hexdigest(),
            }
            for path, data in repo.files.items()
        ]
        files += [{"Path": "original", "Name": "original", "Type": "tree", "Size": 0}]
        body = {"Code": 200, "Success": True, "Data": {"Files": files}}
        self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def ms_file(self, name: str, query: dict[str, str]) -> None:
        if (repo := self.ms_repo(name, query["Revision"], file=True)) is not None:
            self.content(repo.files[query["FilePath"]], query["FilePath"], {})

    # both

    def content(self, data: bytes, file: str, headers: dict[str, str]) -> None:
        """Send a file, or the range that was asked for, with its fault if it has one."""
        status, first, last = 200, 0, len(data) - 1
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(found[1]), min(last, int(found[2] or last))
            status = 206
            headers = headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        body, fault = data[first : last + 1], self.server.faults.get(file)
        if fault and fault.kind == "damage":
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.head(status, len(body), headers | {"Accept-Ranges": "bytes"})
        if self.command == "HEAD":
            return
        if fault and fault.kind in ("cut", "reset", "hold") and fault.after < len(body):
            self.send(file, body[: fault.after])
            if fault.kind == "hold":
                fault.release.wait(600)
            if fault.kind == "reset":  # what was sent may be lost with it
                self.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        self.send(file, body)

    def send(self, file: str, body: bytes) -> None:
        for start in range(0, len(body), 1 << 16):
            piece = body[start : start + (1 << 16)]
            self.wfile.write(piece)
            with self.server.lock:
                self.server.sent[file] = self.server.sent.get(file, 0) + len(piece)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.head(status, len(body), headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        for fault in hub.faults.values():
            fault.release.set()
        hub.shutdown()
        hub.server_close()
        thread.join(30)
