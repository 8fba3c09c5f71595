"""`python -m sluice_runtime`: one pod that serves one model. torch is imported only once there is a sound
checkpoint to load."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sluice_runtime import launch
from sluice_runtime.backend import BackendSpec, EngineSpec, ModelSpec, digest
from sluice_runtime.state import EnginePort, Identity

if TYPE_CHECKING:
    from sluice_runtime.engine.engine import Engine
    from sluice_runtime.engine.team import Team
    from sluice_runtime.models import LoadedModel, ModelSource

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

With "tensorParallel": N in "engine" it starts N-1 more processes, which end with it.

Exit codes: 0 after SIGTERM, 2 wrong flags, 3 nothing to serve, 4 a tensor-parallel process was lost. Why is
in the termination message: /dev/termination-log, or the file that SLUICE_TERMINATION_LOG names.
"""


def load(spec: BackendSpec, device: str, ending: launch.Ending) -> tuple[EnginePort, Identity]:
    """Load and warm up; raises a `ModelError` that says why not. `ending`: for when a rank is lost."""
    from sluice_runtime import models

    settings = spec.engine
    wanted = replace(
        _source(spec.model, settings, device),
        quantization=None if settings.quantization == "None" else settings.quantization,
        num_ranks=settings.tensor_parallel,
    )
    draft = None
    if wanted.num_ranks == 1:
        model = models.load(wanted)
        draft = _load_draft(settings, model.source.device)
        engine = _engine(model, settings, draft=draft)
    else:
        engine = _load_on_ranks(wanted, settings, ending)
        ending.tell_first(engine.abandon)
    engine.start()
    runtime = launch.runtime_digest("torch", "transformers", "tokenizers", "llguidance")
    identity = engine.model.identity
    if draft is not None:
        identity = digest({"model": identity, "draft": draft.identity})
    return engine, Identity(identity, spec.settings_digest, runtime)


def _source(model: ModelSpec, settings: EngineSpec, device: str) -> ModelSource:
    """A model as its files are, in the engine's element type."""
    from sluice_runtime import models

    return models.ModelSource(
        path=Path(model.path) if model.path is not None else None,
        repo=model.repo,
        revision=model.revision,
        gguf_file=model.file,
        dtype=settings.dtype,
        device=device,
    )


def _load_draft(settings: EngineSpec, device: str) -> LoadedModel | None:
    """The draft, of the model's element type and as its files are. Raises a `ModelError` that names the
    field."""
    if settings.speculation is None or settings.speculation.draft is None:
        return None
    from sluice_runtime import models

    try:
        return models.load(_source(settings.speculation.draft, settings, device))
    except models.ModelError as error:
        raise type(error)(f"engine.speculation.draft: {error}") from error


def _load_on_ranks(source: ModelSource, settings: EngineSpec, ending: launch.Ending) -> Engine:
    """With other processes beside this one, which hold and compute their share of the model."""
    from sluice_runtime import models

    models.inspect_and_weigh(source)  # what it refuses costs no process
    from sluice_runtime.engine import parallel
    from sluice_runtime.engine.types import KvCacheDtype

    team = parallel.start(
        source,
        settings.block_size,
        settings.num_threads,
        ending,
        kv_cache_dtype=KvCacheDtype(settings.kv_cache_dtype),
    )
    try:
        return _engine(models.load(source), settings, team)
    except BaseException:
        team.stop(patience_s=0)
        raise


def _engine(
    model: LoadedModel, settings: EngineSpec, team: Team | None = None, draft: LoadedModel | None = None
) -> Engine:
    # These need torch: a missing model is reported before that.
    from sluice_runtime.engine import parallel
    from sluice_runtime.engine.engine import Engine
    from sluice_runtime.engine.types import EngineConfig, KvCacheDtype, Speculation, SpeculationMethod

    num_threads = settings.num_threads
    if team is not None:
        num_threads = parallel.threads_of_rank(num_threads, settings.tensor_parallel)
    config = EngineConfig(
        max_num_seqs=settings.max_num_seqs,
        max_batch_tokens=settings.max_batch_tokens,
        block_size=settings.block_size,
        kv_cache_bytes=settings.kv_cache_bytes,
        max_model_len=settings.max_model_len,
        max_queue=settings.max_queue,
        num_threads=num_threads,
        device=model.source.device,
        num_ranks=settings.tensor_parallel,
        kv_cache_dtype=KvCacheDtype(settings.kv_cache_dtype),
        kv_offload_bytes=settings.kv_offload_bytes or 0,
        speculation=None
        if settings.speculation is None
        else Speculation(SpeculationMethod(settings.speculation.method), settings.speculation.num_tokens),
    )
    if team is None:
        return Engine(model, config, draft=draft)
    return Engine(model, config, partial(parallel.LeadingRunner, team))


def main(argv: list[str] | None = None) -> int:
    parser = launch.parser("python -m sluice_runtime", DESCRIPTION, EPILOG)
    parser.add_argument(
        "--device",
        default="auto",
        help="auto (CUDA where there is one), cpu, cuda or cuda:N; default %(default)s",
    )
    options: argparse.Namespace = parser.parse_args(argv)
    ending = launch.Ending()
    return launch.run(
        options,
        lambda spec: launch.Started(lambda: load(spec, options.device, ending), attach=ending.attach),
    )


if __name__ == "__main__":
    sys.exit(main())
