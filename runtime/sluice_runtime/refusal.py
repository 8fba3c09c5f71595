"""Tells by how an answer begins, in English or Chinese, whether the model refused to do what was asked.

It exists because a refusal is fast, well-formed and, where it is needless, useless. The beginning is read
clause by clause. An apology, a greeting, "as an AI", "I understand that…" lead in; then somebody must say "I"
and that they can't or won't *help, answer, provide…*. Anything else ends the search: what can't be found,
cancelled or attended is no refusal. Example: "I'm sorry, but I can't help with that." is one; "I can't wait
to help!" and "Sorry to keep you waiting: here it is." are none.

Invariant: reads at most `HEAD` characters and `MAX_CLAUSES` clauses, with patterns that take linear time.
"""

from __future__ import annotations

from collections.abc import Iterator

from sluice_runtime.patterns import Pattern, compile_pattern

HEAD = 400
MAX_CLAUSES = 6

_SPELLING = str.maketrans(
    "‘’＇，。！？：；、—（）\n"
    "無對幫協問題請為給沒辦這個從絕暫時實現關滿應討論參與編執處訴遺規違內們難權會撰寫繼續據產況條",
    "''',,,,,,,,,,,"
    "无对帮协问题请为给没办这个从绝暂时实现关满应讨论参与编执处诉遗规违内们难权会撰写继续据产况条",
)
_ENDS = str.maketrans(".!?:;", ",,,,,")


def is_refusal(text: str) -> bool:
    """Whether the answer begins as a refusal."""
    apologised = False
    for clause in _clauses(text):
        if _FINDING.search(clause):
            return False
        if _REFUSAL.search(clause) or (apologised and _REFUSAL_AFTER_APOLOGY.search(clause)):
            return True
        apologised = apologised or _APOLOGY.search(clause)
        if not (apologised or _LEAD_IN.search(clause)):
            return False
    return False


def _clauses(text: str) -> Iterator[bytes]:
    """The first clauses that a reader sees: no thoughts, no emphasis, lower case, simplified characters."""
    if text[:HEAD].lstrip().startswith("<think>"):
        text = text.partition("</think>")[2]
    head = text.lstrip()[:HEAD].translate(_SPELLING).translate(_ENDS).lower().replace(" - ", ",")
    num_clauses = 0
    for part in head.replace("*", "").replace("_", "").split(","):
        clause = part.strip(" \t\r#-")
        if clause:
            yield clause.encode("utf-8", "replace")
            num_clauses += 1
        if num_clauses == MAX_CLAUSES:
            return


def _any_of(*patterns: str, after: str = "") -> Pattern:
    return compile_pattern(f"{after}(?:{'|'.join(patterns)})")


# -- English ---------------------------------------------------------------------------------------------

_SORRY = (
    r"(?:(?:i'm|i am|we're|we are) (?:(?:very|so|really|truly) )?(?:sorry|afraid)|sorry"
    r"|(?:my )?(?:sincere )?apologies|i (?:sincerely )?apologi[sz]e)"
)
_SEEN = r"(?:i (?:(?:fully|completely|do) )?(?:understand|appreciate|see|know|reali[sz]e)\b|thank you|thanks)"
_AI = r"(?:as|being) an? (?:[a-z-]+ ){0,4}(?:ai|model|assistant|chatbot|program)\b"
_BEFORE = (
    rf"^(?:(?:{_SORRY}|{_SEEN}.{{0,120}}) (?:but|that|however) |{_SORRY} |{_AI}.{{0,40}} )?"
    r"(?:but |however |so |and |then )?(?:(?:unfortunately|therefore|regrettably|sadly) )?"
)
_CAN_NOT = (
    r"(?: can't| cannot| can not| won't| will not"
    r"|(?: am|'m) (?:unable|not (?:able|going|allowed|permitted|authori[sz]ed|willing)) to"
    r"|(?: am|'m) not comfortable| don't feel comfortable| do not feel comfortable)"
)
_HELP = (
    r"(?: (?:with|to|in|really|simply|just|actually|directly|knowingly|in good conscience))*"
    r" (?:help|assist|comply|provid|fulfil|do (?:that|this|so)|answer|respond|shar(?:e|ing)|support"
    r"|generat|creat|writ|produc|engag|participat|discuss|giv|offer|continu|disclos|reveal|recommend|advis"
    r"|facilitat|encourag|promot|translat|summari)"
)
_ADVERB = r"(?: (?:really|simply|just|also|therefore|unfortunately|respectfully|currently))?"
_DECLINE = (
    r"(?: must| have to| need to| will|'ll|'d like to)?(?: (?:respectfully|politely|kindly))?"
    r" (?:decline|refuse)(?: to | this| that| your|$)"
)
_THAT_IS = r"(?:that's|that is|this is|it's|it is)"
_RULES = r"(?:guidelines|polic|programming|principles)"
_ENGLISH_REFUSAL = _any_of(
    rf"i{_ADVERB}(?:{_CAN_NOT}{_HELP}|{_DECLINE})",
    rf"{_THAT_IS} (?:not )?something (?:that )?i(?:{_CAN_NOT}| can (?:help|assist|do|provide))",
    r"(?:your|this|that|the) (?:request|question|content|topic|prompt)"
    r" (?:(?:violates|is against|goes against) (?:my|our)|can(?:'t|not| not) be (?:answered|fulfilled))",
    r"we(?: can't| cannot| can not| won't| will not|(?: are|'re) unable to)"
    r" (?:help|assist|comply|share|disclose|reveal|answer|discuss)\b",
    r"you(?:'re| are) not (?:allowed|permitted|authori[sz]ed) to (?:view|see|access|read|know)\b",
    rf"{_THAT_IS} against my (?:[a-z]+ )?{_RULES}",
    rf"my (?:[a-z]+ )?{_RULES}.{{0,12}} (?:allow|permit|prevent|prohibit)",
    rf"i(?:'d| would) (?:rather|prefer) not(?: to)?{_HELP}",
    after=_BEFORE,
)
_ENGLISH_AFTER_APOLOGY = _any_of(rf"i{_ADVERB}{_CAN_NOT}$", after=_BEFORE)
_ENGLISH_LEAD_IN = (
    rf"^(?:{_SEEN}|{_AI}"
    r"|(?:hi|hello|hey|no|unfortunately|regrettably|sadly|however|dear (?:user|customer))\b)"
)
# Praise that begins like a refusal.
_ENGLISH_FINDING = _any_of(
    r"can(?:'t|not| not) (?:really |just )?help"
    r" (?:but|feeling|noticing|thinking|wondering|smiling|it|myself)\b",
    r"can(?:'t|not| not) (?:really |just )?(?:recommend|support|encourage|offer|give|promote)\b.*\benough\b",
)

