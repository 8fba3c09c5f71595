"""Suites of business samples: what is asked, how answers are checked, and what came of a run.

Everything but ``runner`` is pure. Invariant: what leaves this package about an answer names the expectation
and why it does not hold, never the answer's text.
"""
