"""A directory that acts as the Hub: what huggingface_hub asks over HTTP is answered from it and written to it."""

import base64
import contextlib
import hashlib
import json
import shutil
from pathlib import Path

import huggingface_hub


try:
    import httpx2 as httpx  # from huggingface_hub 2.0 on
except ImportError:
    import httpx


class HubDirectory:
    """`root/<owner>/<name>` is a repository, `root/<owner>/<name>@<revision>` another revision of it. `requests` are
    (method, path), `authorizations` the Authorization of each; `fail(request)` may raise to break a connection. Where
    `token` is set, repositories are gated: they open for this one only."""

    def __init__(self, root: Path):
        self.root, self.requests, self.authorizations, self.blobs = root, [], [], {}
        self.fail, self.token = lambda request: None, None

    def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.requests.append((request.method, path))
        self.authorizations.append(request.headers.get("authorization"))
        self.fail(request)
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            return httpx.Response(401, headers={"X-Error-Code": "GatedRepo"})
        parts = path.strip("/").split("/")
        body = request.read()
        if path == "/api/repos/create":
            data = json.loads(body)
            repo = f"{data.get('organization') or 'me'}/{data['name']}"
            (self.root / repo).mkdir(parents=True, exist_ok=True)
            return httpx.Response(200, json={"url": f"https://huggingface.co/{repo}"})
        if path == "/api/validate-yaml":
            return httpx.Response(200, json={"errors": [], "warnings": []})
        if path == "/blobs" or parts[-1].startswith("blob-"):
            self.blobs[parts[-1].removeprefix("blob-")] = body
            return httpx.Response(200)
        if parts[0] == "api":
            return self._api(parts[1:], body)
        if parts[-1] == "batch":
            return self._lfs(json.loads(body))
        return self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), request.method)

    def _revision(self, repo: str, asked: str) -> tuple[Path, str]:
        """(folder, commit) of the revision of `repo` that `asked` names or is the commit of."""
        for folder in (self.root / repo).parent.glob(f"{Path(repo).name}@*"):
            commit = hashlib.sha1(folder.name.encode()).hexdigest()
            if asked in (folder.name.partition("@")[2], commit):
                return folder, commit
        return self.root / repo, "0" * 40

    def _api(self, parts: list[str], body: bytes) -> httpx.Response:
        repo = "/".join(parts[1:3])
        folder, commit = self._revision(repo, parts[4] if len(parts) > 4 else "main")
        if not folder.is_dir():
            return httpx.Response(404, headers={"X-Error-Code": "RepoNotFound"})
        if parts[3:4] == ["preupload"]:
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for f in json.loads(body)["files"]
            ]
            return httpx.Response(200, json={"files": modes})
        if parts[3:4] == ["commit"]:
            return self._commit(folder, [json.loads(line) for line in body.splitlines()])
        names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        if parts[3:4] == ["tree"]:
            return httpx.Response(
                200, json=[{"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": "0"} for n in names]
            )
        siblings = [{"rfilename": name} for name in names]
        return httpx.Response(200, json={"id": repo, "sha": commit, "siblings": siblings, "tags": []})

    def _lfs(self, asked: dict) -> httpx.Response:
        def upload(entry):
            href = f"https://huggingface.co/blob-{entry['oid']}"
            return {**entry, "actions": {"upload": {"href": href}}}

        return httpx.Response(200, json={"transfer": "basic", "objects": [upload(e) for e in asked["objects"]]})

    def _commit(self, folder: Path, lines: list[dict]) -> httpx.Response:
        for line in lines:
            kind, value = line["key"], line["value"]
            if kind == "deletedFile":
                (folder / value["path"]).unlink()
            elif kind in ("file", "lfsFile"):
                content = base64.b64decode(value["content"]) if kind == "file" else self.blobs[value["oid"]]
                (folder / value["path"]).parent.mkdir(parents=True, exist_ok=True)
                (folder / value["path"]).write_bytes(content)
        url = f"https://huggingface.co/{folder.relative_to(self.root).as_posix()}/commit/" + "0" * 40
        return httpx.Response(200, json={"success": True, "commitUrl": url, "commitOid": "0" * 40})

    def _file(self, repo: str, revision: str, name: str, method: str) -> httpx.Response:
        folder, commit = self._revision(repo, revision)
        path = folder / name
        if not path.is_file():
            code = "EntryNotFound" if folder.is_dir() else "RepoNotFound"
            return httpx.Response(404, headers={"X-Error-Code": code, "X-Repo-Commit": commit})
        content = path.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Content-Length": str(len(content))}
        return httpx.Response(200, headers=headers, content=b"" if method == "HEAD" else content)


@contextlib.contextmanager
def serving(root: Path, monkeypatch):
    """huggingface_hub talks to a `HubDirectory` at `root`, with an empty cache beside it."""
    hub = HubDirectory(root)
    cache = root.parent / "hub-cache"
    shutil.rmtree(cache, ignore_errors=True)
    for name, value in (("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True), ("HF_HUB_CACHE", str(cache))):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    huggingface_hub.set_client_factory(
        lambda: httpx.Client(transport=httpx.MockTransport(hub.handle), follow_redirects=True)
    )
    try:
        yield hub
    finally:
        huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)
