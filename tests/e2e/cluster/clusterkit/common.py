"""Where things are, how commands are run, and how a long step shows that it is alive.

Everything that the cluster makes lies below CACHE. Only the Python standard library is used, so that
the cluster can come up before any virtual environment exists.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

CODE = Path(__file__).resolve().parents[1]
REPO = CODE.parents[2]
CACHE = Path(os.environ.get("SLUICE_CACHE") or Path.home() / ".cache" / "sluice").absolute()
STATE = CACHE / "cluster"
# The node has dropped what an earlier run left in containerd, which it may have started twice for that.
PREPARED = STATE / "prepared"
LOGS = STATE / "log"
BIN = CACHE / "bin" / "current"
SYSROOT = CACHE / "sysroot"
KUBECONFIG = STATE / "kubeconfig"


def fail(message: str) -> NoReturn:
    sys.exit(f"cluster: {message}")


def tool_env() -> dict[str, str]:
    """The environment in which the programs below SYSROOT and BIN find each other and their libraries."""
    libraries = [str(path) for path in sorted((SYSROOT / "usr" / "lib").glob("*-linux-gnu*"))]
    programs = [SYSROOT / "usr/sbin", SYSROOT / "usr/bin", SYSROOT / "sbin", BIN]
    path = [*map(str, programs), os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/bin", "/bin"]
    return os.environ | {
        "PATH": ":".join(path),
        "LD_LIBRARY_PATH": ":".join(libraries),
        "XTABLES_LIBDIR": f"{libraries[0]}/xtables" if libraries else "",
        "XTABLES_LOCKFILE": str(CACHE / ".xtables.lock"),
        "DEBOOTSTRAP_DIR": str(SYSROOT / "usr/share/debootstrap"),
        "KUBECONFIG": str(KUBECONFIG),
    }


def linker_cache() -> Path:
    """To be mounted over the machine's: runc and buildah start themselves anew without LD_LIBRARY_PATH."""
    config, cache = CACHE / "ld.so.conf", CACHE / "ld.so.cache"
    folders = [str(path) for path in sorted((SYSROOT / "usr/lib").glob("*-linux-gnu*"))]
    config.write_text("\n".join(["include /etc/ld.so.conf", *folders, ""]))
    run("ldconfig", "-X", "-f", config, "-C", cache)
    return cache


def run(*command: str | Path, log: str = "", **options: object) -> str:
    """Runs a command and returns what it printed. Its failure ends the program with its last lines."""
    words = [str(word) for word in command]
    env = options.pop("env", None) or tool_env()
    done = subprocess.run(  # type: ignore[call-overload]
        words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
    )
    if log:
        LOGS.mkdir(parents=True, exist_ok=True)
        (LOGS / log).write_text(done.stdout)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-25:])
        fail(f"`{' '.join(words[:6])} …` ended with {done.returncode}:\n{tail}")
    return str(done.stdout)


def succeeds(*command: str | Path) -> bool:
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, env=tool_env(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    started, ended = time.monotonic(), threading.Event()

    def tick() -> None:
        while not ended.wait(20):
            print(f"   … {title}: {time.monotonic() - started:.0f} s", flush=True)

    print(f"-- {title}", flush=True)
    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        ended.set()
        ticker.join()
    print(f"   done in {time.monotonic() - started:.1f} s", flush=True)


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Two checkouts share one cache: whoever comes second waits, and then finds the work done."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def digest(paths: Iterable[Path], *words: str) -> str:
    """Twelve digits that change with the content of the files (folders: all files in them) and the words."""
    sum_ = hashlib.sha256("\0".join(words).encode())
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                sum_.update(f"\0{file.relative_to(REPO)}\0".encode() + file.read_bytes())
    return sum_.hexdigest()[:12]


def wait_until(what: str, ready: object, seconds: float = 300) -> None:
    """Polls the callable `ready` until it is true."""
    assert callable(ready)
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            fail(f"{what} did not happen within {seconds:.0f} s; see the logs in {LOGS}")
        time.sleep(0.2)
