"""A process of its own that loads a model, fills its KV cache at full width, and prints what memory it holds.

Counted is what the kernel can't take back: anonymous pages, and weights that still lie in a mapped file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def _anonymous() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _mapped(model: Any) -> int:
    """Bytes of weights that lie in a mapped file."""
    files = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            first, last = line.split()[0].split("-")
            files.append((int(first, 16), int(last, 16)))
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    return sum(size for at, size in weights.items() if any(a <= at < b for a, b in files))


def main(directory: str, settings: str) -> None:
    from sluice_runtime import launch, models  # noqa: F401 - the server is part of what a pod holds
    from sluice_runtime.engine.engine import Engine
    from sluice_runtime.engine.plan import ScheduledChunk
    from sluice_runtime.engine.types import EngineConfig, KvCacheDtype

    e = json.loads(settings)
    source = models.ModelSource(
        path=Path(directory),
        dtype=e["dtype"],
        quantization=None if e["quantization"] == "None" else e["quantization"],
    )
    loaded = models.load(source)
    config = EngineConfig(
        max_num_seqs=e["maxNumSeqs"],
        max_batch_tokens=e["maxBatchTokens"],
        block_size=e["blockSize"],
        kv_cache_bytes=e["kvCacheBytes"],
        max_model_len=e["maxModelLen"],
        num_threads=1,
        kv_cache_dtype=KvCacheDtype(e["kvCacheDtype"]),
    )
    engine = Engine(loaded, config)
    engine._warm_up()
    width = engine._num_blocks // config.max_num_seqs
    length = min(width * config.block_size, engine.max_model_len)
    tables = [list(range(i * width, (i + 1) * width)) for i in range(config.max_num_seqs)]
    for i, table in enumerate(tables):
        for start in range(0, length - 1, config.max_batch_tokens):
            tokens = [1] * min(config.max_batch_tokens, length - 1 - start)
            engine._runner.execute([ScheduledChunk(str(i), tokens, start, table, True)])
    for _ in range(3):
        engine._runner.execute(
            [ScheduledChunk(str(i), [1], length - 1, table, True) for i, table in enumerate(tables)]
        )
    told = {"bytes": _anonymous() + _mapped(loaded.model), "blocks": engine._num_blocks}
    print(json.dumps({**told, "weights": loaded.weight_bytes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
