"""The cluster that is built here: bringing it up, taking it down, getting images into it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

from . import build, host, images, pki
from .common import (
    BIN,
    CACHE,
    CODE,
    KUBECONFIG,
    LOGS,
    PREPARED,
    STATE,
    SYSROOT,
    fail,
    locked,
    run,
    step,
    succeeds,
    tool_env,
    wait_until,
)

MARK = "clusterkit.node"
PID_FILE = STATE / "node.pid"
# Written once the cluster has come up in full: with the key of the binaries that it runs.
VERSION_FILE = STATE / "running"
DNS_IP = "10.96.0.10"
GPUS = "2"


def up() -> None:
    if os.geteuid() != 0:
        fail("the cluster needs root (or Docker and kind)")
    if any(CACHE.is_relative_to(path) for path in ("/var/lib", "/var/log", "/run")):
        fail(f"{CACHE}: the node has its own /var/lib, /var/log and /run; set SLUICE_CACHE to somewhere else")
    if other := other_node():
        fail(f"another cluster runs on this machine: SLUICE_CACHE={other} {CODE}/cluster down")
    with locked("cluster"):
        key = build.build()
        if node_pid() and VERSION_FILE.exists() and VERSION_FILE.read_text() == key and gets_ready():
            print(f"the cluster is up: {KUBECONFIG}")
            return
        stop()
        started = time.monotonic()
        with step("starting Kubernetes"):
            write_config(key)
            host.prepare()
            start_node()
            wait_until("the start of containerd", lambda: PREPARED.exists() and in_node_ok("ctr", "version"))
            store = image_store()
            images.load_program(store, "pause", key)
            dns_image = images.load_program(store, "coredns", key)
            wait_until("the start of the API", lambda: kubectl_or_none("get", "serviceaccount", "default"))
            apply_dns(dns_image)
            patch = json.dumps({"status": {"capacity": {"nvidia.com/gpu": GPUS}}})
            wait_until("the node's registration", lambda: kubectl_or_none("get", "node", pki.NODE))
            kubectl("patch", "node", pki.NODE, "--subresource=status", "--type=merge", "-p", patch)
            wait_until("readiness of node and DNS", is_ready)
            VERSION_FILE.write_text(key)
        print(f"the cluster is up ({time.monotonic() - started:.0f} s): export KUBECONFIG={KUBECONFIG}")


def down() -> None:
    with locked("cluster"):
        stop()


def stop() -> None:
    if pid := node_pid():
        with step("stopping Kubernetes"):
            inner = child_of(pid)
            for victim in (inner, pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            wait_until("the end of the node's processes", lambda: not node_pid() and not alive(inner))
    PID_FILE.unlink(missing_ok=True)
    VERSION_FILE.unlink(missing_ok=True)
    # What is found by name may be in use by a cluster of another cache.
    if SYSROOT.exists() and not other_node():
        host.restore()


def clean(with_cache: bool) -> None:
    down()
    shutil.rmtree(STATE, ignore_errors=True)
    for name in ("containerd", "buildah", "tmp"):
        shutil.rmtree(CACHE / name, ignore_errors=True)
    if with_cache:
        shutil.rmtree(CACHE)


def status() -> None:
    pid = node_pid()
    print(f"node process: {pid or 'none'}")
    if pid:
        print(kubectl("get", "nodes,pods", "-A", "-o", "wide"), end="")
    sys.exit(0 if pid and is_ready() else 1)


def gets_ready() -> bool:
    """A cluster in use may be slow to answer; it is not to be replaced for that."""
    deadline = time.monotonic() + 60
    while not is_ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(1)
    return True


def is_ready() -> bool:
    node = kubectl_or_none(
        "get", "node", pki.NODE, "-o", 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
    )
    dns = kubectl_or_none(
        "-n", "kube-system", "get", "deployment", "coredns", "-o", "jsonpath={.status.readyReplicas}"
    )
    return node == "True" and dns == "1"


# -- the node's process


def start_node() -> None:
    (STATE / "var-lib").mkdir(exist_ok=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--propagation", "slave",
               "--kill-child=KILL", sys.executable, "-m", MARK, str(CACHE)]  # fmt: skip
    PREPARED.unlink(missing_ok=True)
    for log in LOGS.glob("kube*.log"):
        log.unlink()
    with (LOGS / "node.log").open("wb") as log_file:
        process = subprocess.Popen(
            command, cwd=CODE, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file,
            env=os.environ | {"SLUICE_CACHE": str(CACHE), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
    PID_FILE.write_text(str(process.pid))


def node_pid() -> int:
    """The process that holds the node, or 0. The command line is compared: process ids are used again."""
    if not PID_FILE.exists():
        return 0
    pid = int(PID_FILE.read_text() or 0)
    return pid if alive(pid) and command_line(pid)[-2:] == [MARK, str(CACHE)] else 0


def other_node() -> str:
    for folder in Path("/proc").glob("[0-9]*"):
        words = command_line(int(folder.name))
        if words[:1] == ["unshare"] and MARK in words and words[-1] != str(CACHE):
            return words[-1]
    return ""


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False


def command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    return []


def child_of(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return 0


def in_node(*command: str) -> list[str]:
    """The command that runs `command` where the node's processes run."""
    inner = child_of(node_pid())
    if not inner:
        fail("the cluster is not up")
    return ["nsenter", "-t", str(inner), "--mount", "--pid", *command]


