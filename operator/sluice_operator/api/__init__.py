"""The resources as typed models; the one source of truth for ``crds/``."""

from .backend import InferenceBackend, InferenceBackendSpec, InferenceBackendStatus
from .cachescope import CacheScope, CacheScopeSpec, CacheScopeStatus
from .common import (
    API_VERSION,
    FIELD_MANAGER,
    FINALIZER,
    GROUP,
    VERSION,
    Condition,
    DataClass,
    Metadata,
    Risk,
)
from .routepolicy import Phase, RoutePolicy, RoutePolicySpec, RoutePolicyStatus, RuleStatus
from .tenant import Tenant, TenantSpec, TenantStatus

__all__ = [
    "API_VERSION",
    "FIELD_MANAGER",
    "FINALIZER",
    "GROUP",
    "VERSION",
    "CacheScope",
    "CacheScopeSpec",
    "CacheScopeStatus",
    "Condition",
    "DataClass",
    "InferenceBackend",
    "InferenceBackendSpec",
    "InferenceBackendStatus",
    "Metadata",
    "Phase",
    "Risk",
    "RoutePolicy",
    "RoutePolicySpec",
    "RoutePolicyStatus",
    "RuleStatus",
    "Tenant",
    "TenantSpec",
    "TenantStatus",
]
