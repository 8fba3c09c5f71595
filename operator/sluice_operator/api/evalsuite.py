"""EvalSuite: business samples with what a right answer looks like.

A sample passes when every expectation holds. Rates are told by task, never as one average. Samples stand in
the suite, or in a ConfigMap as a YAML list of the same form.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from .common import Condition, DataClass, Decimal, DnsLabel, Metadata, Regex, Risk, Spec, named
from .declare import (
    AGE,
    FREE_FORM,
    MESSAGE,
    READY,
    REASON,
    SET,
    Cel,
    Column,
    Kind,
    exactly_one,
    keyed_by,
    obeys,
)

Text = Annotated[str, Field(max_length=500)]


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


class Message(Spec):
    """One turn of the conversation that is sent."""

    role: Role
    """Who speaks."""
    content: str = Field(max_length=32_000)
    """What is said."""


class Answer(StrEnum):
    """What kind of answer is right."""

    ANY = "Any"
    ANSWER = "Answer"
    REFUSAL = "Refusal"


class ToolCall(Spec):
    """A call that the answer must make."""

    name: str = Field(min_length=1, max_length=100)
    """Name of the tool."""
    arguments: dict[str, Any] | None = Field(default=None, json_schema_extra=FREE_FORM)
    """JSON schema that the arguments validate against."""


class Table(Spec):
    """A table that generated SQL may use."""

    name: str = Field(min_length=1, max_length=100)
    """Name, as it stands in queries."""
    columns: list[Annotated[str, Field(min_length=1, max_length=100)]] = Field(min_length=1, max_length=200)
    """Its columns."""


class Sql(Spec):
    """The answer is SQL that parses and names only what exists."""

    dialect: str = Field(default="", max_length=20, pattern=r"^[a-z0-9]*$")
    """Such as postgres, mysql or sqlite; empty: standard SQL."""
    tables: list[Table] = Field(min_length=1, max_length=100, json_schema_extra=keyed_by("name"))
    """Tables that exist."""
    read_only: bool = True
    """Only queries, nothing that changes data."""


class Language(StrEnum):
    """Languages whose code can be compiled here."""

    PYTHON = "Python"
    JSON = "Json"


class Code(Spec):
    """The answer is code that compiles; a fenced block counts where there is one."""

    language: Language = Language.PYTHON
    """Language."""
    defines: list[Annotated[str, Field(max_length=100)]] = Field(
        default_factory=list, max_length=20, json_schema_extra=SET
    )
    """Functions or classes that it must define."""


class Number(Spec):
    """A number that the answer must state."""

    value: Annotated[str, Field(max_length=32, pattern=r"^-?[0-9]+(\.[0-9]+)?$")]
    """The number. A string, such as "12.5"; 1,234 and 1 234 in an answer are read as 1234."""
    tolerance_percent: int = Field(default=0, ge=0, le=100)
    """How far off it may be."""


class Citations(Spec):
    """The answer cites, and only what exists: [a], [12] or 【a】 with an id of a source."""

    sources: list[Annotated[str, Field(min_length=1, max_length=100)]] = Field(
        min_length=1, max_length=200, json_schema_extra=SET
    )
    """Ids that exist."""
    min_citations: int = Field(default=1, ge=0, le=100)
    """So many different ones at least."""


class HttpChecker(Spec):
    """A checker of the user's: gets sample and answer as JSON, says `{"ok": true}`, or false and a reason."""

    name: DnsLabel
    """A Service of the same namespace."""
    port: int = Field(ge=1, le=65535)
    """Its port."""
    path: str = Field(default="/", max_length=200, pattern=r"^/")
    """Path that is POSTed to."""
    timeout_seconds: int = Field(default=10, ge=1, le=300)
    """What takes longer has failed."""


