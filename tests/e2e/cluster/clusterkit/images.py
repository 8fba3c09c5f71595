"""Builds the images of images/*/Dockerfile with buildah and puts them into the cluster's containerd.

The runtime's dependencies are 5 GB, so nothing large is moved twice: skopeo writes an OCI layout whose
folder of blobs already holds (as hard links) all that containerd has, and only the new blobs are imported.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from .common import BIN, CACHE, REPO, STATE, SYSROOT, digest, fail, linker_cache, locked, run, step, tool_env

PREFIX = "sluice.dev"
NAMES = ("operator", "gateway", "runtime")
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
SUITE = "bookworm"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
BLOBS = CACHE / "containerd/io.containerd.content.v1.content/blobs/sha256"
WORK = CACHE / "tmp"


def tag_of(name: str) -> str:
    """Changes with the Dockerfile and all that it copies."""
    dockerfile = REPO / "images" / name / "Dockerfile"
    copied = re.findall(r"^COPY (?!--from)(\S+) ", dockerfile.read_text(), re.MULTILINE)
    return digest([dockerfile, *(REPO / path for path in copied)])


def images_env(registry: str = PREFIX) -> dict[str, str]:
    """Writes the names under which the cluster has the images, for whoever deploys them."""
    env = {f"{name.upper()}_IMAGE": f"{registry}/{name}:{tag_of(name)}" for name in NAMES}
    STATE.mkdir(parents=True, exist_ok=True)
    (STATE / "images.env").write_text("".join(f"{key}={value}\n" for key, value in env.items()))
    return env


# -- building, with buildah


def contained(program: str, *arguments: str | Path, log: str = "") -> str:
    """Runs buildah or skopeo with all state below the cache; what they can't be told is mounted privately."""
    config = CACHE / "buildah"
    WORK.joinpath("buildah-cache").mkdir(parents=True, exist_ok=True)
    config.mkdir(parents=True, exist_ok=True)
    (CACHE / "uv-cache").mkdir(exist_ok=True)
    uv_cache = WORK / "buildah-cache/uv"
    if not uv_cache.is_symlink():
        uv_cache.symlink_to(CACHE / "uv-cache")
    (config / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{config}/storage"\nrunroot = "{config}/run"\n'
    )
    (config / "registries.conf").write_text("")
    # Else it makes /etc/cni/net.d, though it builds without a network of its own.
    (config / "containers.conf").write_text(f'[network]\nnetwork_config_dir = "{config}/cni"\n')
    (config / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    env = tool_env() | {
        "BUILDAH_ISOLATION": "chroot",
        "CONTAINERS_STORAGE_CONF": f"{config}/storage.conf",
        "CONTAINERS_REGISTRIES_CONF": f"{config}/registries.conf",
        "CONTAINERS_CONF": f"{config}/containers.conf",
        "TMPDIR": str(WORK),
    }
    (config / "var-lib").mkdir(exist_ok=True)
    mounts = f"mount -nB {linker_cache()} /etc/ld.so.cache && mount -nB {config}/var-lib /var/lib"
    enter = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    return run(*enter, SYSROOT / "usr/bin" / program, *arguments, env=env, log=log)


def buildah_build(*arguments: str | Path, log: str = "") -> None:
    policy = CACHE / "buildah/policy.json"
    contained("buildah", "bud", "--signature-policy", policy, "--layers", "--pull-never", *arguments, log=log)


def buildah_has(image: str) -> bool:
    return image in contained("buildah", "images", "--format", "{{.Name}}:{{.Tag}}").split()


def base_image() -> str:
    """A Debian with Python that stands for the Dockerfiles' default base, which can't be had everywhere."""
    image = f"localhost/sluice-base:{digest([], SUITE, BASE_PACKAGES, platform.machine(), '1')}"
    if not buildah_has(image):
        root = WORK / "base"
        shutil.rmtree(root, ignore_errors=True)
        with step("making a base image with debootstrap (about a minute, once)"):
            what = [f"--include={BASE_PACKAGES}", SUITE, str(root), *debian_mirror()]
            run("debootstrap", "--variant=minbase", *what, log="debootstrap.log")
            for junk in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
                shutil.rmtree(root / junk, ignore_errors=True)
            (WORK / "Dockerfile.base").write_text('FROM scratch\nCOPY . /\nCMD ["python3"]\n')
            buildah_build("-f", WORK / "Dockerfile.base", "-t", image, root)
            shutil.rmtree(root)
    return image


def debian_mirror() -> list[str]:
    """The one that this machine's apt uses; without any, debootstrap has its own default."""
    targets = run("apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages")
    return [line.split()[1] for line in targets.splitlines() if line.startswith(f"{SUITE} ")][:1]


def build(name: str, image: str) -> None:
    dockerfile = REPO / "images" / name / "Dockerfile"
    options: list[str | Path] = ["--build-arg", f"BASE={base_image()}"]
    options += ["--ignorefile", f"{dockerfile}.dockerignore", "-f", dockerfile, "-t", image]
    if CERTIFICATES.exists():
        options += ["-v", f"{CERTIFICATES}:{CERTIFICATES}:ro"]
    buildah_build(*options, REPO, log=f"image-{name}.log")


def build_from_program(name: str, image: str) -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    (WORK / "Dockerfile.program").write_text(f'FROM scratch\nCOPY {name} /{name}\nENTRYPOINT ["/{name}"]\n')
    buildah_build("-f", WORK / "Dockerfile.program", "-t", image, BIN.resolve())


# -- into containerd


class Containerd:
    """The image store of our own node. `enter` is the command that runs a program on it."""

    def __init__(self, enter: list[str]) -> None:
        self.ctr = [*enter, str(SYSROOT / "usr/bin/ctr"), "-n", "k8s.io"]

    def images(self) -> list[str]:
        return run(*self.ctr, "images", "ls", "-q").split()

    def digests(self) -> dict[str, str]:
        rows = run(*self.ctr, "images", "ls").splitlines()[1:]
        return {row.split()[0]: row.split()[2] for row in rows}

    def images_in_use(self) -> set[str]:
        rows = run(*self.ctr, "containers", "ls").splitlines()[1:]
        return {row.split()[1] for row in rows}

    def remove(self, image: str) -> None:
        run(*self.ctr, "images", "rm", image)

    def tag(self, image: str, alias: str) -> None:
        run(*self.ctr, "images", "tag", "--force", image, alias)

    def load(self, archive: Path) -> None:
        run(*self.ctr, "images", "import", archive.absolute())

    def copy_from_buildah(self, local: str, image: str) -> None:
        layout = WORK / "layout"
        shutil.rmtree(layout, ignore_errors=True)
        blobs = layout / "blobs/sha256"
        blobs.mkdir(parents=True)
        present = set()
        for blob in BLOBS.iterdir() if BLOBS.exists() else ():
            os.link(blob, blobs / blob.name)
            present.add(blob.name)
        # `buildah push` would compress, which takes minutes and hides from it that the blobs are there.
        contained("skopeo", "--policy", CACHE / "buildah/policy.json", "copy", "--quiet",
                  "--dest-oci-accept-uncompressed-layers", f"containers-storage:{local}",
                  f"oci:{layout}:latest")  # fmt: skip
        index = json.loads((layout / "index.json").read_text())
        for manifest in index["manifests"]:
            manifest["annotations"] = {"io.containerd.image.name": image}
        (layout / "index.json").write_text(json.dumps(index))
        command = [*self.ctr, "images", "import", "-"]
        importing = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=tool_env()
        )
        assert importing.stdin
        with tarfile.open(fileobj=importing.stdin, mode="w|", bufsize=1 << 20) as archive:
            for name in ("oci-layout", "index.json"):
                archive.add(layout / name, name)
            for blob in blobs.iterdir():
                if blob.name not in present or blob.name in image_heads(layout):
                    archive.add(blob, f"blobs/sha256/{blob.name}")
        importing.stdin.close()
        if importing.wait():
            fail(f"containerd refused {image}")
        shutil.rmtree(layout)


