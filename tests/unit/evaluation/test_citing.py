"""Citations by cases."""

from __future__ import annotations

import pytest

from sluice_operator.api.evalsuite import Citations
from sluice_operator.evaluation.citing import failures

UNKNOWN = "cites 1 source(s) that do not exist"
FEW = "cites 0 of the sources, fewer than 1"
CASES = [
    (["a", "b"], "It is 30 days [a].", []),
    (["a", "b"], "It is 30 days【a】。", []),
    (["1", "12"], "It is 30 days[12].", []),
    (["1", "12"], "It is 30 days [1, 12].", []),
    (["1", "2"], "It is 30 days [1][2].", []),
    (["1", "2", "3"], "It is 30 days [1-3].", []),
    (["1", "2"], "It is 30 days [^1].", []),
    (["1"], "It is 30 days 【1†source】.", []),
    (["doc-7.md"], "See [doc-7.md].", []),
    (["Return Policy"], "See [Return Policy].", []),
    (["退货政策"], "见【退货政策】", []),
    (["a"], "See [a](https://x.example).", [FEW]),
    (["a"], "It is 30 days.", [FEW]),
    (["a"], "", [FEW]),
    (["a"], "It is 30 days [b].", [UNKNOWN, FEW]),
    (["a"], "It is 30 days [a], and 5 [z].", [UNKNOWN]),
    (["a"], "It is 30 days [a; 9].", [UNKNOWN]),
    (["1", "2"], "It is 30 days [1-3].", [UNKNOWN]),
    (["a"], "It is 30 days [17].", [UNKNOWN, FEW]),
    (["退货政策"], "见【运费政策】", [UNKNOWN, FEW]),
    (["1"], "【注意】见[1]", []),
    (["1"], "[see below] It is so [1].", []),
    (["1"], "- [x] done\n- [ ] open\nIt is so [1].", []),
    (["a"], "- [x] done\nIt is so [a].", []),
    (["1"], "Use `rows[0]` [1].", []),
    (["1"], "```python\nrows[0]\n```\nIt is so [1].", []),
    (["1"], "It is so [1].\n```\n1\n```", []),
    (["12"], "It is so［12］。", []),
    (["1"], "![7](x.png) [1]", []),
    (["a"], "[]", [FEW]),
    (["a"], "[" * 1000 + "a" + "]" * 1000, []),
]


@pytest.mark.parametrize(("sources", "text", "told"), CASES)
def test_citations(sources: list[str], text: str, told: list[str]) -> None:
    assert failures(text, Citations(sources=sources)) == told


def test_different_ones_are_counted() -> None:
    wanted = Citations(sources=["a", "b", "c"], min_citations=2)
    assert failures("[a] [a] [a]", wanted) == ["cites 1 of the sources, fewer than 2"]
    assert failures("[a] [c]", wanted) == []
    assert failures("none", Citations(sources=["a"], min_citations=0)) == []
