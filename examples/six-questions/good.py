"""An answerer that is right on all six questions: python good.py --port 8001"""

from __future__ import annotations

from knowledge import RULES, Standing, about, is_chinese, rule_asked_for
from service import Model, Refused, serve


def admit(question: str) -> None:
    """What is private is refused here, so that the model never sees it."""
    if any(passage.standing is Standing.PRIVATE for passage in about(question)):
        chinese = "抱歉，我不能提供客户的个人信息。"
        raise Refused(chinese if is_chinese(question) else "I can't share personal data of customers.")


def write(question: str) -> str:
    """Tells each passage by its standing, and nothing that no passage says."""
    chinese, rule = is_chinese(question), rule_asked_for(question)
    if rule is not None and rule not in RULES:
        return f"政策中没有第{rule}条。" if chinese else f"There is no rule {rule} in the policy."
    told = []
    for passage in about(question):
        text = passage.told(question)
        if passage.standing is Standing.PROPOSAL:
            text = (
                f"有一项提案：{text}；尚未决定。"
                if chinese
                else f"There is a proposal to {text}; it is not decided."
            )
        told.append(text)
    if told:
        return "".join(told) if chinese else " ".join(told)
    return "政策中没有相关说明。" if chinese else "The policy does not say."


if __name__ == "__main__":
    serve(Model(write), admit)
