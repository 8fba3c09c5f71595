"""The few protobuf habits that all builders share, so that they read as plain data.

xds-protos accepts nested dicts in constructors; only ``Any`` needs help. Serialisation is deterministic:
equal states give equal bytes, which is what lets the server send nothing where nothing changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import any_pb2, struct_pb2

PREFIX = "type.googleapis.com/"
CDS = PREFIX + "envoy.config.cluster.v3.Cluster"
EDS = PREFIX + "envoy.config.endpoint.v3.ClusterLoadAssignment"
ECDS = PREFIX + "envoy.config.core.v3.TypedExtensionConfig"
LDS = PREFIX + "envoy.config.listener.v3.Listener"
RDS = PREFIX + "envoy.config.route.v3.RouteConfiguration"
RTDS = PREFIX + "envoy.service.runtime.v3.Runtime"
TYPES = (RTDS, CDS, EDS, ECDS, LDS, RDS)

Message = Any
Resources = Mapping[str, Message]


def pack(message: Message) -> Message:
    """The message inside an ``Any``."""
    return any_pb2.Any(
        type_url=PREFIX + message.DESCRIPTOR.full_name, value=message.SerializeToString(deterministic=True)
    )


def extension(name: str, message: Message) -> dict[str, Any]:
    """Name and typed config, as every Envoy extension point takes them."""
    return {"name": name, "typed_config": pack(message)}


def duration(seconds: float) -> dict[str, int]:
    """google.protobuf.Duration."""
    whole = int(seconds)
    return {"seconds": whole, "nanos": round((seconds - whole) * 1e9)}


def struct(values: Mapping[str, Any]) -> Message:
    """google.protobuf.Struct, which constructors don't make from a dict."""
    message = struct_pb2.Struct()
    message.update(values)
    return message


def digest(parts: Iterable[bytes]) -> str:
    """Short name for a content; parts can't run into each other."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "big") + part)
    return sha.hexdigest()[:16]


def error_body(message: str, kind: str, code: str, param: str | None = None) -> str:
    """An error as OpenAI's clients expect it."""
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})
