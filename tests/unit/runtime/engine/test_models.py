"""Loading: what is refused and why, identity, and the export of a GGUF."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_runtime.models import (
    CheckpointCorrupt,
    LoadedModel,
    ModelError,
    ModelNotFound,
    ModelSource,
    OutOfMemory,
    UnsafeFormat,
    UnsupportedModel,
    checkpoint,
    identity,
    load,
)
from sluice_runtime.models.__main__ import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, llama: Any, hf_tokenizer: Any) -> Path:
    path = tmp_path_factory.mktemp("saved")
    llama.reference.save_pretrained(path)
    hf_tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def _edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _load(path: Path, **options: Any) -> LoadedModel:
    return load(ModelSource(path=path, **({"dtype": "float32"} | options)))


def test_a_directory_loads_and_answers_like_the_original(directory: Path, llama: Any) -> None:
    model = _load(directory)
    assert model.identity.startswith("sha256:")
    assert model.max_position_embeddings == 256
    num_bytes = sum(p.numel() * 4 for p in llama.model.parameters())
    assert num_bytes <= model.weight_bytes < num_bytes * 1.01
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        assert torch.allclose(model.model(ids).logits, llama.reference(ids).logits, atol=1e-4)
    assert model.tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def _pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def _truncated(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def _garbage(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\x80\x04pickle" * 100)


def _empty(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


def _gone(path: Path) -> None:
    (path / "model.safetensors").unlink()


def _missing_shard(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-2.safetensors"}})
    )


def _shard_elsewhere(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))


def _missing_weight(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (_pickled, UnsafeFormat, "pytorch_model.bin"),
        (_truncated, CheckpointCorrupt, "its header says"),
        (_garbage, CheckpointCorrupt, "model.safetensors"),
        (_empty, CheckpointCorrupt, "truncated"),
        (_gone, ModelNotFound, "no safetensors or GGUF weights"),
        (_missing_shard, CheckpointCorrupt, "model-2.safetensors"),
        (_shard_elsewhere, UnsafeFormat, "outside"),
        (_missing_weight, CheckpointCorrupt, "model.norm.weight"),
        (lambda p: (p / "config.json").unlink(), ModelNotFound, "config.json"),
        (lambda p: (p / "config.json").write_text("{"), CheckpointCorrupt, "config.json"),
        (lambda p: _edit(p / "config.json", auto_map={"AutoModel": "x.Y"}), UnsafeFormat, "auto_map"),
        (
            lambda p: _edit(p / "tokenizer_config.json", auto_map={"AutoTokenizer": "x.Y"}),
            UnsafeFormat,
            "auto_map",
        ),
        (lambda p: _edit(p / "config.json", model_type="nonesuch"), UnsupportedModel, "nonesuch"),
        (lambda p: _edit(p / "config.json", hidden_size=64), CheckpointCorrupt, ""),
        (
            lambda p: _edit(
                p / "config.json", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2}
            ),
            UnsupportedModel,
            "dynamic",
        ),
        (shutil.rmtree, ModelNotFound, "no model at"),
    ],
)
def test_each_damage_has_its_reason(damage: Any, error: type[ModelError], says: str, directory: Path) -> None:
    damage(directory)
    with pytest.raises(error) as caught:
        _load(directory)
    assert says in str(caught.value)
    assert caught.value.reason == error.__name__


def test_a_pickle_file_and_a_repo_that_can_not_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.bin").write_bytes(b"x")
    with pytest.raises(UnsafeFormat):
        _load(tmp_path / "m.bin")
    (tmp_path / "m.gguf").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointCorrupt):
        _load(tmp_path / "m.gguf")

    def unreachable(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelNotFound, match="someone/model at revision v1"):
        load(ModelSource(repo="someone/model", revision="v1"))


def test_a_repo_is_taken_from_the_local_cache_at_its_revision(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def cached(repo: str, **options: Any) -> str:
        asked.append({"repo": repo, **options})
        if not options.get("local_files_only"):
            raise ConnectionError("no route")
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", cached)
    load(ModelSource(repo="someone/model", revision="v1", dtype="float32"))
    assert asked[-1]["revision"] == "v1"
    assert not any("bin" in pattern or "py" in pattern for pattern in asked[-1]["allow_patterns"])


def test_too_little_memory_is_found_before_loading(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "memory_available", lambda: 1000)
    with pytest.raises(OutOfMemory, match="MiB are left"):
        _load(directory)


def test_identity_follows_files_and_settings_and_nothing_else(directory: Path, tmp_path: Path) -> None:
    first = identity(directory)
    assert first == identity(Path(shutil.copytree(directory, tmp_path / "elsewhere")))
    (directory / "README.md").write_text("not loaded")
    assert identity(directory) == first
    assert identity(directory, {"dtype": "float32"}) != first
    base = _load(directory).identity
    assert base == _load(directory).identity
    assert base != _load(directory, dtype="bfloat16").identity
    kinds = {_load(directory, quantization=kind).identity for kind in ("Int8", "Int4", "W8A8")}
    assert len(kinds | {base}) == 4
    template = tmp_path / "t.jinja"
    template.write_text("{{ 1 }}")
    assert base != _load(directory, chat_template=template).identity
    (directory / "chat_template.jinja").write_text("{{ 2 }}")
    assert identity(directory) != first
    assert base != _load(directory).identity


def test_a_chat_template_may_be_replaced(directory: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0]['content'] }}!")
    tokenizer = _load(directory, chat_template=template).tokenizer
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == "hi!"
    with pytest.raises(ModelNotFound, match="chat template"):
        _load(directory, chat_template=tmp_path / "none")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_int8_stays_close_and_takes_less_memory(directory: Path, dtype: str, llama: Any) -> None:
    exact, quantised = _load(directory, dtype=dtype), _load(directory, dtype=dtype, quantization="Int8")
    assert quantised.weight_bytes < exact.weight_bytes
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        want = llama.reference(ids).logits
        for model in (exact, quantised):
            short, long = model.model(ids[:, :3]).logits.float(), model.model(ids).logits.float()
            assert torch.nn.functional.cosine_similarity(long, want, dim=-1).min() > 0.98
            assert torch.nn.functional.cosine_similarity(short, long[:, :3], dim=-1).min() > 0.995


@pytest.mark.model
def test_a_gguf_is_exported_as_an_ordinary_directory(smollm2: Path) -> None:
    names = {p.name for p in smollm2.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert all(p.stat().st_mode & 0o044 == 0o044 for p in smollm2.iterdir())
    model = load(ModelSource(path=smollm2))
    assert model.eos_token_ids == {2}
    assert model.tokenizer.encode_chat([{"role": "user", "content": "hi"}])[-3:] == [520, 9531, 198]


@pytest.mark.model
def test_a_gguf_is_exported_with_random_weights(smollm2: Path, random_smollm2: Path) -> None:
    broken = load(ModelSource(path=random_smollm2))
    assert identity(random_smollm2) != identity(smollm2)
    assert broken.max_position_embeddings == 8192
    assert broken.eos_token_ids == {2}


def test_the_command_tells_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["identity", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("ModelNotFound: ")
