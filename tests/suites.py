"""An EvalSuite that tests of releases share: who answers "Paris" passes."""

from __future__ import annotations

from typing import Any

FACTS: dict[str, Any] = {
    "apiVersion": "sluice.dev/v1alpha1",
    "kind": "EvalSuite",
    "metadata": {"name": "facts"},
    "spec": {
        "samples": [
            {
                "name": "capital",
                "task": "chat",
                "hard": True,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "expect": {"mustMatch": ["Paris"], "answer": "Answer", "maxSeconds": "30"},
            }
        ]
    },
}
