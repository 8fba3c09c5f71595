"""A bare Kubernetes API: etcd and kube-apiserver on free ports of 127.0.0.1, in a temporary directory,
and nothing else.

Why: what the API server refuses, defaults, prints and merges can't be told from a schema on paper.
No controllers run, so nothing is created, collected or scheduled. Ready in about 5 s. Invariant:
both processes die with the one that started them, also when it is killed.

    with ApiServer.start() as server:           # or the fixture `api_server` in conftest.py
        server.install_crds()
        server.kubectl("apply", "-f", "-", stdin=manifest)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sluice_operator.xds.local import free_port

ROOT = Path(__file__).parents[2]
CRDS = ROOT / "crds"
BINARIES = Path(os.environ.get("SLUICE_CACHE") or Path.home() / ".cache/sluice") / "bin/current"


def binaries_missing() -> str:
    """Why the server can't be started here; empty where it can."""
    missing = [name for name in ("etcd", "kube-apiserver", "kubectl") if not (BINARIES / name).exists()]
    return f"no {', '.join(missing)} in {BINARIES}: run `make cluster-binaries`" if missing else ""


class Refused(Exception):
    """kubectl failed; the message is what it printed."""


@dataclass(frozen=True)
class ApiServer:
    """A running server."""

    url: str
    token: str
    kubeconfig: Path
    log: Path

    @classmethod
    @contextlib.contextmanager
    def start(cls) -> Iterator[ApiServer]:
        """Runs until the context ends. Raises RuntimeError with the log's end when it does not come up."""
        with (
            tempfile.TemporaryDirectory(prefix="sluice-apiserver-") as name,
            contextlib.ExitStack() as processes,
        ):
            directory = Path(name)
            client, peer, secure = free_port(), free_port(), free_port()
            processes.enter_context(_process("etcd", _etcd_flags(directory, client, peer), directory))
            token = secrets.token_hex(16)
            (directory / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
            flags = _apiserver_flags(directory, client, secure)
            process = processes.enter_context(_process("kube-apiserver", flags, directory))
            server = cls(
                f"https://127.0.0.1:{secure}",
                token,
                directory / "kubeconfig",
                directory / "kube-apiserver.log",
            )
            server._write_kubeconfig()
            server._wait_ready(process, 240)
            yield server

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Standard output. Raises Refused with standard error."""
        done = subprocess.run(
            [BINARIES / "kubectl", "--kubeconfig", self.kubeconfig, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise Refused(done.stderr.strip() or done.stdout.strip())
        return done.stdout

    def apply(self, *manifests: dict[str, Any], server_side: bool = False) -> str:
        """`kubectl apply` of manifests, strict about unknown fields."""
        flags = ["--server-side", "--force-conflicts"] if server_side else []
        return self.kubectl("apply", *flags, "-f", "-", stdin=yaml.safe_dump_all(manifests))

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get -o yaml`."""
        return dict(yaml.safe_load(self.kubectl("get", *arguments, "-o", "yaml")))

    def install_crds(self) -> None:
        """Applies `crds/` and waits until each is established."""
        self.kubectl("apply", "--server-side", "-f", str(CRDS))
        self.kubectl("wait", "--for=condition=Established", "--timeout=120s", "-f", str(CRDS))

    def namespace(self, name: str) -> None:
        """Creates a namespace. It stays: nothing here could delete it."""
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def _write_kubeconfig(self) -> None:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "bare", "cluster": {"server": self.url, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [
                {"name": "bare", "context": {"cluster": "bare", "user": "admin", "namespace": "default"}}
            ],
            "current-context": "bare",
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))

    def _wait_ready(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.kubectl("get", "--raw", "/readyz")
                self.kubectl("get", "namespace", "default")
                return
            except Refused as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    end = self.log.read_text()[-3000:]
                    raise RuntimeError(
                        f"the API server is not ready (exit {process.poll()}): {error}\n{end}"
                    ) from None
                time.sleep(0.2)


def _etcd_flags(directory: Path, client: int, peer: int) -> list[str]:
    return [
        f"--data-dir={directory / 'etcd'}",
        f"--listen-client-urls=http://127.0.0.1:{client}",
        f"--advertise-client-urls=http://127.0.0.1:{client}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
        "--unsafe-no-fsync",
    ]


def _apiserver_flags(directory: Path, etcd: int, secure: int) -> list[str]:
    key, public = directory / "service-account.key", directory / "service-account.pub"
    openssl = [
        "openssl",
        "genpkey",
        "-algorithm",
        "EC",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-out",
        str(key),
    ]
    subprocess.run(openssl, check=True, capture_output=True)
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True, capture_output=True
    )
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        f"--secure-port={secure}",
        "--bind-address=127.0.0.1",
        f"--cert-dir={directory / 'certificates'}",
        f"--token-auth-file={directory / 'tokens.csv'}",
        f"--service-account-key-file={public}",
        f"--service-account-signing-key-file={key}",
        "--service-account-issuer=https://bare.invalid",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--endpoint-reconciler-type=none",
        "--authorization-mode=RBAC",
        "--disable-admission-plugins=ServiceAccount",
    ]


@contextlib.contextmanager
def _process(name: str, flags: list[str], directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", str(BINARIES / name), *flags], stdout=log, stderr=log
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
