"""Kubernetes quantities, parsed strictly: a misspelt one must never become "no limit"."""

from __future__ import annotations

import re
from decimal import Decimal

_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_FACTOR = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
}


def parse(text: str) -> Decimal:
    """The number that ``text`` stands for; ValueError where it is not a quantity."""
    form = _FORM.fullmatch(text)
    if form is None:
        raise ValueError(f"{text!r} is not a quantity, such as 500m, 2 or 4Gi")
    return Decimal(form[1]) * _FACTOR[form[2] or ""]


def num_bytes(text: str) -> int:
    """Whole bytes; ValueError where ``text`` is not a quantity, or not a whole number of bytes."""
    value = parse(text)
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(value)
