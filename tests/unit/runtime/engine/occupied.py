"""A process of its own that loads a model, fills its KV cache at full width, and prints what memory it holds.

Counted is what the kernel can't take back: anonymous pages, also swapped out, and weights in a mapped file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def _anonymous() -> int:
    told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(told[name].split()[0]) for name in ("RssAnon", "VmSwap")) * 1024


def _mapped(model: Any) -> int:
    """Bytes of weights that lie in a mapped file."""
    files = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            first, last = line.split()[0].split("-")
            files.append((int(first, 16), int(last, 16)))
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    return sum(size for at, size in weights.items() if any(a <= at < b for a, b in files))


def main(directory: str, settings: str, draft_directory: str = "") -> None:
    from sluice_runtime import launch, models  # noqa: F401 - the server is part of what a pod holds
    from sluice_runtime.engine.engine import Engine
    from sluice_runtime.engine.plan import ScheduledChunk
    from sluice_runtime.engine.speculation.draft import Draft
    from sluice_runtime.engine.types import EngineConfig, KvCacheDtype, Speculation, SpeculationMethod

    e = json.loads(settings)
    source = models.ModelSource(
        path=Path(directory),
        dtype=e["dtype"],
        quantization=None if e["quantization"] == "None" else e["quantization"],
    )
    loaded = models.load(source)
    draft = speculation = None
    if draft_directory:
        draft = models.load(models.ModelSource(path=Path(draft_directory), dtype=e["dtype"]))
        speculation = Speculation(SpeculationMethod.DRAFT, e["numGuesses"])
    config = EngineConfig(
        max_num_seqs=e["maxNumSeqs"],
        max_batch_tokens=e["maxBatchTokens"],
        block_size=e["blockSize"],
        kv_cache_bytes=e["kvCacheBytes"],
        max_model_len=e["maxModelLen"],
        num_threads=1,
        kv_cache_dtype=KvCacheDtype(e["kvCacheDtype"]),
        speculation=speculation,
    )
    engine = Engine(loaded, config, draft=draft)
    engine._warm_up()
    width = engine._num_blocks // config.max_num_seqs
    length = min(width * config.block_size, engine.max_model_len)
    tables = [list(range(i * width, (i + 1) * width)) for i in range(config.max_num_seqs)]
    runners = [engine._runner]
    if engine._speculator is not None:
        proposer = engine._speculator._proposer
        assert isinstance(proposer, Draft)
        runners.insert(0, proposer._runner)
    for runner in runners:
        # What guesses reads token by token; what checks has all of a step's guesses at once.
        rows = 1 if runner is not engine._runner else 1 + e["numGuesses"]
        for i, table in enumerate(tables):
            for start in range(0, length - rows, config.max_batch_tokens):
                tokens = [1] * min(config.max_batch_tokens, length - rows - start)
                runner.execute([ScheduledChunk(str(i), tokens, start, table, True)])
        for _ in range(3):
            runner.execute(
                [
                    ScheduledChunk(str(i), [1] * rows, length - rows, table, True, rows - 1)
                    for i, table in enumerate(tables)
                ]
            )
    mapped = sum(_mapped(each.model) for each in (loaded, draft) if each is not None)
    told = {"bytes": _anonymous() + mapped, "blocks": engine._num_blocks}
    print(json.dumps({**told, "weights": loaded.weight_bytes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
