"""A hub of one's own on 127.0.0.1: as much of its protocol as huggingface_hub needs to fill its cache."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secret"


class Hub(ThreadingHTTPServer):
    """`repos`: by owner/name, the folder of each revision; those in `private` ask for a token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, Path]] = {}
        self.private: set[str] = set()
        self.served: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit_of(self, repo: str, revision: str) -> str | None:
        """Every revision is a commit of its own."""
        commits = {name: commit(repo, name) for name in self.repos[repo]}
        return revision if revision in commits.values() else commits.get(revision)

    def folder_of(self, repo: str, sha: str) -> Path:
        return next(f for name, f in self.repos[repo].items() if commit(repo, name) == sha)


def commit(repo: str, revision: str) -> str:
    return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        what, repo, revision, rest = "resolve", "/".join(parts[:2]), *self._tail(parts, 3)
        if parts[:2] == ["api", "models"]:
            what, repo, (revision, rest) = parts[4], "/".join(parts[2:4]), self._tail(parts, 5)
        known = repo in self.server.repos
        if repo in self.server.private:
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not known:
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        sha = self.server.commit_of(repo, revision)
        if sha is None:
            return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        folder = self.server.folder_of(repo, sha)
        if what == "revision":
            return self._answer(200, json.dumps({"id": repo, "sha": sha, "siblings": []}).encode())
        if what == "tree":
            entries = [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": digest(p)}
                for p in folder.iterdir()
                if p.is_file()
            ]
            return self._answer(200, json.dumps(entries).encode())
        path = folder / rest
        if not path.is_file():
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        self.server.served.append(rest)
        return self._answer(
            200, path.read_bytes(), {"X-Repo-Commit": sha, "ETag": f'"{digest(path)}"'}
        )

    do_HEAD = do_GET

    def _tail(self, parts: list[str], place: int) -> tuple[str, str]:
        return parts[place] if len(parts) > place else "", "/".join(parts[place + 1 :])

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def running_hub():
    with Hub() as hub:
        thread = Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
