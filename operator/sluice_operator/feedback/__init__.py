"""What people say of answers, attributed to the arm that gave them."""

from .server import FeedbackServer

__all__ = ["FeedbackServer"]