# -- Chinese ---------------------------------------------------------------------------------------------

_ZH_SORRY = (
    r"(?:(?:非常|十分|很|真的?|实在|感到|表示|我们?)*(?:抱歉|对不起|不好意思|遗憾)"
    r"(?:的是|地(?:告诉|通知)(?:您|你)?)?)"
)
_ZH_I = (
    r"(?:但是?|不过|所以|因此|那么)?(?:我们?|本助手|本系统|本机器人)"
    r"(?:恐怕|目前|现在|暂时|确实|实在|真的|也|还|是)*"
)
_ZH_CAN_NOT = r"(?:无法|不能够?|不可以|没法|没有?办法|无权|不便|不方便|不会|不应该?|难以|不得|拒绝)"
_ZH_FOR = r"(?:再|直接|继续|具体|在此)*(?:[为向给对就替与和跟](?:您|你|用户|大家|此)?)?(?:直接|继续)*"
_ZH_HELP = (
    r"(?:提供|回答|答复|解答|帮助|帮忙|帮(?:您|你)|协助|满足|完成|执行|处理|透露|泄露|披露|告诉|告知|给出|给(?:您|你)|生成|编写"
    r"|撰写|写|创作|讨论|谈论|发表|参与|支持|响应|回应|配合|分享|评论|评价|推荐|翻译|输出|展示|从命|效劳|服务|遵从|照做|代劳|这样做"
    r"|这么做|做这|做到|做出|作出)"
)
_ZH_REFUSES = rf"{_ZH_I}{_ZH_CAN_NOT}{_ZH_FOR}{_ZH_HELP}"
_ZH_ASKED = r"(?:请求|要求|问题|内容|话题)"
_CHINESE_REFUSAL = _any_of(
    rf"^(?:{_ZH_SORRY})?{_ZH_REFUSES}",
    rf"^{_ZH_SORRY}{_ZH_I}{_ZH_CAN_NOT}",
    rf"^(?:{_ZH_SORRY})?作为.{{1,40}}{_ZH_REFUSES}",
    rf"^(?:{_ZH_SORRY})?(?:这|该|此|(?:您|你)的).{{0,12}}{_ZH_ASKED}{_ZH_REFUSES}",
    rf"^(?:{_ZH_SORRY})?(?:{_ZH_I}没有?权限|(?:您|你)(?:无权|没有?权限)(?:查看|访问|获取|知道|读取))",
    r"^恕我?(?:无法|不能|难以|拒绝)",
)
_CHINESE_AFTER_APOLOGY = _any_of(
    rf"^(?:作为.{{1,40}})?{_ZH_I}{_ZH_CAN_NOT}",
    rf"^(?:但是?)?{_ZH_CAN_NOT}{_ZH_FOR}{_ZH_HELP}",
    rf"^(?:这|该|此|(?:您|你)的).{{0,12}}{_ZH_ASKED}(?:我们?)?{_ZH_CAN_NOT}{_ZH_FOR}{_ZH_HELP}",
    rf"^(?:这|该|此|(?:您|你)的).{{0,12}}{_ZH_ASKED}.{{0,4}}(?:违反|不符合|涉及(?:敏感|违|隐私|机密))",
)
_CHINESE_LEAD_IN = (
    r"^(?:作为|您好|你好|亲|嗨|感谢|谢谢|不行$|不可以$|不$|(?:但是?|由于|因为|根据|按照|出于|基于|鉴于)"
    r"|我(?:非常|完全|很)?(?:理解|明白|知道|了解))"
)
# Findings and opinions, which are answers.
_CHINESE_FINDING = (
    rf"^.{{0,40}}{_ZH_CAN_NOT}(?:不|同意|苟同|认同|赞同|否认|忍受|想象|相信|找到|查到|看到|确认|确定|判断)"
)


class _Either:
    """One of two languages' patterns."""

    def __init__(self, *patterns: Pattern | str) -> None:
        self._patterns = [compile_pattern(p) if isinstance(p, str) else p for p in patterns]

    def search(self, clause: bytes) -> bool:
        return any(pattern.search(clause) for pattern in self._patterns)


_APOLOGY = _Either(rf"^{_SORRY}\b", rf"^{_ZH_SORRY}")
_LEAD_IN = _Either(_ENGLISH_LEAD_IN, _CHINESE_LEAD_IN)
_REFUSAL = _Either(_ENGLISH_REFUSAL, _CHINESE_REFUSAL)
_REFUSAL_AFTER_APOLOGY = _Either(_ENGLISH_AFTER_APOLOGY, _CHINESE_AFTER_APOLOGY)
_FINDING = _Either(_ENGLISH_FINDING, _CHINESE_FINDING)
