"""What the two ports of a pod share: engine, configurations, evidence, secrets. Exists so that neither port

owns the other.

Invariant: belongs to the event loop. `engine` is None until the model is loaded and warm, and never
replaced afterwards.
"""

from __future__ import annotations

import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sluice_runtime.access import AccessStore
from sluice_runtime.backend import digest
from sluice_runtime.contract import Contract
from sluice_runtime.engine.types import EngineLoad, EngineRequest, Grammar, OutputChunk
from sluice_runtime.evidence import EvidenceLog, Running
from sluice_runtime.limits import LimitStore
from sluice_runtime.metrics import Metrics
from sluice_runtime.podconfig import ConfigStore, HeldConfig, PodConfig
from sluice_runtime.turns import Turns
from sluice_runtime.verifier import Verifiers
from sluice_runtime.withdrawn import NOTHING, Withdrawn


class TokenizerPort(Protocol):
    """What the server needs of a tokenizer."""

    @property
    def chat_template(self) -> str | None: ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]: ...

    def encode_text(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class EnginePort(Protocol):
    """What the server needs of an engine; `engine.Engine` and the stand-in's fit."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def tokenizer(self) -> TokenizerPort: ...

    def submit(self, request: EngineRequest) -> AsyncIterator[OutputChunk]: ...

    def compile_grammar(self, grammar: str) -> Grammar | None: ...

    def cancel(self, request_id: str) -> None: ...

    def stop(self) -> None: ...

    def load(self) -> EngineLoad: ...

    def healthy(self) -> bool: ...


@dataclass(frozen=True)
class Identity:
    """What was really loaded: each part is a digest of its own."""

    model: str
    settings: str
    runtime: str

    @property
    def digest(self) -> str:
        return digest([self.model, self.settings, self.runtime])

    def body(self) -> dict[str, Any]:
        parts = {"model": self.model, "settings": self.settings, "runtime": self.runtime}
        return {"digest": self.digest, "parts": parts}


class SecretFile:
    """A secret that stands in a file and may be rotated there: looked at again at most once a second."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, or ValueError if the file is empty."""
        self._path = path
        self._value = self._read()
        self._read_at = time.monotonic()

    def _read(self) -> bytes:
        value = self._path.read_bytes().strip()
        if not value:
            raise ValueError(f"{self._path} is empty")
        return value

    def current(self) -> bytes:
        """The secret as it stands in the file now, give or take a second."""
        if time.monotonic() - self._read_at > 1:
            self._read_at = time.monotonic()
            # In the middle of a rotation the last value stays good.
            with contextlib.suppress(OSError, ValueError):
                self._value = self._read()
        return self._value

    def equals(self, candidate: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(candidate.encode("utf-8", "replace"), self.current())


@dataclass(frozen=True)
class Settings:
    """How a server treats its clients. `credential` None is for local use only."""

    name: str
    credential: SecretFile | None
    admin_token: SecretFile | None
    body_limit: int = 8 * 1024 * 1024
    slow_reader_s: float = 30.0


@dataclass
class Runtime:
    """One pod."""

    settings: Settings
    evidence: EvidenceLog = field(default_factory=EvidenceLog)
    configs: ConfigStore = field(default_factory=ConfigStore)
    limits: LimitStore = field(default_factory=LimitStore)
    access: AccessStore = field(default_factory=AccessStore)
    running: dict[str, Running] = field(default_factory=dict)
    withdrawn: Withdrawn = NOTHING
    verifiers: Verifiers = field(default_factory=Verifiers)
    # One thread: tokenizers hold settings that concurrent calls would change under each other.
    tokenizing: Turns = field(default_factory=lambda: Turns(1, "tokenize"))
    compiling: Turns = field(default_factory=lambda: Turns(2, "form"))
    engine: EnginePort | None = None
    identity: Identity | None = None
    draining: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    metrics: Metrics = field(init=False)
    local: HeldConfig = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(lambda: None if self.engine is None else self.engine.load())
        self.local = _local_config(self.settings.name)

    def become_ready(self, engine: EnginePort, identity: Identity) -> None:
        self.identity = identity
        self.engine = engine

    @property
    def healthy(self) -> bool:
        """While the model is loaded there is no loop to ask, and a restart would not help."""
        return self.engine is None or self.engine.healthy()

    @property
    def ready(self) -> bool:
        return self.engine is not None and not self.draining and self.engine.healthy()

    def withdraw(self, withdrawn: Withdrawn) -> None:
        """Cut what it covers; what comes later is refused."""
        self.withdrawn = withdrawn
        for running in self.running.values():
            if withdrawn.covers(running.caller):
                running.cut.set()

    def num_in_flight(self, tenant: str) -> int:
        """A tenant's requests that have not ended; copies that nobody waits for don't count."""
        callers = (running.caller for running in self.running.values())
        return sum(1 for c in callers if c.tenant == tenant and not c.mirror)

    def hello(self) -> dict[str, Any]:
        assert self.identity is not None
        return {
            "versions": self.configs.versions,
            "limits": self.limits.version,
            "access": self.access.version,
            "identity": self.identity.digest,
        }

    def heartbeat(self) -> dict[str, Any]:
        load = self.engine.load() if self.engine is not None else None
        now = time.monotonic()
        return {
            "versions": self.configs.versions,
            "limits": self.limits.version,
            "access": self.access.version,
            "load": {
                "num_running": load.num_running if load else 0,
                "num_waiting": load.num_waiting if load else 0,
                "kv_used": load.kv_blocks_used if load else 0,
                "kv_total": load.kv_blocks_total if load else 0,
            },
            "running": [
                r.body(now) for r in list(self.running.values()) if r.caller.routed and not r.caller.pair
            ],
        }


def _local_config(name: str) -> HeldConfig:
    """What a request without a gateway is served under: no contract, the cache shared by all (there is one
    user).
    """
    spec = PodConfig.model_validate(
        {
            "version": "local",
            "policy": "",
            "rule": "",
            "model": name,
            "contract": [],
            "features": {"prefixCache": True},
            "switches": [],
            "scope": {"name": "local", "isolation": "Public", "epoch": 0, "versions": {}},
            "sampling": {},
            "caps": {},
        }
    )
    return HeldConfig(spec, Contract([]))
