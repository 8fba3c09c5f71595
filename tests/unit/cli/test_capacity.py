"""`sluice capacity`: what it prints, and its errors."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from sluice_operator.cli.capacity import capacity

SMOL = json.loads((Path(__file__).parents[3] / "docs/contracts/budget.json").read_text())["cases"][0][
    "config"
]
app = typer.Typer()
app.command()(capacity)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SMOL))
    return directory


def _file(tmp_path: Path, *, status: dict[str, Any] | None = None, **spec: Any) -> Path:
    whole = {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "InferenceBackend",
        "metadata": {"name": "smol", "namespace": "demo"},
        "spec": {
            "model": {"huggingFace": {"repo": "a/b", "revision": "main"}},
            "resources": {"limits": {"memory": "2Gi"}},
            **spec,
        },
        **({"status": status} if status else {}),
    }
    path = tmp_path / "backend.yaml"
    path.write_text("kind: Other\n---\n" + yaml.safe_dump(whole))
    return path


def _run(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def test_it_tells_where_memory_goes(tmp_path: Path, model: Path) -> None:
    code, text = _run("-f", _file(tmp_path), "--model-dir", model)
    assert code == 0
    assert "A token takes 23,040 bytes of KV; 256Mi hold 11,648 tokens in 728 blocks" in text
    assert "Sequences of 512 + 128 tokens: 16 surely, 16 typically (maxNumSeqs is 16)" in text
    assert "kvCacheMemory 256Mi fits" in text


def test_ranks_share_and_each_is_told(tmp_path: Path, model: Path) -> None:
    parallel = _file(tmp_path, engine={"tensorParallel": 3})
    code, text = _run("-f", parallel, "--model-dir", model, "--memory", "6Gi")
    assert code == 0
    assert "each of 3 ranks" in text
    assert (
        "A token takes 7,680 bytes of KV on each of 3 ranks; 256Mi hold 11,648 tokens in 728 blocks" in text
    )
    code, text = _run("-f", _file(tmp_path, engine={"tensorParallel": 2}), "--model-dir", model)
    assert code != 0
    assert "tensorParallel 2 does not divide this model's 9 heads" in text


def _drafting(path: str = "", **more: Any) -> dict[str, Any]:
    source = {"hostPath": {"path": path}} if path else {"huggingFace": {"repo": "a/c", "revision": "main"}}
    return {"speculation": {"method": "Draft", "draft": source, **more}}


def test_a_draft_is_counted(tmp_path: Path, model: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({**SMOL, "num_hidden_layers": 15}))
    arguments = ("--model-dir", model, "--memory", "4Gi")
    _, plain = _run("-f", _file(tmp_path), *arguments, "--json")
    file = _file(tmp_path, engine=_drafting())
    code, text = _run("-f", file, *arguments, "--draft-dir", draft, "--json")
    assert code == 0
    body, without = json.loads(text), json.loads(plain)
    assert (body["bytesPerToken"], body["numBlocks"]) == (23_040 + 11_520, 485)
    assert body["weights"] - without["weights"] == body["draftWeights"] > 0
    by_path = _file(tmp_path, engine=_drafting(str(draft)))
    code, text = _run("-f", by_path, *arguments)
    assert code == 0
    assert "of these the draft's" in text
    assert "A token takes 34,560 bytes of KV, those of the draft among them; 256Mi hold 7,760 tokens" in text


def test_a_draft_that_is_not_here_is_asked_for_by_its_field(tmp_path: Path, model: Path) -> None:
    field = "spec.engine.speculation.draft: "
    suffix, neither = {"method": "Suffix"}, {"method": "Draft"}
    for engine, options, says in (
        (_drafting(), (), field + "the draft is not on this machine: give --draft-dir"),
        (_drafting(), ("--draft-dir", tmp_path), field + f"there is no config.json in {tmp_path}: give"),
        (_drafting("/nowhere"), (), field + "there is no config.json in /nowhere: give --draft-dir"),
        ({"speculation": neither}, ("--draft-dir", model), field + "a draft model comes with method Draft"),
        ({"speculation": suffix}, ("--draft-dir", model), "--draft-dir: spec.engine.speculation names no"),
        ({}, ("--draft-dir", model), "--draft-dir: spec.engine.speculation names no draft"),
    ):
        code, text = _run("-f", _file(tmp_path, engine=engine), "--model-dir", model, *options)
        assert code == 1
        assert says in text


def test_what_does_not_fit_fails_and_says_what_would(tmp_path: Path, model: Path) -> None:
    code, text = _run("-f", _file(tmp_path, engine={"kvCacheMemory": "1500Mi"}), "--model-dir", model)
    assert code == 1
    assert "kvCacheMemory 1500Mi does not fit: the KV budget is" in text
    code, _ = _run(
        "-f", _file(tmp_path, engine={"kvCacheMemory": "1500Mi"}), "--model-dir", model, "--memory", "4Gi"
    )
    assert code == 0


def test_json_is_for_programs(tmp_path: Path, model: Path) -> None:
    code, text = _run("-f", _file(tmp_path), "--model-dir", model, "--json", "--rate", 5, "--seconds", 10)
    body = json.loads(text)
    assert code == 0
    assert (body["bytesPerToken"], body["numBlocks"], body["fits"]) == (23_040, 728, True)
    assert body["replicas"] == 4, "50 in flight, 16 a replica"


def test_replicas_by_littles_law_by_calibration_or_not_at_all(tmp_path: Path, model: Path) -> None:
    _, text = _run("-f", _file(tmp_path), "--model-dir", model, "--rate", 5)
    assert "give --seconds, the mean time of a request, or run sluice calibrate" in text
    _, text = _run("-f", _file(tmp_path), "--model-dir", model, "--rate", 5, "--seconds", 4)
    assert "are 20 in flight (Little's law): 2 replica(s) by memory" in text
    measured = {"safeRequestsPerSecond": "1.5", "meanSeconds": "4", "concurrency": "6"}
    file = _file(tmp_path, status={"capacity": measured})
    _, text = _run("-f", file, "--model-dir", model, "--rate", 5)
    assert "5 requests/s need 4 replica(s): each safely takes 1.5/s, as calibrated" in text


def test_the_headers_of_safetensors_are_counted(tmp_path: Path, model: Path) -> None:
    _, before = _run("-f", _file(tmp_path), "--model-dir", model, "--json")
    header = json.dumps({"a": {"shape": [140_000_000], "dtype": "BF16", "data_offsets": [0, 1]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    _, after = _run("-f", _file(tmp_path), "--model-dir", model, "--json")
    grown = json.loads(after)["weights"] - json.loads(before)["weights"]
    assert grown == 2 * (140_000_000 - 134_514_432)


def _damaged(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"x")


@pytest.mark.parametrize(
    ("spoil", "spec", "says"),
    [
        (lambda m: (m / "config.json").unlink(), {}, "give --model-dir"),
        (lambda m: (m / "config.json").write_text("["), {}, "no readable JSON"),
        (lambda m: (m / "config.json").write_text("[]"), {}, "no JSON object"),
        (lambda m: (m / "config.json").write_text("{}"), {}, "has no hidden_size"),
        (_damaged, {}, "is damaged, or no safetensors file"),
        (lambda m: None, {"engine": {"maxModelLen": 128}}, "may have 128: raise spec.engine.maxModelLen"),
        (lambda m: None, {"engine": {"kvCacheMemory": "1Xi"}}, "spec.engine.kvCacheMemory"),
        (lambda m: None, {"engine": {"maxModelLen": 1}}, "maxModelLen"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(
    spoil: Any, spec: dict[str, Any], says: str, tmp_path: Path, model: Path
) -> None:
    spoil(model)
    code, text = _run("-f", _file(tmp_path, **spec), "--model-dir", model)
    assert code == 1
    assert says in text
    assert "Traceback" not in text


def test_a_file_without_a_backend(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("kind: Other\n")
    code, text = _run("-f", path, "--model-dir", model)
    assert code == 1
    assert "has 0 InferenceBackends" in text
    path.write_text("a: [")
    assert "is no YAML" in _run("-f", path)[1]


@pytest.mark.parametrize("beside", ["quantize_config.json", "quant_config.json"])
def test_weights_that_only_an_older_file_calls_quantised_are_refused(
    tmp_path: Path, model: Path, beside: str
) -> None:
    (model / beside).write_text(json.dumps({"bits": 4, "group_size": 128}))
    code, text = _run("-f", _file(tmp_path), "--model-dir", model)
    assert code != 0
    assert f"{beside} says that the weights are quantised" in text.replace("\n", " ")
    told = {**SMOL, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    (model / "config.json").write_text(json.dumps(told))
    assert _run("-f", _file(tmp_path), "--model-dir", model)[0] == 0


def test_how_weights_are_stored_is_told_of_the_whole_model(tmp_path: Path, model: Path) -> None:
    """A text model within another: its sizes are nested, and `quantization_config` is not."""
    stored = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    weights = []
    for config in ({"text_config": SMOL}, {"text_config": SMOL, **stored}, {**SMOL, **stored}):
        (model / "config.json").write_text(json.dumps(config))
        code, text = _run("-f", _file(tmp_path), "--model-dir", model, "--json")
        assert code == 0
        weights.append(json.loads(text)["weights"])
    assert weights[0] > weights[1] == weights[2]
