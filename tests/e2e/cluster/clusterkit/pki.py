"""Certificates and kubeconfigs. They outlive a restart of the cluster, so that a kubeconfig stays good."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from .common import KUBECONFIG, STATE, run

PKI = STATE / "pki"
DAYS = "3650"
EC_KEY = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"]
NODE = "sluice-node"
NODE_IP = "10.99.0.1"
SERVICE_IP = "10.96.0.1"
API_PORT = 16443

# file → (common name, organisation): what RBAC and the Node authorizer know each component by.
CLIENTS = {
    "admin": ("sluice-admin", "system:masters"),
    "kubelet-client": ("kube-apiserver-kubelet-client", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "proxy": ("system:kube-proxy", ""),
    "kubelet": (f"system:node:{NODE}", "system:nodes"),
}


def make() -> None:
    if not (PKI / ".complete").exists():
        PKI.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("ca", "service-account"):
            run("openssl", "genpkey", *EC_KEY, "-out", key(name))
        run("openssl", "pkey", "-in", key("service-account"), "-pubout", "-out", PKI / "service-account.pub")
        run("openssl", "req", "-x509", "-new", "-key", key("ca"), "-subj", "/CN=sluice-test-ca",
            "-days", DAYS, "-out", crt("ca"))  # fmt: skip
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
        names.append("kubernetes.default.svc.cluster.local")
        addresses = ["127.0.0.1", NODE_IP, SERVICE_IP]
        alternatives = [f"DNS:{name}" for name in names] + [f"IP:{address}" for address in addresses]
        issue("apiserver", "/CN=kube-apiserver", "serverAuth", ",".join(alternatives))
        for name, (common_name, organisation) in CLIENTS.items():
            issue(name, (f"/O={organisation}" if organisation else "") + f"/CN={common_name}", "clientAuth")
        (PKI / ".complete").touch()
    for name in CLIENTS:
        write_kubeconfig(name, KUBECONFIG if name == "admin" else PKI / f"{name}.kubeconfig")


def key(name: str) -> Path:
    return PKI / f"{name}.key"


def crt(name: str) -> Path:
    return PKI / f"{name}.crt"


def issue(name: str, subject: str, usage: str, alternatives: str = "") -> None:
    request, extensions = PKI / f"{name}.csr", PKI / f"{name}.ext"
    extensions.write_text(
        f"extendedKeyUsage={usage}\n" + (f"subjectAltName={alternatives}\n" if alternatives else "")
    )
    run("openssl", "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-keyout", key(name), "-subj", subject, "-out", request)  # fmt: skip
    run("openssl", "x509", "-req", "-in", request, "-CA", crt("ca"), "-CAkey", key("ca"), "-CAcreateserial",
        "-days", DAYS, "-extfile", extensions, "-out", crt(name))  # fmt: skip


def write_kubeconfig(name: str, path: Path) -> None:
    def data(file: Path) -> str:
        return base64.b64encode(file.read_bytes()).decode()

    cluster = {
        "server": f"https://127.0.0.1:{API_PORT}",
        "certificate-authority-data": data(crt("ca")),
    }
    user = {"client-certificate-data": data(crt(name)), "client-key-data": data(key(name))}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "sluice", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "sluice", "context": {"cluster": "sluice", "user": name}}],
        "current-context": "sluice",
    }
    path.write_text(json.dumps(config, indent=1))
    path.chmod(0o600)
