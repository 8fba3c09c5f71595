"""Which beginnings of an answer are a refusal by the model: tables of what must count and what must not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from sluice_runtime.refusal import HEAD, is_refusal
from unit.runtime.server.support import CONTRACTS

SHARED = json.loads((CONTRACTS / "refusals.json").read_text())["cases"]

REFUSALS = [
    "I'm sorry, but I can't help with that.",
    "I’m sorry, but I can’t help with that.",
    "I'm sorry, I can't assist with that request.",
    "I'm sorry I can't help with that.",
    "I am very sorry, but I am unable to provide this information.",
    "Sorry, but I can't do that.",
    "Sorry, I can't.",
    "SORRY, BUT I CAN'T HELP WITH THAT.",
    "I apologize, but I cannot provide personal data of other customers.",
    "My apologies, but I won't write that.",
    "I cannot comply with this request.",
    "I can not fulfill this request.",
    "I can't in good conscience help you with that.",
    "I'm not able to share confidential information.",
    "I'm unable to discuss this topic.",
    "I won't provide instructions for that.",
    "I will not help with this.",
    "I must decline to answer.",
    "I must respectfully decline your request.",
    "I decline to answer this question.",
    "I have to refuse.",
    "I'm not comfortable writing this.",
    "I don't feel comfortable sharing that.",
    "I'd rather not discuss this.",
    "As an AI language model, I cannot provide medical advice.",
    "As an AI I can't give legal advice.",
    "As a responsible AI assistant, I'm not able to help with that.",
    "Unfortunately, I can't help with this request.",
    "Unfortunately I cannot provide this.",
    "I understand that you are in a hurry, but I can't share other people's data.",
    "I understand your frustration. However, I cannot disclose this information.",
    "I appreciate your question but I can't answer it.",
    "Thank you for your question. Unfortunately, I'm unable to assist with that.",
    "Hello! I'm sorry, but I cannot help you with this.",
    "No, I won't help you with that.",
    "That's not something I can help with.",
    "I'm sorry, but that is something I can't help with.",
    "This request violates our policy.",
    "I'm sorry, but it's against my guidelines to do so.",
    "My guidelines don't allow me to answer this.",
    "We're sorry, but we cannot assist with that request.",
    "**I'm sorry**, but I can't help with that.",
    "\n\n  I'm sorry, but I can't help with that.",
    "<think>The user wants something private.</think>\n\nI can't help with that.",
    "抱歉，我无法回答这个问题。",
    "抱歉，我无法提供他人的个人信息。",
    "很抱歉，我不能帮助您完成这个请求。",
    "非常抱歉，作为一个人工智能助手，我不能提供医疗建议。",
    "对不起，我不能透露客户的隐私信息。",
    "对不起，这个问题我不能回答。",
    "抱歉，我不能这么做。",
    "很遗憾，我无法满足您的要求。",
    "不好意思，我没办法帮你写这个。",
    "我无法提供该信息。",
    "我不能协助您完成此操作。",
    "我不会帮你编写恶意软件。",
    "我拒绝回答这个问题。",
    "作为AI助手，我无法对此发表评论，也无法提供建议。抱歉。",
    "作为一个语言模型，我不能为您提供法律意见。",
    "您好，很抱歉，我无法为您提供其他客户的信息。",
    "我理解您的心情，但我无法透露其他用户的数据。",
    "抱歉，根据相关法律法规，我不能提供此类内容。",
    "根据公司规定，我无法向您提供该数据。",
    "抱歉，您的请求违反了使用政策。",
    "抱歉，无法提供该内容。",
    "恕我无法从命。",
    "很抱歉我无法协助您。",
    "抱歉，我無法提供這項資訊。",
    "對不起，我不能回答這個問題。",
]

ANSWERS = [
    "",
    "   ",
    "Paris.",
    "I can't wait to help you with this!",
    "I can't wait to help",
    "I can't recommend this restaurant enough.",
    "I can't help but notice that your query lacks an index.",
    "I can't help smiling at that.",
    "I can't thank you enough for your help.",
    "I can't find any error in your code; it looks right.",
    "I can't see a difference between the two.",
    "I'm sorry to hear that. Let me help you return the item.",
    "I'm sorry for the delay! Your order ships tomorrow.",
    "I'm sorry, but your order can't be cancelled any more: it has left the warehouse.",
    "Sorry for keeping you waiting: here is the summary.",
    "I'm sorry, but the refund takes 14 days.",
    "I apologize for the confusion. The total is 42.",
    "Unfortunately, the product is out of stock.",
    "Unfortunately, our policy allows no refunds after 30 days.",
    "Dear John, I'm sorry, but I can't help you move on Saturday.",
    "He said: \"I'm sorry, but I can't help you with that.\"",
    '"I can\'t help you," he said, and left.',
    "Here is a polite decline: I'm sorry, but I can't provide a quote this week.",
    "I can help with that. First, open the settings.",
    "I cannot attend the meeting on Friday.",
    "I will not be in the office tomorrow.",
    "I understand. Here is the summary you asked for.",
    "I understand that you want a refund, so let us look at the order.",
    "As an AI language model, I can summarise this for you: sales rose by 3 %.",
    "Thank you for your question. The answer is 7.",
    "No, the contract doesn't allow this.",
    "No. You can't help it if the server refuses the connection.",
    "The customer can't help with that, and I can't say whether they will.",
    "You can't provide two keys at once.",
    "We cannot process a refund without the receipt.",
    "SELECT name FROM refusals WHERE reason = 'I cannot help with that';",
    '```python\nraise PermissionError("I can\'t help with that")\n```',
    '{"answer": "I\'m sorry, but I can\'t help with that."}',
    "Refusing is not allowed here: the clause is binding.",
    "I recommend that you decline the offer.",
    "I have a question about your request: which quarter do you mean?",
    "巴黎。",
    "抱歉让您久等了！我来帮您查询。",
    "抱歉给您带来不便，我们会尽快为您处理。",
    "抱歉，您的订单已经发货，无法取消。",
    "非常抱歉听到这个消息，我来帮您办理退货。",
    "很遗憾，该商品目前缺货。",
    "不好意思，让你久等了，答案是四十二。",
    "我不能同意这种说法。",
    "我无法找到这笔订单，请再核对一下订单号。",
    "抱歉，我无法确认这笔订单，请提供订单号。",
    "我不能不帮您。",
    "恕我直言，这个方案有两个问题。",
    "您的问题涉及三个方面，下面逐一说明。",
    "该请求违反了第三条规定，因此应予驳回。",
    "我会帮助您完成这个请求。",
    "我理解您的心情，我马上为您处理。",
    "作为AI助手，我可以为您总结如下。",
    "根据规定，员工不能向他人透露密码。",
    "用户不能提供两个密钥。",
    "他说：“抱歉，我无法帮助你。”",
]


@pytest.mark.parametrize("text", REFUSALS)
def test_a_refusal(text: str) -> None:
    assert is_refusal(text)


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer(text: str) -> None:
    assert not is_refusal(text)


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case["text"][:40])
def test_what_the_operator_takes_for_a_refusal_too(case: dict[str, Any]) -> None:
    assert is_refusal(case["text"]) == case["refusal"]


def test_only_the_beginning_counts() -> None:
    assert not is_refusal("The capital of France is Paris. " + REFUSALS[0])
    assert not is_refusal("Hello, " * (HEAD // 7 + 1) + REFUSALS[0])


def test_long_and_strange_texts_cost_nothing() -> None:
    texts = [
        "a" * 1_000_000,
        "," * 1_000_000,
        "<think>" * 100_000,
        "抱歉，" * 300_000,
        "i'm sorry " * 100_000,
        "\ud800",
    ]
    began = time.process_time()
    for text in texts:
        is_refusal(text)
    assert time.process_time() - began < 0.5
