"""Whether an answer declines. Pods recognise refusals by themselves; both sides are tested with
``docs/contracts/refusals.json``.

A refusal is the *speaker* declining, near the beginning of the answer. That something is unknown, or that a
rule forbids the customer something, is an answer. Invariant: only the beginning is looked at, so the work is
bounded whatever the text is.
"""

from __future__ import annotations

import re

from .excerpt import split

_WINDOW = 320

_DO = (
    r"(?:help(?! but\b| \w+ing\b)|in good conscience|assist|answer|respond|provide|share|disclose|reveal"
    r"|discuss|comply|fulfill?|give|tell|show|offer|write|create|generate|produce|do (?:that|this)|process"
    r"|support|engage|continue|participate|release|let you|talk about|look up|access|proceed|carry out"
    r"|execute|send)"
)
_UNABLE = r"(?:unable|not able|not allowed|not permitted|not authori[sz]ed|forbidden) to"
_CANT = (
    rf"(?:can(?:'t|not| not)|could(?:n't| not)|won't|will not|may not|must not|am {_UNABLE}|are {_UNABLE})"
)
_ADVERB = r"(?: (?:really|simply|just|therefore|also|currently|unfortunately|possibly))?"
_ENGLISH = re.compile(
    "|".join(
        (
            rf"\bi {_CANT}{_ADVERB} {_DO}\b",
            rf"\bwe {_CANT}{_ADVERB} (?:help|assist|answer|share|disclose|reveal|discuss|comply)\b",
            rf"\bsorry,? (?:but )?i {_CANT}(?:[.,;!]|$)",
            r"\bi(?:'m| am) not comfortable|\bi (?:don't|do not) feel comfortable",
            r"\bi(?:'d| would) rather not\b",
            r"\b(?:not|isn't) something i (?:can|am able to) (?:help|assist|do|share|discuss|answer)\b",
            r"\b(?:this|that|your) request (?:violates|goes against|is against)\b|\bagainst my guidelines\b",
            r"\bmy guidelines (?:don't|do not) (?:allow|permit)\b",
            rf"\b(?:i'm|we're) {_UNABLE}{_ADVERB} {_DO}\b",
            r"\bi (?:(?:must|have to|need to|will have to) )?(?:respectfully |politely )?(?:decline|refuse)"
            r"(?: to\b| this\b| that\b| your\b|[.,;!]|$)",
            r"\byou(?: are|'re) not (?:allowed|permitted|authori[sz]ed) to (?:view|see|access|read|know)\b",
            r"\b(?:this|that|your|the) (?:request|question) (?:can't|cannot|can not) be"
            r" (?:answered|fulfilled|processed)",
            rf"(?:^|[.!?\n] ?)unable to {_DO}\b",
        )
    )
)

_ZH_DO = (
    r"(?:回答|提供|透露|协助|帮助|帮您|帮你|告诉|告知|分享|公开|披露|泄露|执行|满足|处理|查看|查询|讨论|生成|编写|展示|给出"
    r"|发送|帮|从命|发表|这么做|这样做|回應|回应|協助|幫助|告訴|執行|滿足|處理|查詢|討論)"
)
_ZH_CANT = r"(?:不会|没办法|沒辦法|无法|不能|不可以|没法|不便|不方便|不得|無法|沒法|难以|難以)"
_ZH_TO = r"(?:对此|向您|向你|为您|为你|给您|给你|對您|对您|就此)?"
_CHINESE = re.compile(
    "|".join(
        (
            rf"(?:我|我们|我們|本助手|本人|恕)(?:暂时|也|目前|实在)?{_ZH_CANT}{_ZH_TO}{_ZH_DO}",
            rf"(?:抱歉|对不起|不好意思|遗憾|對不起|遺憾)[^。！？\n]{{0,12}}{_ZH_CANT}{_ZH_TO}{_ZH_DO}",
            r"(?:我|我们|我們)(?:没有|沒有)权限",
            r"(?:您|你)(?:没有权限|無權限|无权|無權)(?:查看|访问|获取|知道|訪問|读取)",
            r"(?:您的|你的)请求(?:已)?违反",
            rf"我(?:们|們)?(?:必须|只能|不得不)?拒绝{_ZH_DO}",
        )
    )
)
_PIECE_OF_WORK = re.compile(
    r"[{\[]|def |class |select |with |dear |subject:|here(?: is| are|'s|’s) ", re.IGNORECASE
)
"""Text that was asked for, such as a letter, may decline on somebody else's behalf."""
_QUOTED = re.compile(r'"[^"\n]{0,300}"|“[^”\n]{0,300}”|「[^」\n]{0,300}」|『[^』\n]{0,300}』')


def is_refusal(text: str) -> bool:
    """Whether ``text`` declines to answer or to act, in English or Chinese."""
    if split(text[: _WINDOW * 4])[1]:
        return False
    start = text.lstrip(" \t\r\n*_#>-")[:_WINDOW]
    if _PIECE_OF_WORK.match(start):
        return False
    plain = " ".join(_QUOTED.sub(" ", start).replace("’", "'").lower().split(" "))
    return bool(_ENGLISH.search(plain) or _CHINESE.search(plain))
