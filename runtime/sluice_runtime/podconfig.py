"""The configurations a pod holds: what the operator sent, compiled once; exists so that no route means rules
we lack.

Invariant: the held set is replaced as a whole; a request keeps the configuration that it started with.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sluice_runtime.contract import Contract, ContractError, Kind

MAX_CONFIGS = 1000
MAX_CHECKS = 32
MAX_SWITCHES = 16

VERIFIER_URL = r"^https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?(/[!-\"$->@-~]*)?$"
"""No user, no query, no fragment: whoever may read a policy would read a credential in it."""

Name = Annotated[str, Field(min_length=1, max_length=512)]
Streaming = Literal["Immediate", "Verified", "Draft"]


class StrictModel(BaseModel):
    """Nothing unknown, nothing converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class VerifierSpec(StrictModel):
    """An HTTP service that says whether an answer may be given."""

    url: Annotated[str, Field(max_length=2048, pattern=VERIFIER_URL)]
    timeout_seconds: Annotated[int, Field(ge=1, le=60, alias="timeoutSeconds")]
    token: Name | None = None
    """Of a token and of authorities in the held AccessSet."""
    authority: Name | None = None

    @model_validator(mode="after")
    def _proven(self) -> VerifierSpec:
        if (self.token or self.authority) and not self.url.startswith("https://"):
            raise ValueError("a token or an authority needs an https url")
        return self


class CheckSpec(StrictModel):
    name: Name
    kind: Kind
    hard: bool
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    pattern: str | None = None
    verifier: VerifierSpec | None = None


class Features(StrictModel):
    prefix_cache: bool = Field(alias="prefixCache")
    speculation: bool = True
    direct_streaming: bool = Field(default=True, alias="directStreaming")


class FeatureChanges(StrictModel):
    """What is absent stays as it is."""

    prefix_cache: bool | None = Field(default=None, alias="prefixCache")
    speculation: bool | None = None
    direct_streaming: bool | None = Field(default=None, alias="directStreaming")


class Switch(StrictModel):
    """Features switched for some requests; an empty list stands for all."""

    tasks: Annotated[list[Name], Field(max_length=32)]
    tenants: Annotated[list[Name], Field(max_length=256)]
    features: FeatureChanges

    def applies_to(self, task: str, tenant: str) -> bool:
        return (not self.tasks or task in self.tasks) and (not self.tenants or tenant in self.tenants)


class Scope(StrictModel):
    name: Annotated[str, Field(max_length=512)]
    isolation: Literal["User", "Tenant", "SecurityDomain", "Public"]
    epoch: int
    versions: dict[str, str]


class SamplingDefaults(StrictModel):
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(default=None, alias="topP")
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(default=None, alias="maxTokens")


class Caps(StrictModel):
    max_input_tokens: Annotated[int, Field(ge=1)] | None = Field(default=None, alias="maxInputTokens")
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(default=None, alias="maxOutputTokens")


class PodConfig(StrictModel):
    """docs/contracts/podconfig.schema.json as a type."""

    version: Name
    policy: Annotated[str, Field(max_length=512)]
    rule: Annotated[str, Field(max_length=512)]
    model: Name
    contract: Annotated[list[CheckSpec], Field(max_length=MAX_CHECKS)]
    streaming: Streaming = "Immediate"
    features: Features
    switches: Annotated[list[Switch], Field(max_length=MAX_SWITCHES)]
    scope: Scope
    sampling: SamplingDefaults
    caps: Caps

    def features_for(self, task: str, tenant: str) -> Features:
        """The features of one request: of each what the last switch says that applies to it, else the arm's
        own."""
        features = self.features
        for switch in self.switches:
            if switch.applies_to(task, tenant):
                features = features.model_copy(update=switch.features.model_dump(exclude_none=True))
        return features


@dataclass(frozen=True)
class HeldConfig:
    """A configuration with its contract compiled."""

    spec: PodConfig
    contract: Contract


