"""Brings the programs: Debian's containerd, runc and buildah unpacked into the cache instead of installed
into the system, and Kubernetes, CoreDNS, Helm and the pause program built from their Go modules.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from .common import BIN, CACHE, CODE, SYSROOT, digest, fail, locked, run, step, succeeds

# With the libraries that they need and a small system may lack.
DEBIAN_PACKAGES = [
    "containerd", "runc", "containernetworking-plugins", "libseccomp2",
    "iptables", "libip4tc2", "libip6tc2", "libxtables12", "libnftnl11", "libmnl0",
    "libnfnetlink0", "libnetfilter-conntrack3",
    "buildah", "skopeo", "libgpgme11", "libassuan0", "libgpg-error0", "libdevmapper1.02.1",
    "debootstrap",
]  # fmt: skip
KUBERNETES_PROGRAMS = [
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl",
]  # fmt: skip


def build() -> str:
    """Makes what is missing; returns the key of the binaries."""
    with locked("build"):
        fetch_sysroot()
        return build_binaries()


def fetch_sysroot() -> None:
    key, stamp = digest([], *DEBIAN_PACKAGES), SYSROOT / ".complete"
    if stamp.exists() and stamp.read_text() == key:
        return
    if not shutil.which("apt-get"):
        fail("no apt-get here: use Docker and kind, or a machine with Debian")
    apt = CACHE / "apt"
    for folder in (apt / "lists/partial", apt / "archives/partial", apt / "debs"):
        folder.mkdir(parents=True, exist_ok=True)
    options = ["-q", "-o", f"Dir::State::Lists={apt}/lists", "-o", f"Dir::Cache={apt}"]
    options += ["-o", "APT::Sandbox::User=root"]
    with step("fetching containerd, runc, buildah and iptables from Debian"):
        run("apt-get", *options, "update", env=dict(os.environ))
        run("apt-get", *options, "download", *DEBIAN_PACKAGES, cwd=apt / "debs", env=dict(os.environ))
        fresh = SYSROOT.with_name("sysroot.new")
        shutil.rmtree(fresh, ignore_errors=True)
        for package in (apt / "debs").glob("*.deb"):
            run("dpkg", "-x", package, fresh)
        shutil.rmtree(SYSROOT, ignore_errors=True)
        fresh.rename(SYSROOT)
        choose_iptables()
        shutil.rmtree(apt)
    stamp.write_text(key)


def choose_iptables() -> None:
    """Debian picks a variant when the package is installed. The legacy one leaves no empty tables behind."""
    folder = SYSROOT / "usr/sbin"
    variant = "legacy" if succeeds(folder / "iptables-legacy", "-t", "nat", "-S") else "nft"
    for family in ("iptables", "ip6tables"):
        for end in ("", "-save", "-restore"):
            link = folder / f"{family}{end}"
            link.unlink(missing_ok=True)
            link.symlink_to(f"xtables-{variant}-multi")


def module_version(module: str, name: str) -> str:
    found = re.search(rf"{re.escape(name)} (v\S+)", (CODE / module / "go.mod").read_text())
    assert found, f"{name} is not in {module}/go.mod"
    return found[1]


def build_binaries() -> str:
    key = digest([CODE / "hyper", CODE / "tools"], "1")
    folder = CACHE / "bin" / key
    if not (folder / ".complete").exists():
        if not shutil.which("go"):
            fail("Go is needed to build Kubernetes: install Go 1.26 or later")
        folder.mkdir(parents=True, exist_ok=True)
        kubernetes = module_version("hyper", "k8s.io/kubernetes")
        helm = module_version("tools", "helm.sh/helm/v3")
        major, minor, _ = kubernetes.lstrip("v").split(".")
        version = "k8s.io/component-base/version"
        with step(f"building Kubernetes {kubernetes} (about 12 minutes on 2 cores, once)"):
            flags = f"-X {version}.gitVersion={kubernetes} -X {version}.gitMajor={major}"
            go_build("hyper", folder / "hyper", ".", f"{flags} -X {version}.gitMinor={minor}")
        for program in KUBERNETES_PROGRAMS:
            (folder / program).unlink(missing_ok=True)
            (folder / program).symlink_to("hyper")
        with step(f"building Helm {helm}, CoreDNS and the pause program (about 4 minutes, once)"):
            flags = f"-X helm.sh/helm/v3/internal/version.version={helm}"
            go_build("tools", folder / "helm", "helm.sh/helm/v3/cmd/helm", flags)
            go_build("tools", folder / "coredns", "./coredns")
            go_build("tools", folder / "pause", "./pause")
        (folder / ".complete").touch()
    fresh = BIN.with_name(f".current-{os.getpid()}")
    fresh.symlink_to(key)
    fresh.replace(BIN)
    return key


def go_build(module: str, target: Path, package: str, flags: str = "") -> None:
    go = CACHE / "go"
    env = dict(os.environ) | {
        "GOPATH": str(go), "GOMODCACHE": str(go / "mod"), "GOCACHE": str(go / "build"),
        "GOTELEMETRY": "off", "GOFLAGS": "-mod=readonly -buildvcs=false -modcacherw", "CGO_ENABLED": "0",
    }  # fmt: skip
    options = ["-trimpath", "-ldflags", f"-s -w {flags}", "-o", str(target)]
    command = ["nice", "-n", "5", "go", "build", *options, package]
    run(*command, cwd=CODE / module, env=env, log=f"build-{target.name}.log")


def host_program(name: str) -> None:
    """Where the cluster is not ours, the machine's own program is put where ours would be."""
    found = shutil.which(name)
    if not found:
        fail(f"{name} is needed to use a cluster that is not built here")
    BIN.mkdir(parents=True, exist_ok=True)
    if not (BIN / name).exists():
        (BIN / name).symlink_to(found)
