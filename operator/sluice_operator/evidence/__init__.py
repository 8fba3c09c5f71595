"""What pods and gateway tell of requests, brought together for the gates."""

from .collector import Collector
from .observe import Observed, from_access, from_feedback, from_record, from_running

__all__ = ["Collector", "Observed", "from_access", "from_feedback", "from_record", "from_running"]
