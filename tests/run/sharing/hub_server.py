"""A stand-in for the Hugging Face Hub on loopback: its HTTP interface as huggingface_hub uses it, with LFS uploads."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
from typing import Any

READ, WRITE = "hf_read", "hf_write"
LARGE = (".safetensors", ".png", ".mp4")


class HubServer(http.server.ThreadingHTTPServer):
    """Repositories by name, each its files; large ones by way of LFS, as .gitattributes of the Hub have it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.fails: int = 0
        """Code of every answer, if not 0."""
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit_of(self, repo: str) -> str:
        content = json.dumps({name: hashlib.sha1(data).hexdigest() for name, data in sorted(self.repos[repo].items())})
        return hashlib.sha1(content.encode()).hexdigest()

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(5)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: HubServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def send(self, code: int, data: Any = b"", **headers: str) -> None:
        if not isinstance(data, bytes):
            data = json.dumps(data).encode()
            headers.setdefault("Content_Type", "application/json")
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, code: int, kind: str, text: str) -> None:
        self.send(code, {"error": text}, X_Error_Code=kind, X_Error_Message=text)

    def read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def handle_any(self) -> None:
        body = self.read_body()
        path = self.path.split("?")[0]
        self.server.calls.append(f"{self.command} {path}")
        if self.server.fails:
            return self.refuse(self.server.fails, "", "out of order")
        if self.token and self.token not in (READ, WRITE):
            return self.refuse(401, "", "Invalid user token.")
        if path.startswith("/objects/"):
            return self.lfs_object(path.rpartition("/")[2], body)
        if path == "/api/whoami-v2":
            return self.send(200, {"name": "me", "type": "user", "orgs": []} if self.token else {"error": "x"})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.send(200, {"errors": [], "warnings": []})
        found = re.fullmatch(r"(?:/api/models)?/([\w.-]+/[\w.-]+?)(?:\.git)?(?:/(.+))?", path)
        if found is None:
            return self.refuse(404, "", f"no such address: {path}")
        repo, rest = found[1], found[2] or ""
        if repo not in self.server.repos or (repo in self.server.private and not self.token):
            return self.refuse(404 if self.token else 401, "RepoNotFound", "Repository not found")
        if self.command in ("GET", "HEAD"):
            return self.read(repo, rest)
        if self.token != WRITE:
            return self.refuse(403, "", "you need write access")
        return self.write(repo, rest, body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def create(self, asked: dict[str, Any]) -> None:
        if self.token != WRITE:
            return self.refuse(403, "", "you need a token with the right to write")
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.server.repos:
            said = {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"}
            return self.send(409, said)
        self.server.repos[name] = {".gitattributes": b"*.safetensors filter=lfs\n"}
        if asked.get("private") or asked.get("visibility") == "private":
            self.server.private.add(name)
        self.send(200, {"url": f"{self.server.url}/{name}", "name": name})

    def lfs_object(self, oid: str, body: bytes) -> None:
        if self.command == "PUT":
            if hashlib.sha256(body).hexdigest() != oid:
                return self.refuse(400, "", "these are other bytes")
            self.server.objects[oid] = body
            return self.send(200)
        if self.command == "POST":  # verify
            return self.send(200 if oid in self.server.objects else 404, {})
        self.send(200, self.server.objects[oid], ETag=f'"{oid}"')

    def write(self, repo: str, rest: str, body: bytes) -> None:
        files = self.server.repos[repo]
        if rest.startswith("preupload/"):
            modes = [
                {
                    "path": entry["path"],
                    "uploadMode": "lfs" if entry["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for entry in json.loads(body)["files"]
            ]
            return self.send(200, {"files": modes})
        if rest == "info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            for entry in objects:
                at = f"{self.server.url}/objects/{entry['oid']}"
                if entry["oid"] not in self.server.objects:
                    entry["actions"] = {"upload": {"href": at}, "verify": {"href": at}}
            return self.send(200, {"transfer": "basic", "objects": objects})
        if not rest.startswith("commit/"):
            return self.refuse(404, "", f"no such address: {rest}")
        for line in body.splitlines():
            change = json.loads(line)
            value = change["value"]
            if change["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif change["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif change["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.server.commit_of(repo)
        at = f"{self.server.url}/{repo}/commit/{commit}"
        self.send(200, {"commitUrl": at, "commitOid": commit, "success": True, "hookOutput": ""})

    def read(self, repo: str, rest: str) -> None:
        files, commit = self.server.repos[repo], self.server.commit_of(repo)
        verb, _, rest = rest.partition("/")
        revision, _, name = rest.partition("/")
        if revision not in ("", "main", commit):
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if verb in ("", "revision"):
            listed = [{"rfilename": file} for file in files]
            private = repo in self.server.private
            return self.send(200, {"id": repo, "sha": commit, "private": private, "siblings": listed})
        if verb == "tree":
            entries = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in files.items()
            ]
            return self.send(200, entries)
        if verb != "resolve" or name not in files:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        data = files[name]
        if not name.endswith(LARGE):
            return self.send(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit)
        oid = hashlib.sha256(data).hexdigest()
        self.server.objects[oid] = data
        headers = {"X_Linked_Etag": f'"{oid}"', "X_Linked_Size": str(len(data)), "X_Repo_Commit": commit}
        # To another host, as the Hub sends clients to its CDN: they then take the headers of this answer.
        self.send(302, b"", Location=f"http://localhost:{self.server.server_port}/objects/{oid}", **headers)