@dataclass(frozen=True)
class Rejected:
    """Why one configuration of a set is not held."""

    version: str
    field: str
    message: str

    def body(self) -> dict[str, str]:
        return {"version": self.version, "field": self.field, "message": self.message}


def dotted(loc: Sequence[int | str]) -> str:
    """("contract", 0, "pattern") → `contract[0].pattern`."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _claimed_version(raw: Any) -> str:
    claimed = raw.get("version") if isinstance(raw, Mapping) else None
    return claimed[:512] if isinstance(claimed, str) else ""


def invalid(raw: Any, error: ValidationError, *within: str) -> Rejected:
    """`raw`, which stands under `within`, told by the first field that is wrong and never by its value."""
    first = error.errors(include_url=False, include_input=False)[0]
    why = re.sub(r"^Value error, ", "", first["msg"])
    return Rejected(_claimed_version(raw), dotted((*within, *first["loc"])), why)


def compile_config(raw: Any) -> HeldConfig | Rejected:
    """Validate one configuration and compile its contract."""
    version = _claimed_version(raw)
    try:
        spec = PodConfig.model_validate(raw)
        contract = Contract(spec.contract)
        if spec.streaming != "Immediate" and not contract.can_fail:
            return Rejected(version, "streaming", f"{spec.streaming} needs a hard check to pass or to fail")
        return HeldConfig(spec, contract)
    except ValidationError as e:
        return invalid(raw, e)
    except ContractError as e:
        return Rejected(version, e.field, str(e))


RETAIN_S = 60.0


class ConfigStore:
    """The held set. `held` and `versions` may be read at any time; `replace` swaps them in one step.

    A version that left the set is honoured for another minute, though no longer told of: requests that name
    it may be on their way, and an operator that has just started can't know what the gateway's routes still
    name.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._held: Mapping[str, HeldConfig] = MappingProxyType({})
        self._retained: dict[str, tuple[float, HeldConfig]] = {}
        self._clock = clock
        self._replacing = asyncio.Lock()

    @property
    def versions(self) -> list[str]:
        return sorted(self._held)

    def get(self, version: str) -> HeldConfig | None:
        held = self._held.get(version)
        if held is None and version in self._retained:
            until, config = self._retained[version]
            return config if self._clock() < until else None
        return held

    def named(self) -> set[str]:
        """Tokens and authorities that verifiers of the held configurations need, by name."""
        verifiers = (v for held in self._held.values() for v in held.contract.verifiers.values())
        return {name for v in verifiers for name in (v.token, v.authority) if name is not None}

    def models(self) -> list[str]:
        return sorted({held.spec.model for held in self._held.values()})

    async def replace(self, raws: Sequence[Any]) -> list[Rejected]:
        """Hold exactly those of `raws` that compile; the others are returned. Later calls win over earlier
        ones.
        """
        async with self._replacing:
            held, rejected = await asyncio.to_thread(_compile_set, raws, self._held)
            now = self._clock()
            self._retained = {
                v: (until, c) for v, (until, c) in self._retained.items() if until > now and v not in held
            }
            self._retained |= {v: (now + RETAIN_S, c) for v, c in self._held.items() if v not in held}
            self._held = MappingProxyType(held)
            return rejected


def _compile_set(
    raws: Sequence[Any], known: Mapping[str, HeldConfig]
) -> tuple[dict[str, HeldConfig], list[Rejected]]:
    held: dict[str, HeldConfig] = {}
    rejected: list[Rejected] = []
    for raw in raws:
        compiled = compile_config(raw)
        if isinstance(compiled, Rejected):
            rejected.append(compiled)
            continue
        version = compiled.spec.version
        twin = held.get(version)
        if twin is not None and twin.spec != compiled.spec:
            rejected.append(
                Rejected(version, "version", "names two different configurations; the first is held")
            )
        elif twin is None:
            before = known.get(version)
            held[version] = before if before is not None and before.spec == compiled.spec else compiled
    return held, rejected
