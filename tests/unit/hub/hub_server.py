"""A small hub: repositories are made, files are uploaded and committed, as the client of the Hugging Face Hub asks for.

Files that are no text go over the protocol of git's large files.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

LARGE = (".safetensors", ".parquet", ".png")
TOKEN = "hf_thetokenofthistestthetokenofthistest"


class Hub:
    """The server, and all that it has been given."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        """Bodies of the requests to make a repository."""
        self.files: dict[str, dict[str, bytes]] = {}
        """``models/OWNER/NAME`` or ``datasets/OWNER/NAME`` -> its files."""
        self.cards: list[str] = []
        """Cards that were to be checked."""
        self.tokens: set[str | None] = set()
        self.stored: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = hub.answer(self.command, self.path, body, self.headers.get("Authorization"))
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = _answer

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, method: str, path: str, body: bytes, token: str | None) -> tuple[int, Any]:
        """Answer one request."""
        path = path.partition("?")[0]
        if method == "PUT":  # what was promised below, which takes no token
            digest = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == digest
            self.stored[digest] = body
            return 200, {}
        self.tokens.add(token)
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            self.cards.append(json.loads(body)["content"])
            return 200, {"warnings": [], "errors": []}
        if found := re.fullmatch(r"/(?:(datasets)/)?([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            return 200, self._batch(json.loads(body))
        if found := re.fullmatch(r"/api/(models|datasets)/([\w.-]+/[\w.-]+)(?:/(.*))?", path):
            return 200, self._of_repository(method, f"{found[1]}/{found[2]}", found[3] or "", body)
        return 404, {"error": f"no {method} {path}"}

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        self.made.append(asked)
        name = f"{asked.get('organization') or 'ann'}/{asked['name']}"
        kind = asked.get("type") or "model"
        self.files.setdefault(f"{kind}s/{name}", {".gitattributes": b""})
        prefix = "" if kind == "model" else f"{kind}s/"
        return 200, {"url": f"{self.url}/{prefix}{name}"}

    def _batch(self, asked: dict[str, Any]) -> Any:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.url}/large/{one['oid']}"}}}
            for one in asked["objects"]
            if one["oid"] not in self.stored
        ]
        return {"transfer": "basic", "objects": objects}

    def _of_repository(self, method: str, name: str, rest: str, body: bytes) -> Any:
        files = self.files[name]
        if rest.startswith("preupload/"):
            modes = [
                {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular"}
                for one in json.loads(body)["files"]
            ]
            return {"files": [{**one, "shouldIgnore": False} for one in modes]}
        if rest.startswith("commit/"):
            for entry in map(json.loads, body.splitlines()):
                self._commit(files, entry["key"], entry["value"])
            return {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None}
        if rest.startswith("tree/"):
            return [{"type": "file", "path": path, "size": len(one), "oid": "0" * 40} for path, one in files.items()]
        return {"id": name.partition("/")[2], "sha": "1" * 40, "siblings": [{"rfilename": path} for path in files]}

    def _commit(self, files: dict[str, bytes], key: str, value: dict[str, Any]) -> None:
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = self.stored[value["oid"]]
        elif key == "deletedFile":
            del files[value["path"]]
