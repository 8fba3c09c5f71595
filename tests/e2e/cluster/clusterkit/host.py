"""What the cluster changes on the machine outside of its cache, and how all of that is taken back.

`restore` does not trust any record of what was done: it finds everything by name, so it also cleans up
after a run that was killed, or that another checkout started.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from .common import STATE, run, succeeds
from .pki import API_PORT, NODE_IP

CGROUP = "sluice"
NODE_BRIDGE, POD_BRIDGE = "sluice0", "sluice1"
POD_CIDR = "10.244.0.0/16"
SAVED = STATE / "host-settings.json"

OUR_SYSCTLS = {"net/ipv4/ip_forward": "1", "net/bridge/bridge-nf-call-iptables": "1"}
# kubelet and kube-proxy set these by themselves.
THEIR_SYSCTLS = [
    "net/ipv4/conf/all/route_localnet", "vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic",
    "kernel/panic_on_oops", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
]  # fmt: skip
# Where programs write outside of /var whatever they are told, and the folder that they get to see there.
PRIVATE = {Path("/run/containerd"): STATE / "run-containerd", Path("/run/mount"): STATE / "run-mount"}

FILTER_RULES = f"""*filter
:SLUICE-FORWARD - [0:0]
:SLUICE-INPUT - [0:0]
-A SLUICE-FORWARD -s {POD_CIDR} -j ACCEPT
-A SLUICE-FORWARD -d {POD_CIDR} -j ACCEPT
-A SLUICE-INPUT -s {POD_CIDR} -j ACCEPT
-A SLUICE-INPUT -p tcp --dport {API_PORT} -m addrtype ! --src-type LOCAL -j REJECT
-I FORWARD -j SLUICE-FORWARD
-I INPUT -j SLUICE-INPUT
COMMIT
*nat
:SLUICE-POSTROUTING - [0:0]
-A SLUICE-POSTROUTING -s {POD_CIDR} ! -d {POD_CIDR} -j MASQUERADE
-A POSTROUTING -j SLUICE-POSTROUTING
COMMIT
"""


def sysctl(name: str) -> Path:
    return Path("/proc/sys") / name


def prepare() -> None:
    known = [name for name in [*OUR_SYSCTLS, *THEIR_SYSCTLS] if sysctl(name).exists()]
    before = {name: sysctl(name).read_text().strip() for name in known}
    made = [str(path) for path in PRIVATE if not path.exists()]
    SAVED.write_text(json.dumps({"sysctls": before, "made": made}, indent=1))
    for path in made:
        Path(path).mkdir()
    for name, value in OUR_SYSCTLS.items():
        if sysctl(name).exists():
            sysctl(name).write_text(value)
    for controller in cgroup_roots():
        (controller / CGROUP).mkdir(exist_ok=True)
    run("ip", "link", "add", NODE_BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{NODE_IP}/32", "dev", NODE_BRIDGE)
    run("ip", "link", "set", NODE_BRIDGE, "up")
    run("iptables-restore", "--noflush", input=FILTER_RULES)


def restore() -> None:
    """Only to be called when no process of the cluster runs any more."""
    for bridge in (NODE_BRIDGE, POD_BRIDGE):
        # A pod's network namespace may outlive its processes for a while, and with it the pod's link.
        for link in Path("/sys/class/net", bridge).glob("brif/*"):
            run("ip", "link", "delete", link.name)
        if Path("/sys/class/net", bridge).exists():
            run("ip", "link", "delete", bridge)
    for family in ("iptables", "ip6tables"):
        remove_chains(family)
    for controller in cgroup_roots():
        for folder, _, _ in os.walk(controller / CGROUP, topdown=False):
            Path(folder).rmdir()
    if SAVED.exists():
        saved = json.loads(SAVED.read_text())
        for name, value in saved["sysctls"].items():
            sysctl(name).write_text(value)
        for path in map(Path, saved["made"]):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        SAVED.unlink()


def cgroup_roots() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root]
    return [path for path in root.iterdir() if path.is_dir() and (path / "cgroup.procs").exists()]


def remove_chains(family: str) -> None:
    """Removes our chains, those of kube-proxy and kubelet, and the rules that lead into them."""
    if not succeeds(f"{family}-save"):
        return
    for table in ("nat", "filter", "mangle"):
        saved = run(f"{family}-save", "-t", table).splitlines()
        chains = [line.split()[0][1:] for line in saved if line.startswith((":KUBE-", ":SLUICE-"))]
        rules = [line for line in saved if line.startswith("-A ") and line.split()[1] not in chains]
        leading = [rule for rule in rules if set(rule.split()) & set(chains)]
        if chains:
            script = [f"*{table}", *(rule.replace("-A", "-D", 1) for rule in leading)]
            script += [f"-F {chain}" for chain in chains] + [f"-X {chain}" for chain in chains]
            run(f"{family}-restore", "--noflush", input="\n".join([*script, "COMMIT", ""]))
