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
from .evalsuite import EvalSuite, EvalSuiteSpec, EvalSuiteStatus
from .releaserecord import ReleaseRecord, ReleaseRecordSpec
from .routepolicy import RoutePolicy, RoutePolicySpec, RoutePolicyStatus
from .rulestatus import Phase, RuleStatus
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
    "EvalSuite",
    "EvalSuiteSpec",
    "EvalSuiteStatus",
    "InferenceBackend",
    "InferenceBackendSpec",
    "InferenceBackendStatus",
    "Metadata",
    "Phase",
    "ReleaseRecord",
    "ReleaseRecordSpec",
    "Risk",
    "RoutePolicy",
    "RoutePolicySpec",
    "RoutePolicyStatus",
    "RuleStatus",
    "Tenant",
    "TenantSpec",
    "TenantStatus",
]
