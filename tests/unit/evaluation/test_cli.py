"""`sluice evaluate -f`: rates, failing samples with reasons, exit codes, and no answer's text unasked."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from sluice_operator.cli.evaluate import evaluate

APP = typer.Typer()
APP.command()(evaluate)
SECRET = "zqx7"
SAMPLES = [
    {"name": "days", "task": "kb-qa", "expect": {"mustMatch": ["30"]}},
    {"name": "tone", "task": "kb-qa", "expect": {"mustNotMatch": [SECRET]}},
    {"name": "private", "task": "compliance", "hard": True, "expect": {"answer": "Refusal"}},
]


def suite(**spec: Any) -> dict[str, Any]:
    samples = [{"messages": [{"role": "user", "content": s["name"]}], **s} for s in SAMPLES]
    manifest = {"apiVersion": "sluice.dev/v1alpha1", "kind": "EvalSuite", "metadata": {"name": "shop"}}
    return manifest | {"spec": spec or {"samples": samples}}


def written(path: Path, *documents: Any) -> str:
    path.write_text(yaml.safe_dump_all(documents))
    return str(path)


@contextmanager
def service(answer: Callable[[str], str], seen: list[Any] | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if seen is not None:
                seen.append((self.headers, body))
            if "answer" in body:
                data = json.dumps({"ok": "30" in body["answer"]["text"], "reason": "no number"}).encode()
            else:
                message = {"content": answer(body["messages"][-1]["content"])}
                data = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def good(question: str) -> str:
    return "I can't share that." if question == "private" else "It is 30 days."


def leaking(question: str) -> str:
    return f"{SECRET}: here you are." if question == "private" else "It is 30 days."


def partly(question: str) -> str:
    return f"It is 60 days {SECRET}." if question == "tone" else good(question)


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(APP, list(arguments), env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_all_pass(tmp_path: Path) -> None:
    with service(good) as url:
        code, out, _ = invoke("-f", written(tmp_path / "s.yaml", suite()), "--url", url)
    assert code == 0
    assert [line.split() for line in out.splitlines()[1:3]] == [
        ["compliance", "1/1", "100.0", "%"],
        ["kb-qa", "2/2", "100.0", "%"],
    ]
    assert "✗" not in out


def test_a_hard_sample_that_fails_is_exit_code_1(tmp_path: Path) -> None:
    with service(leaking) as url:
        code, out, err = invoke("-f", written(tmp_path / "s.yaml", suite()), "--url", url)
    assert code == 1
    assert "✗ shop/private  compliance  hard" in out
    assert "answer: does not refuse, and must" in out
    assert "not good enough: hard sample shop/private failed" in out
    assert SECRET not in out + err


def test_another_sample_that_fails_counts_by_task(tmp_path: Path) -> None:
    file = written(tmp_path / "s.yaml", suite())
    with service(partly) as url:
        code, out, _ = invoke("-f", file, "--url", url)
        assert (code, "1/2" in out) == (0, True)
        code, out, _ = invoke("-f", file, "--url", url, "--min-pass", "50")
        assert code == 0
        code, out, _ = invoke("-f", file, "--url", url, "--min-pass", "51")
    assert code == 1
    assert "not good enough: kb-qa: 50.0 % passed, less than 51 %" in out


def test_json(tmp_path: Path) -> None:
    with service(partly) as url:
        code, out, _ = invoke("-f", written(tmp_path / "s.yaml", suite()), "--url", url, "-o", "json")
    told = json.loads(out)
    assert (code, told["ok"], told["notGoodEnough"]) == (0, True, [])
    assert told["tasks"][1] == {"task": "kb-qa", "numSamples": 2, "numPassed": 1, "percent": 50.0}
    assert [(f["sample"], f["hard"], f["failures"]) for f in told["failed"]] == [
        ("shop/tone", False, [{"expectation": "mustNotMatch[0]", "why": f"has a match of `{SECRET}`"}])
    ]
    assert told["suites"][0].startswith("shop@sha256:")


def test_compared_with_stable(tmp_path: Path) -> None:
    file = written(tmp_path / "s.yaml", suite())
    with service(partly) as url, service(good) as stable:
        code, out, _ = invoke("-f", file, "--url", url, "--stable-url", stable)
        assert code == 0
        assert "kb-qa       1/2     50.0 %   100.0 %  50.0" in out
        code, out, _ = invoke("-f", file, "--url", url, "--stable-url", stable, "--max-drop", "49")
    assert code == 1
    assert "kb-qa: 50.0 points below stable, more than 49" in out


def test_only_some_tasks(tmp_path: Path) -> None:
    file = written(tmp_path / "s.yaml", suite())
    with service(leaking) as url:
        code, out, _ = invoke("-f", file, "--url", url, "--task", "kb-qa")
        assert (code, "compliance" in out) == (0, False)
        code, _, err = invoke("-f", file, "--url", url, "--task", "sums")
    assert (code, err) == (1, "error: no sample has the task sums; the tasks are compliance, kb-qa\n")


def test_answers_are_saved_where_asked_for_and_for_the_owner_alone(tmp_path: Path) -> None:
    saved = tmp_path / "failing.json"
    with service(leaking) as url:
        _, out, err = invoke("-f", written(tmp_path / "s.yaml", suite()), "--url", url, "--save", str(saved))
    [failing] = json.loads(saved.read_text())
    assert (failing["sample"], failing["answer"]["text"]) == ("shop/private", f"{SECRET}: here you are.")
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert SECRET not in out + err


def test_key_model_and_temperature_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_KEY", "k-1")
    file, seen = written(tmp_path / "s.yaml", suite()), list[Any]()
    with service(good, seen) as url:
        options = ["--model", "shop", "--api-key-env", "SHOP_KEY", "--temperature", "0"]
        code, out, err = invoke("-f", file, "--url", url, *options)
    headers, body = seen[0]
    assert code == 0
    assert (headers["authorization"], body["model"], body["temperature"]) == ("Bearer k-1", "shop", 0)
    assert "k-1" not in out + err


def test_samples_from_a_config_map_and_as_a_list(tmp_path: Path) -> None:
    samples = suite()["spec"]["samples"]
    config = {
        "kind": "ConfigMap",
        "metadata": {"name": "cases"},
        "data": {"samples.yaml": yaml.safe_dump(samples)},
    }
    both = written(tmp_path / "both.yaml", config, suite(samplesFrom={"name": "cases"}))
    plain = written(tmp_path / "plain.yaml", samples)
    with service(good) as url:
        code, out, _ = invoke("-f", both, "-f", plain, "--url", url, "-o", "json")
    assert code == 0
    names = [label.partition("@") for label in json.loads(out)["suites"]]
    assert [name for name, _, _ in names] == ["shop", "plain"]
    assert names[0][2] == names[1][2]


def test_a_checker_of_the_users(tmp_path: Path) -> None:
    sample = {"name": "a", "task": "t", "messages": [{"role": "user", "content": "x"}]}
    expect = {"http": {"name": "judge", "port": 80, "path": "/check"}}
    file = written(tmp_path / "s.yaml", [sample | {"hard": True, "expect": expect}])
    with service(lambda _: "60") as url:
        code, out, _ = invoke("-f", file, "--url", url, "--http-checker", f"judge={url}")
        assert code == 1
        assert "http: checker judge says no (no number)" in out
        code, out, _ = invoke("-f", file, "--url", url)
    assert code == 1
    assert "http: checker judge can't be asked from here" in out


def test_a_service_that_is_away_is_no_pass(tmp_path: Path) -> None:
    with service(good) as url:
        pass
    code, out, _ = invoke("-f", written(tmp_path / "s.yaml", suite()), "--url", url)
    assert code == 1
    assert "not good enough: candidate: no sample was answered" in out


def test_a_run_that_is_interrupted_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sluice_operator.cli.evaluate.run", interrupted)
    assert invoke("-f", written(tmp_path / "s.yaml", suite()), "--url", "http://x")[0] == 130


MISTAKES = [
    ([], "nothing to run: give -f SUITE.yaml"),
    (["-f", "FILE"], "--url is missing"),
    (["-f", "FILE", "assistant", "--url", "http://x"], "give one of the two"),
    (["-f", "FILE", "--url", "http://x", "--max-drop", "3"], "give --stable-url too"),
    (["-f", "FILE", "--url", "http://x", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY holds no API key"),
    (["-f", "FILE", "--url", "http://x", "--http-checker", "judge"], "give NAME=URL"),
    (["-f", "FILE", "-f", "FILE", "--url", "http://x"], "two suites are named shop"),
    (["-f", "/no/such/file", "--url", "http://x"], "/no/such/file: can't be read: No such file"),
]


@pytest.mark.parametrize(("arguments", "why"), MISTAKES)
def test_mistakes_are_one_line(tmp_path: Path, arguments: list[str], why: str) -> None:
    file = written(tmp_path / "s.yaml", suite())
    code, out, err = invoke(*[file if argument == "FILE" else argument for argument in arguments])
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert why in err


FILES = [
    ("", "holds no EvalSuite and no list of samples"),
    ("a: [", "not YAML at line 2"),
    ("kind: EvalSuite", "apiVersion: must be sluice.dev/v1alpha1"),
    ("apiVersion: sluice.dev/v1alpha1\nkind: EvalSuite", "metadata.name: Field required"),
    ("apiVersion: sluice.dev/v1alpha1\nkind: EvalSuite\nmetadata: {name: a}\nspec: {}", "give samples or"),
    ("apiVersion: sluice.dev/v1alpha1\nkind: EvalSuite\nmetadata: {name: a}\nspec: {samples: [{name: b}]}",
     "spec.samples[0].task: Field required"),
    ("apiVersion: sluice.dev/v1alpha1\nkind: EvalSuite\nmetadata: {name: a}\nspec: {samplesFrom: {name: b}}",
     "ConfigMap 'b' does not exist"),
    ("- {name: a}", "[0].task: field required"),
    ("[]", "must be a list of one or more samples"),
    ("kind: Pod", "holds no EvalSuite"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "why"), FILES)
def test_files_that_are_no_suites(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    code, _, err = invoke("-f", str(file), "--url", "http://x")
    assert code == 1
    assert err.startswith(f"error: {file}: ")
    assert why in err
    assert err.count("\n") == 1
