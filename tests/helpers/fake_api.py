"""The API server of the tests' own Kubernetes (`fake_cluster`): the requests of `launch/kubernetes.py` alone."""

from __future__ import annotations

import json
import re
import time
import uuid
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from cluster_rules import problems

if TYPE_CHECKING:
    from fake_cluster import Cluster

NAMESPACE = "team-a"
_LOOK = 0.05


def kubeconfig(port: int) -> dict[str, Any]:
    """A kubeconfig whose context leads to the server."""
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}
    head = {"apiVersion": "v1", "kind": "Config", "current-context": "x", "clusters": [cluster], "contexts": [context]}
    return {**head, "users": [{"name": "u", "user": {"token": "t"}}]}


_PLACE = re.compile(
    rf"/(api/v1|apis/jobset\.x-k8s\.io/v1alpha2)/namespaces/{NAMESPACE}/([a-z]+)(?:/([^/]+))?(?:/([a-z]+))?"
)


class Handler(BaseHTTPRequestHandler):
    cluster: Cluster

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _refuse(self, code: int, message: str) -> None:
        self._answer(code, {"kind": "Status", "status": "Failure", "message": message, "code": code})

    def _asked(self) -> tuple[str, str, str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        match = _PLACE.fullmatch(parts.path)
        kind, name, below = (match[2], match[3] or "", match[4] or "") if match else ("", "", "")
        return kind, name, below, parse_qs(parts.query)

    def do_POST(self) -> None:
        made = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind, name, below, _ = self._asked()
        if below == "eviction":
            self.cluster.evict(name)
            self._answer(201, {"kind": "Status", "status": "Success"})
            return
        wrong, key = problems(made), (kind, made["metadata"]["name"])
        with self.cluster.lock:
            if wrong:
                self._refuse(422, f"{made['kind']} is invalid: {'; '.join(wrong)}")
            elif key in self.cluster.objects:
                self._refuse(409, f"{kind} {key[1]} already exists")
            elif kind not in ("jobsets", "configmaps", "secrets"):
                self._refuse(404, "the server could not find the requested resource")
            else:
                made["metadata"]["uid"] = uuid.uuid4().hex
                self.cluster.objects[key] = made
                self._answer(201, made)

    def do_GET(self) -> None:
        kind, name, below, query = self._asked()
        if below == "log":
            self._log(name, follow="true" in query.get("follow", [""])[0].lower())
            return
        with self.cluster.lock:
            if kind == "pods":
                wanted = dict(each.split("=") for each in query["labelSelector"][0].split(","))
                every = [pod.to_json() for pod in self.cluster.pods]
                listed = [pod for pod in every if wanted.items() <= pod["metadata"]["labels"].items()]
                self._answer(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": listed})
            elif (kind, name) in self.cluster.objects:
                self._answer(200, self.cluster.objects[kind, name])
            else:
                self._refuse(404, f"{kind} {name} not found")

    def do_DELETE(self) -> None:
        kind, name, _, _ = self._asked()
        with self.cluster.lock:
            found = self.cluster.objects.get((kind, name))
            if found is None:
                self._refuse(404, f"{kind} {name} not found")
                return
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            found["status"] = {}
            self._answer(200, found)

    def _log(self, name: str, *, follow: bool) -> None:
        pod = next(pod for pod in self.cluster.pods if pod.name == name)
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        with open(pod.log, "rb") as log:
            while True:
                ended = pod.phase != "Running"
                self.wfile.write(log.read())
                if ended or not follow:
                    return
                time.sleep(_LOOK)