def in_node_ok(*command: str) -> bool:
    return bool(child_of(node_pid())) and succeeds(*in_node(*command))


def image_store() -> images.Containerd:
    return images.Containerd(in_node())


def kubectl(*arguments: str, **options: str) -> str:
    return run(BIN / "kubectl", *arguments, **options)


def kubectl_or_none(*arguments: str) -> str | None:
    command = [str(BIN / "kubectl"), "--request-timeout=5s", *arguments]
    done = subprocess.run(
        command, env=tool_env(), text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return done.stdout if done.returncode == 0 else None


# -- configuration


def write_config(key: str) -> None:
    pki.make()
    (STATE / "config/cni").mkdir(parents=True, exist_ok=True)
    servers = [
        line.split()[1]
        for line in Path("/etc/resolv.conf").read_text().splitlines()
        if line.startswith("nameserver ") and not line.split()[1].startswith("127.")
    ]
    resolv = "".join(f"nameserver {server}\n" for server in servers)
    (STATE / "config/resolv.conf").write_text(resolv)
    values = {
        "STATE": STATE, "SYSROOT": SYSROOT, "NODE": pki.NODE, "NODE_IP": pki.NODE_IP, "CGROUP": host.CGROUP,
        "POD_BRIDGE": host.POD_BRIDGE, "POD_CIDR": host.POD_CIDR, "DNS_IP": DNS_IP,
        "PAUSE_IMAGE": f"{images.PREFIX}/pause:{key}",
        "FORWARD": f"forward . {' '.join(servers)}" if servers else "",
    }  # fmt: skip
    for source in (CODE / "config").iterdir():
        target = STATE / "config" / ("cni/sluice.conflist" if source.suffix == ".conflist" else source.name)
        target.write_text(string.Template(source.read_text()).safe_substitute(values))


def apply_dns(image: str) -> None:
    manifest = string.Template((STATE / "config/dns.yaml").read_text()).substitute(DNS_IMAGE=image)
    kubectl("apply", "-f", "-", input=manifest)


class Own:
    kubeconfig = KUBECONFIG

    def build(self) -> None:
        build.build()

    def up(self) -> None:
        up()

    def down(self) -> None:
        down()

    def status(self) -> None:
        status()

    def load(self, archive: Path) -> None:
        image_store().load(archive)

    def images(self) -> None:
        if not node_pid():
            up()
        images.load_all(image_store())
