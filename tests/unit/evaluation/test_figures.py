"""Which numbers a text states."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_operator.api.evalsuite import Number
from sluice_operator.evaluation.figures import missing, stated

STATED = [
    ("The total is 1,234.5 euros.", "1234.5"),
    ("The total is 1,234.", "1234"),
    ("1,234,567 users", "1234567"),
    ("12,34,567 rupees", "1234567"),
    ("1 234 euros", "1234"),
    ("1\u00a0234,50 €", "1234.5"),
    ("1\u202f234\u202f567", "1234567"),
    ("1.234,50 €", "1234.5"),
    ("1.234.567 Nutzer", "1234567"),
    ("CHF 1'234.50", "1234.5"),
    ("12.5 %", "12.5"),
    ("12,5 %", "12.5"),
    ("0,125", "0.125"),
    ("a share of .5", "0.5"),
    ("1.5e3", "1500"),
    ("(-5)", "-5"),
    ("is −5 degrees", "-5"),
    ("within 30 days", "30"),
    ("(30)", "30"),
    ("30days", "30"),
    ("$30.", "30"),
    ("30.00", "30"),
    ("3.5 million", "3500000"),
    ("2 thousand", "2000"),
    ("1.2bn", "1200000000"),
    ("5k requests", "5000"),
    ("5k requests", "5"),
    ("1.5万", "15000"),
    ("1.5萬元", "15000"),
    ("3亿", "300000000"),
    ("3亿5000万", "350000000"),
    ("3千万元", "30000000"),
    ("共１２３件", "123"),
    ("１２．５％", "12.5"),
    ("٣٠ يوما", "30"),
    ("收货后30天内", "30"),
    ("收货后三十天内", "30"),
    ("三天", "3"),
    ("十天", "10"),
    ("十五日", "15"),
    ("三百二十万", "3200000"),
    ("一亿两千万", "120000000"),
    ("一千零一", "1001"),
    ("二〇二六年", "2026"),
    ("百分之12.5", "12.5"),
    ("百分之十二", "12"),
    ("三点五万", "3.5"),
    ("10 200 300", "200"),
    ("10 200 300", "10200300"),
    ("from 3-5 days", "5"),
    ("2026-11-30", "11"),
    ("5, 6 and 7", "6"),
    ("1,2", "1.2"),
    ("1,2", "2"),
    ("| 30 | 60 |", "60"),
    ("007", "7"),
]


@pytest.mark.parametrize(("text", "number"), STATED)
def test_stated(text: str, number: str) -> None:
    assert Decimal(number) in stated(text)


NOT_STATED = [
    ("The total is 1,234.5 euros.", "234.5"),
    ("1,234,567", "234567"),
    ("12.5", "5"),
    ("130 days", "30"),
    ("300 days", "30"),
    ("-30 degrees", "30"),
    ("room A30", "30"),
    ("SmolLM2", "2"),
    ("python 3.11.4", "3.11"),
    ("python 3.11.4", "11.4"),
    ("1.5万", "1.5"),
    ("1.5万", "5"),
    ("3.5 million", "3.5"),
    ("这是一个问题，十分重要，以防万一", "1"),
    ("这是一个问题，十分重要，以防万一", "10"),
    ("这是一个问题，十分重要，以防万一", "10000"),
    ("百分之十二", "100"),
    ("thirty days", "30"),
    ("no number", "0"),
    ("", "0"),
    ("0.125", "125"),
    ("3-5", "-5"),
    ("9" * 100, "9"),
]


@pytest.mark.parametrize(("text", "number"), NOT_STATED)
def test_not_stated(text: str, number: str) -> None:
    assert Decimal(number) not in stated(text)


@pytest.mark.parametrize(
    ("value", "tolerance", "text", "found"),
    [
        ("100", 0, "100.0", True),
        ("100", 0, "100.1", False),
        ("100", 5, "about 105", True),
        ("100", 5, "about 105.1", False),
        ("100", 5, "about 95", True),
        ("-100", 5, "about -104", True),
        ("-100", 5, "about 104", False),
        ("0", 10, "0", True),
        ("0", 10, "0.01", False),
    ],
)
def test_tolerance(value: str, tolerance: int, text: str, found: bool) -> None:
    wanted = Number(value=value, tolerance_percent=tolerance)
    assert missing(text, [wanted]) == ([] if found else [wanted])


@given(st.integers(min_value=-(10**12), max_value=10**12))
def test_what_is_written_with_separators_is_read(number: int) -> None:
    assert Decimal(number) in stated(f"It was {number:,} in all.")
    assert Decimal(number) in stated(f"共 {number} 元")


@given(st.decimals(min_value=0, max_value=10**9, places=2))
def test_european_forms_are_read(number: Decimal) -> None:
    text = f"{number:,.2f}".replace(",", " ").replace(".", ",").replace(" ", ".")
    assert number in stated(text)


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    stated(text)


@pytest.mark.parametrize(
    "piece", ["9", "1,234,", "1 234 ", "1.234", "三百", "1万", "- ", "1e", "．", "1'000"]
)
def test_long_texts_take_no_longer_than_their_length(piece: str) -> None:
    began = time.thread_time()
    stated(piece * (60_000 // len(piece)))
    assert time.thread_time() - began < 5
