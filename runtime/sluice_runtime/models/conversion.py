"""A GGUF becomes an ordinary Hugging Face directory: what the demo and the tests serve."""

from __future__ import annotations

from pathlib import Path

from sluice_runtime.models.checkpoint import Dtype, ModelSource
from sluice_runtime.models.digest import identity
from sluice_runtime.models.errors import typed_errors
from sluice_runtime.models.loader import inspect_and_weigh


def export(gguf: Path, out: Path, dtype: Dtype = "bfloat16", random_weights: int | None = None) -> str:
    """Write a GGUF as a Hugging Face directory: safetensors, tokenizer, chat template. Returns its identity.

    With `random_weights` (a seed) the weights are drawn anew: the same model in form, a broken one in
    content.
    """
    source = ModelSource(path=gguf, dtype=dtype)
    checkpoint = inspect_and_weigh(source)
    from sluice_runtime.models import pretrained  # torch and transformers, so after inspection

    pretrained.quiet()
    with typed_errors(source.name), pretrained.parsed_gguf(checkpoint):
        tokenizer = pretrained.load_tokenizer(checkpoint, source)
        if random_weights is None:
            model = pretrained.load_weights(checkpoint, source)
        else:
            model = pretrained.draw_weights(checkpoint, source, random_weights)
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes 0600; the pod that reads it is another user
    return identity(out)
