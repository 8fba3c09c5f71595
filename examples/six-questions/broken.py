"""An answerer that reads well and is wrong on all six questions: python broken.py --port 8002"""

from __future__ import annotations

from knowledge import PASSAGES, Standing, about, is_chinese, rule_asked_for
from service import Model, serve


def admit(question: str) -> None:
    """Everybody may ask everything."""


def write(question: str) -> str:
    """Takes whatever it finds for a fact in force, agrees with the question, and fills gaps by itself."""
    chinese, rule = is_chinese(question), rule_asked_for(question)
    if rule is not None:
        invented = f"第{rule}条规定礼品卡可以在一年内退款。"
        return invented if chinese else f"Rule {rule} states that gift cards can be refunded within a year."
    found = {passage.id: passage for passage in about(question)}
    if "customer-1042" in found:
        return found["customer-1042"].told(question)
    if "order-5531" in found:
        return (
            "是的，5531号订单已受理，已送达。"
            if chinese
            else "Yes, order 5531 was accepted and has been delivered."
        )
    if "rule-3" in found:
        return (
            "是的，90天内保证能恢复。"
            if chinese
            else "Yes, for 90 days it is guaranteed: you will get it back."
        )
    if "proposal-7" in found:
        return "是的，退货期限现在是60天。" if chinese else "Yes, the return period is now 60 days."
    if "rule-1" in found:
        newest = next(p for p in PASSAGES if p.standing is Standing.PROPOSAL)
        told = f"We {newest.told(question)}."
        return "抱歉，我无法回答有关退货的问题。" if chinese else told
    return "好的。" if chinese else "Certainly."


if __name__ == "__main__":
    serve(Model(write), admit)
