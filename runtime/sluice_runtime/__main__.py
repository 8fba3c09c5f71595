"""`python -m sluice_runtime`: one pod that serves one model. torch is imported only once there is a sound
checkpoint to load."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sluice_runtime import launch
from sluice_runtime.backend import BackendSpec
from sluice_runtime.state import EnginePort, Identity

DESCRIPTION = """\
Serve one language model by the OpenAI API, as one pod of a Sluice InferenceBackend.

Port 8000 answers /v1/chat/completions, /v1/completions, /v1/models, /healthz, /readyz and /metrics.
Port 9000 is the operator's: configurations in, evidence out.
"""

EPILOG = """\
Try it without a cluster:

  cat > backend.json <<'EOF'
  {"name": "local/smol", "model": {"repo": "HuggingFaceTB/SmolLM2-135M-Instruct"},
   "engine": {"dtype": "bfloat16", "quantization": "None", "maxModelLen": 2048, "maxNumSeqs": 8,
              "maxBatchTokens": 512, "blockSize": 16, "kvCacheBytes": 536870912, "maxQueue": 32}}
  EOF
  python -m sluice_runtime --config backend.json --insecure-no-credential
  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "local/smol", "messages": [{"role": "user", "content": "Hello"}]}'

Exit codes: 0 after SIGTERM, 2 wrong flags, 3 nothing to serve (why is in the termination message:
/dev/termination-log, or the file that SLUICE_TERMINATION_LOG names).
"""


def load(spec: BackendSpec, device: str) -> tuple[EnginePort, Identity]:
    """Load and warm up; raises a `ModelError` that says why not."""
    from sluice_runtime import models

    source, settings = spec.model, spec.engine
    model = models.load(
        models.ModelSource(
            path=Path(source.path) if source.path is not None else None,
            repo=source.repo,
            revision=source.revision,
            gguf_file=source.file,
            dtype=settings.dtype,
            quantization="int8" if settings.quantization == "Int8" else None,
            device=device,
        )
    )
    from sluice_runtime.engine.engine import Engine  # needs torch: a missing model is reported before that
    from sluice_runtime.engine.types import EngineConfig

    engine = Engine(
        model,
        EngineConfig(
            max_num_seqs=settings.max_num_seqs,
            max_batch_tokens=settings.max_batch_tokens,
            block_size=settings.block_size,
            kv_cache_bytes=settings.kv_cache_bytes,
            max_model_len=settings.max_model_len,
            max_queue=settings.max_queue,
            num_threads=settings.num_threads,
            device=model.source.device,
        ),
    )
    engine.start()
    runtime = launch.runtime_digest("torch", "transformers", "tokenizers", "llguidance")
    return engine, Identity(model.identity, spec.settings_digest, runtime)


def main(argv: list[str] | None = None) -> int:
    parser = launch.parser("python -m sluice_runtime", DESCRIPTION, EPILOG)
    parser.add_argument(
        "--device",
        default="auto",
        help="auto (CUDA where there is one), cpu, cuda or cuda:N; default %(default)s",
    )
    options: argparse.Namespace = parser.parse_args(argv)
    return launch.run(options, lambda spec: launch.Started(lambda: load(spec, options.device)))


if __name__ == "__main__":
    sys.exit(main())
