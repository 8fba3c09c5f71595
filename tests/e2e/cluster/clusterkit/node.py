"""The first process of the node, in a process and a mount namespace of its own.

The namespaces are what makes starting and stopping dependable: when this process dies, however it dies, the
kernel ends every process of the cluster (pods too) and drops every mount. Within, /var/lib and /var/log
are folders of the cache, so all programs run with their default paths and write nothing to the machine.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path

from .common import BIN, CACHE, LOGS, PREPARED, STATE, SYSROOT, linker_cache, tool_env
from .host import PRIVATE
from .pki import API_PORT, NODE, NODE_IP, PKI

ETCD = "http://127.0.0.1:12379"

COMMANDS: dict[str, list[str]] = {
    "etcd": [
        f"{BIN}/etcd", "--data-dir=/var/lib/etcd", f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        "--listen-peer-urls=http://127.0.0.1:12380",
        "--unsafe-no-fsync", "--log-level=warn",
    ],
    "containerd": [f"{SYSROOT}/usr/bin/containerd", "--config", f"{STATE}/config/containerd.toml"],
    "kube-apiserver": [
        f"{BIN}/kube-apiserver", f"--etcd-servers={ETCD}", f"--secure-port={API_PORT}",
        f"--advertise-address={NODE_IP}", "--service-cluster-ip-range=10.96.0.0/16",
        f"--tls-cert-file={PKI}/apiserver.crt", f"--tls-private-key-file={PKI}/apiserver.key",
        f"--client-ca-file={PKI}/ca.crt", "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={PKI}/service-account.pub",
        f"--service-account-signing-key-file={PKI}/service-account.key",
        f"--kubelet-client-certificate={PKI}/kubelet-client.crt",
        f"--kubelet-client-key={PKI}/kubelet-client.key",
        # Otherwise `kubectl logs` and `exec` look the node's name up in DNS.
        "--kubelet-preferred-address-types=InternalIP",
    ],
    "kube-controller-manager": [
        f"{BIN}/kube-controller-manager", f"--kubeconfig={PKI}/controller-manager.kubeconfig",
        f"--authentication-kubeconfig={PKI}/controller-manager.kubeconfig",
        f"--authorization-kubeconfig={PKI}/controller-manager.kubeconfig",
        "--bind-address=127.0.0.1", "--leader-elect=false", "--use-service-account-credentials=true",
        f"--service-account-private-key-file={PKI}/service-account.key", f"--root-ca-file={PKI}/ca.crt",
        f"--cluster-signing-cert-file={PKI}/ca.crt", f"--cluster-signing-key-file={PKI}/ca.key",
    ],
    "kube-scheduler": [
        f"{BIN}/kube-scheduler", f"--kubeconfig={PKI}/scheduler.kubeconfig",
        f"--authentication-kubeconfig={PKI}/scheduler.kubeconfig",
        f"--authorization-kubeconfig={PKI}/scheduler.kubeconfig",
        "--bind-address=127.0.0.1", "--leader-elect=false",
    ],
    "kubelet": [
        f"{BIN}/kubelet", f"--config={STATE}/config/kubelet.yaml", f"--kubeconfig={PKI}/kubelet.kubeconfig",
        f"--hostname-override={NODE}", f"--node-ip={NODE_IP}", "--node-labels=sluice.dev/test-node=true",
    ],
    "kube-proxy": [f"{BIN}/kube-proxy", f"--config={STATE}/config/kube-proxy.yaml"],
}  # fmt: skip

running: dict[int, str] = {}


def main() -> None:
    lay_out()
    start("etcd")
    start("containerd")
    drop_containers_of_earlier_runs()
    start("kube-apiserver")
    poll(api_is_live, 300)
    for name in ("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"):
        start(name)
    while True:
        pid, status = os.wait()
        if name := running.pop(pid, ""):
            say(f"{name} ended with {os.waitstatus_to_exitcode(status)}: starting it again")
            time.sleep(0.5)
            start(name)


def lay_out() -> None:
    """A fresh cluster each time; only the images are kept."""
    for folder in (STATE / "var-lib", *PRIVATE.values()):
        shutil.rmtree(folder, ignore_errors=True)
    images = CACHE / "containerd"
    folders = [STATE / "var-lib" / name for name in ("etcd", "kubelet", "cni", "containerd")]
    for folder in [images, LOGS, *PRIVATE.values(), *folders]:
        folder.mkdir(parents=True, exist_ok=True)
    for folder in (LOGS / "pods", LOGS / "containers", images / "io.containerd.grpc.v1.cri"):
        shutil.rmtree(folder, ignore_errors=True)
    bind(linker_cache(), Path("/etc/ld.so.cache"))
    bind(images, STATE / "var-lib/containerd")
    for target, source in PRIVATE.items():
        bind(source, target)
    bind(LOGS, Path("/var/log"))
    bind(STATE / "var-lib", Path("/var/lib"))


def bind(source: Path, target: Path) -> None:
    subprocess.run(["mount", "--no-mtab", "--rbind", str(source), str(target)], check=True)


def start(name: str) -> None:
    with (LOGS / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            COMMANDS[name], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env=tool_env(), start_new_session=True,
        )  # fmt: skip
    running[process.pid] = name


def drop_containers_of_earlier_runs() -> None:
    """containerd remembers the containers of a run that was killed; their pods are gone with etcd's data."""
    poll(lambda: ctr("version") is not None, 120)
    if left := (ctr("containers", "ls", "-q") or "").split():
        say(f"dropping {len(left)} containers of an earlier run")
        ctr("containers", "rm", *left)
        # Its Kubernetes plugin has read them into its memory.
        pid = next(pid for pid, name in running.items() if name == "containerd")
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        del running[pid]
        start("containerd")
        poll(lambda: ctr("version") is not None, 120)
    PREPARED.touch()


def ctr(*arguments: str) -> str | None:
    command = [f"{SYSROOT}/usr/bin/ctr", "-n", "k8s.io", *arguments]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, env=tool_env())
    return done.stdout if done.returncode == 0 else None


def api_is_live() -> bool:
    unverified = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(f"https://127.0.0.1:{API_PORT}/livez", context=unverified, timeout=2):
            return True
    except OSError:
        return False


def poll(ready: object, seconds: float) -> None:
    assert callable(ready)
    deadline = time.monotonic() + seconds
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.1)


def say(message: str) -> None:
    print(time.strftime("%H:%M:%S"), message, flush=True)


if __name__ == "__main__":
    main()
