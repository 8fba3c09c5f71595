"""Metrics of the operator itself, for people and alerts; nothing is decided on them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
LOOP_LATENESS = Histogram(
    "sluice_operator_loop_lateness_seconds",
    "How late the decision loop's tick came",
    registry=REGISTRY,
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10),
)
DECISIONS = Counter(
    "sluice_operator_transitions_total", "Transitions of rollouts", ["phase", "reason"], registry=REGISTRY
)
DECISION_ERRORS = Counter(
    "sluice_operator_decision_errors_total", "Decisions that failed by a bug", registry=REGISTRY
)
PUSHES = Counter("sluice_operator_gateway_pushes_total", "States pushed to the gateway", registry=REGISTRY)
NACKS = Counter(
    "sluice_operator_gateway_nacks_total", "Objects that the gateway refused", ["kind"], registry=REGISTRY
)
EVIDENCE = Counter(
    "sluice_operator_observations_total", "Observations taken in", ["source"], registry=REGISTRY
)
GAPS = Counter("sluice_operator_evidence_gaps_total", "Records known to be lost", registry=REGISTRY)
UNREAD = Counter(
    "sluice_operator_evidence_unread_total",
    "Records of pods whose evidence is of another version than this operator's, by namespace and backend",
    ["namespace", "backend"],
    registry=REGISTRY,
)
RECONCILE_ERRORS = Counter(
    "sluice_operator_reconcile_errors_total", "Reconciles that failed", ["kind"], registry=REGISTRY
)
QUEUE_DEPTH = Gauge("sluice_operator_queue_depth", "Keys waiting or being worked on", registry=REGISTRY)
EVIDENCE_LATENCY = Histogram(
    "sluice_operator_evidence_to_push_seconds",
    "From an observation's arrival to the push of the decision it caused",
    registry=REGISTRY,
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1),
)
LEDGER_FAILURES = Counter(
    "sluice_operator_ledger_failures_total",
    "Release records that could not be written or deleted",
    registry=REGISTRY,
)
REVIEWS_DUE = Gauge(
    "sluice_review_due",
    "Comparisons that are due again, by namespace and release record",
    ["namespace", "record"],
    registry=REGISTRY,
)