class Expectation(Spec):
    """What a right answer looks like; all that is given must hold."""

    answer: Answer = Answer.ANY
    """Refusal: it must refuse. Answer: it must not."""
    json_schema: dict[str, Any] | None = Field(default=None, json_schema_extra=FREE_FORM)
    """The answer is JSON that validates against this schema (2020-12)."""
    must_match: list[Regex] = Field(default_factory=list, max_length=16)
    """The answer contains a match of each of these RE2 patterns."""
    must_not_match: list[Regex] = Field(default_factory=list, max_length=16)
    """The answer contains no match of any of these RE2 patterns."""
    tool_call: ToolCall | None = None
    """The answer calls this tool."""
    sql: Sql | None = None
    """The answer is SQL."""
    code: Code | None = None
    """The answer is code."""
    numbers: list[Number] = Field(default_factory=list, max_length=32)
    """Numbers that the answer states."""
    citations: Citations | None = None
    """The answer cites its sources."""
    http: HttpChecker | None = None
    """The answer passes a checker of the user's."""
    max_seconds: Decimal | None = None
    """Longest time until the answer is complete. A string, such as "2.5"."""


class Sample(Spec):
    """One request and what a right answer looks like."""

    name: DnsLabel
    """Unique within the suite."""
    task: DnsLabel
    """Kind of work; rates are told by it."""
    messages: list[Message] = Field(min_length=1, max_length=64)
    """What is sent."""
    tools: list[Annotated[dict[str, Any], Field(json_schema_extra=FREE_FORM)]] = Field(
        default_factory=list, max_length=32
    )
    """Tools that are offered, in the OpenAI form."""
    max_tokens: int = Field(default=256, ge=1, le=32_768)
    """Longest answer."""
    tenant: DnsLabel | None = None
    """On whose behalf; absent: nobody's in particular."""
    data_class: DataClass = DataClass.INTERNAL
    """How sensitive the content is; claimed with the request."""
    risk: Risk = Risk.HIGH
    """What a wrong answer costs; claimed with the request."""
    context_tokens: int = Field(default=0, ge=0, le=1_000_000)
    """So many tokens of neutral text, roughly, are put before the last message: the same question in a long
    context."""
    hard: bool = False
    """One failure of the candidate ends the rollout, whatever the rates say."""
    expect: Expectation
    """What a right answer looks like."""


class ConfigMapKey(Spec):
    """A key of a ConfigMap in the same namespace."""

    name: DnsLabel
    """Name of the ConfigMap."""
    key: str = Field(default="samples.yaml", min_length=1, max_length=253)
    """Key inside it: a YAML list of samples."""


class EvalSuiteSpec(Spec):
    """Samples; exactly one way to give them."""

    model_config = obeys(
        Cel(
            exactly_one("samples", "samplesFrom"),
            "suite needs exactly one source: give samples or samplesFrom",
        )
    )

    samples: list[Sample] | None = Field(
        default=None, min_length=1, max_length=500, json_schema_extra=keyed_by("name")
    )
    """The samples."""
    samples_from: ConfigMapKey | None = None
    """Where they stand."""
    owner: str = Field(default="", max_length=200)
    """Who answers for it."""


class EvalSuiteStatus(Spec):
    """Observed state, kstatus style."""

    observed_generation: int = 0
    """Generation last looked at."""
    num_samples: int = 0
    """Samples that can run."""
    num_hard: int = 0
    """Of these, hard ones."""
    tasks: list[str] = Field(default_factory=list)
    """Tasks that it covers."""
    digest: str = ""
    """Digest of the samples; the ledger names it."""
    conditions: list[Condition] = Field(default_factory=list, json_schema_extra=keyed_by("type"))
    """Ready, Reconciling, Stalled."""


class EvalSuite(Spec):
    """Business samples that a candidate must pass."""

    KIND: ClassVar = Kind(
        plural="evalsuites",
        short_names=("es",),
        columns=(
            READY,
            REASON,
            Column("Samples", ".status.numSamples", "Samples that can run.", "integer"),
            Column("Hard", ".status.numHard", "Of these, hard ones.", "integer"),
            AGE,
            Column("Digest", ".status.digest", "Digest of the samples.", priority=1),
            MESSAGE,
        ),
    )
    model_config = obeys(named())

    metadata: Metadata
    spec: EvalSuiteSpec
    status: EvalSuiteStatus = Field(default_factory=EvalSuiteStatus)