def image_heads(layout: Path) -> set[str]:
    """The manifests: containerd wants to read them in the archive even when it has them."""
    index = json.loads((layout / "index.json").read_text())
    return {entry["digest"].split(":")[1] for entry in index["manifests"]}


def load_program(store: Containerd, name: str, key: str) -> str:
    """The image of one of our static programs, built and loaded if need be; returns its name."""
    image = f"{PREFIX}/{name}:{key}"
    if image not in store.images():
        local = f"localhost/sluice-{name}:{key}"
        build_from_program(name, local)
        store.copy_from_buildah(local, image)
    return image


def load_all(store: Containerd) -> None:
    """Builds and loads what has changed."""
    with locked("images"):
        env = images_env()
        for name in NAMES:
            image = env[f"{name.upper()}_IMAGE"]
            if image not in store.images():
                slow = " (about 5 minutes where its dependencies have changed)" if name == "runtime" else ""
                local = f"localhost/sluice-{name}:{image.partition(':')[2]}"
                with step(f"building image {name}{slow}"):
                    build(name, local)
                with step(f"loading image {name}"):
                    store.copy_from_buildah(local, image)
            store.tag(image, f"{PREFIX}/{name}:dev")
            print(image)
        prune(store, set(env.values()))


def prune(store: Containerd, current: set[str]) -> None:
    """Removes what earlier code was built into, unless a container still runs from it."""
    digests = store.digests()
    # Kubernetes' plugin names each image once more, by the digest of its configuration.
    ours = ("sha256:", *(f"{PREFIX}/{name}:" for name in NAMES))
    used = current | store.images_in_use()
    keep = {digest_ for image, digest_ in digests.items() if image in used or not image.startswith(ours)}
    for image, digest_ in digests.items():
        if digest_ not in keep and image.startswith(ours):
            store.remove(image)
    built = {image.replace(f"{PREFIX}/", "localhost/sluice-") for image in current}
    for image in contained("buildah", "images", "--format", "{{.Name}}:{{.Tag}}").split():
        if image not in built and image.startswith(tuple(f"localhost/sluice-{name}:" for name in NAMES)):
            contained("buildah", "rmi", image)
