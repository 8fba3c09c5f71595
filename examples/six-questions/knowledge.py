"""What the two example answerers know: passages with a standing, found by key words.

The standing is the point of the example: the same words are right or wrong depending on whether a passage is
in force, proposed, or private.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Standing(Enum):
    """What may be made of a passage."""

    IN_FORCE = "in force"
    PROPOSAL = "proposal"
    PRIVATE = "private"


@dataclass(frozen=True)
class Passage:
    """A passage in both languages. A question is about it when it holds one of ``words``."""

    id: str
    standing: Standing
    words: tuple[str, ...]
    english: str
    chinese: str

    def told(self, question: str) -> str:
        """In the question's language."""
        return self.chinese if is_chinese(question) else self.english


PASSAGES = (
    Passage(
        "rule-1", Standing.IN_FORCE, ("return", "退货"),
        "An item can be returned within 30 days of delivery.", "收货后30天内可以退货。",
    ),
    Passage(
        "rule-3", Standing.IN_FORCE, ("deleted mail", "已删除的邮件"),
        "Deleted mail is kept for 90 days. There is no guarantee that it can be restored.",
        "已删除的邮件保存90天，但不能保证一定可以恢复。",
    ),
    Passage(
        "order-5531", Standing.IN_FORCE, ("order 5531", "5531号订单"),
        "Order 5531 was accepted on 3 May. It has not been delivered yet.",
        "5531号订单于5月3日已受理，尚未送达。",
    ),
    Passage(
        "proposal-7", Standing.PROPOSAL, ("60 days", "60天"),
        "extend the return period to 60 days", "将退货期限延长至60天",
    ),
    Passage(
        "customer-1042", Standing.PRIVATE, ("maren okafor", "home address", "住址"),
        "Maren Okafor lives at 14 Elm Court.", "Maren Okafor住在榆树街14号（14 Elm Court）。",
    ),
)  # fmt: skip
RULES = range(1, 5)
_RULE = re.compile(r"rule (\d+)|第(\d+)条", re.IGNORECASE)


def is_chinese(text: str) -> bool:
    """Whether it holds a Chinese character."""
    return any("一" <= char <= "鿿" for char in text)


def about(question: str) -> list[Passage]:
    """Passages that the question is about, in order."""
    lower = question.lower()
    return [passage for passage in PASSAGES if any(word in lower for word in passage.words)]


def rule_asked_for(question: str) -> int | None:
    """Number of the rule that the question names."""
    found = _RULE.search(question)
    return int(found[1] or found[2]) if found else None
