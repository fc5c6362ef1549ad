"""The command line's contract, as far as it needs no server: exit codes, JSON on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from loraflow.adapter import take_snapshot, write_adapter
from loraflow.cli import app
from loraflow.errors import AdapterError, LoraflowError
from tests.helpers.tiny import peft_model
from tests.unit.test_adapter import KINDS

runner = CliRunner()


def run(*args: str) -> tuple[int, Any, str]:
    result = runner.invoke(app, [args[0], "--json", *args[1:]])
    return result.exit_code, json.loads(result.stdout) if result.stdout.strip() else None, result.stderr


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(take_snapshot(peft_model(tiny_model)), folder)
    return folder


def test_check_servable(adapter: Path, tiny_model: Path) -> None:
    code, answer, _ = run("check", str(adapter), "--base", str(tiny_model))
    assert code == 0
    assert answer == {"servable": True, "transport": "adapter", "problems": []}


def test_check_only_merged(tiny_model: Path, tmp_path: Path) -> None:
    peft_model(tiny_model, use_dora=True).save_pretrained(tmp_path)
    code, answer, _ = run("check", str(tmp_path), "--base", str(tiny_model))
    assert code == 3
    assert (answer["servable"], answer["transport"]) == (True, "merged")
    assert {p["code"] for p in answer["problems"]} == {"unsupported_feature"}


def test_check_rank_above_the_servers(adapter: Path, tiny_model: Path) -> None:
    code, answer, _ = run("check", str(adapter), "--base", str(tiny_model), "--max-lora-rank", "4")
    assert code == 3
    assert {p["code"] for p in answer["problems"]} == {"rank_too_large"}


def test_check_damaged(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(iter(tensors))
    tensors[name.replace("model.layers", "model._orig_mod.layers")] = tensors.pop(name)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    code, answer, _ = run("check", str(tmp_path), "--base", str(tiny_model))
    assert code == 1
    assert (answer["servable"], answer["transport"]) == (False, None)
    assert {p["code"] for p in answer["problems"]} >= {"unknown_module"}


def test_check_nothing_there(tiny_model: Path, tmp_path: Path) -> None:
    code, answer, _ = run("check", str(tmp_path / "none"), "--base", str(tiny_model))
    assert code == 1
    assert {p["code"] for p in answer["problems"]} == {"missing_file"}


def test_serve_prints_the_command() -> None:
    code, answer, _ = run("serve", "some/model", "--max-lora-rank", "12", "--print-command", "--", "--dtype", "float32")
    assert code == 0
    argv = answer["argv"]
    assert argv[argv.index("--max-lora-rank") + 1] == "16"
    assert argv[-2:] == ["--dtype", "float32"]
    assert answer["env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"


@pytest.mark.parametrize("backend", ["ipc", "nccl", "gloo"])
def test_serve_takes_the_way_of_merged_broadcasts(backend: str) -> None:
    code, answer, _ = run("serve", "some/model", "--merged", "--weight-transfer", backend, "--print-command")
    assert code == 0
    argv = answer["argv"]
    assert json.loads(argv[argv.index("--weight-transfer-config") + 1]) == {"backend": backend}


def test_serve_without_a_model() -> None:
    code, answer, _ = run("serve", "--print-command")
    assert code == 1
    assert "MODEL" in answer["error"]["message"]


@pytest.mark.parametrize("command", ["status", "plan"])
def test_unreachable(command: str) -> None:
    code, answer, stderr = run(command, "--server", "http://127.0.0.1:9")
    assert code == 1
    assert answer["error"]["type"] in {"Unreachable", "SyncTimeout"}
    assert "loraflow serve" in stderr


def test_push_unreachable(adapter: Path) -> None:
    code, answer, _ = run("push", str(adapter), "--server", "http://127.0.0.1:9", "--timeout", "0.2")
    assert code == 1
    assert answer["error"]["type"] == "SyncTimeout"


def test_doctor_names_what_is_wrong() -> None:
    code, answer, _ = run("doctor", "--server", "http://127.0.0.1:9")
    assert code == 1
    assert answer["ok"] is False
    assert [f["what"] for f in answer["findings"] if f["state"] == "problem"] == ["server http://127.0.0.1:9"]


@pytest.mark.parametrize("root", ["/proc/loraflow", "/proc/version"])
def test_doctor_sees_a_store_that_cannot_be_written_to(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of the user who was first on this host."""
    monkeypatch.setattr("loraflow.commands.doctor.default_adapter_root", lambda: root)
    code, answer, _ = run("doctor")
    [store] = [finding for finding in answer["findings"] if finding["what"] == "Adapter store"]
    assert (code, store["state"]) == (1, "problem")
    assert "--adapter-root" in store["advice"]


def test_unknown_option_is_a_usage_error() -> None:
    assert runner.invoke(app, ["check", "--bass", "x"]).exit_code == 2


@pytest.mark.parametrize(
    "args",
    [
        ("check",),
        ("check", "x", "--bass", "y"),
        ("check", "x", "--base", "y", "--max-lora-rank", "0"),
        ("plan",),
        ("push", "x", "--server", "http://127.0.0.1:9", "--transport", "teleport"),
        ("serve", "m", "--port", "70000"),
        ("serve", "m", "--weight-transfer", "pigeon"),
        ("serve", "m", "--max-staleness", "-1"),
        ("bench", "--repeats", "0"),
        ("demo", "--steps", "0"),
        ("nothing",),
    ],
    ids=" ".join,
)
def test_a_wrong_call_is_told_in_a_document_too(args: tuple[str, ...]) -> None:
    code, answer, stderr = run(*args)
    assert code == 2
    assert answer["error"]["type"] == "UsageError"
    assert answer["error"]["message"] in stderr


def test_a_base_that_cannot_be_read(adapter: Path, tmp_path: Path) -> None:
    for content, name in (("{", "cut"), ("[]", "list"), ('{"model_type": "qwen2", "num_attention_heads": 0}', "odd")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
        code, answer, _ = run("check", str(adapter), "--base", str(tmp_path / name))
        assert (code, answer["servable"], answer["transport"]) == (1, False, None)
        assert {p["code"] for p in answer["problems"]} <= {"missing_file", "base_mismatch"}
    code, answer, _ = run("check", str(adapter), "--base", str(adapter))
    assert (code, answer["servable"]) == (1, False)
    assert "folder of an adapter" in answer["problems"][0]["message"]
    for misspelt in (str(tmp_path / "nowhere"), "./nowhere", "models/of/mine", ""):
        code, answer, _ = run("check", str(adapter), "--base", misspelt)
        assert (code, answer["servable"]) == (1, False)
        assert "there is no such folder" in answer["problems"][0]["message"]


@pytest.mark.parametrize("command", ["push", "plan"])
def test_an_adapter_is_looked_at_before_the_servers_are_waited_for(command: str, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 0}')
    for folder, code in ((adapter / "adapter_config.json", "missing_file"), (tmp_path, "bad_config")):
        given = (str(folder),) if command == "push" else ("--adapter", str(folder))
        exit_code, answer, _ = run(command, *given, "--server", "http://127.0.0.1:9")
        assert exit_code == 1
        assert code in {problem["code"] for problem in answer["error"]["problems"]}


@pytest.mark.parametrize(
    ("raised", "kind", "code"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt", 130),
        (PermissionError(13, "no"), "PermissionError", 1),
        (ZeroDivisionError("x"), "ZeroDivisionError", 1),
    ],
)
def test_whatever_happens_there_is_one_document(
    raised: BaseException, kind: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loraflow.commands import status as module

    def fails(_: Any) -> None:
        print("a library says something")
        raise raised

    monkeypatch.setattr(module, "status", fails)
    exit_code, answer, stderr = run("status", "--server", "http://127.0.0.1:9")
    assert (exit_code, answer["error"]["type"]) == (code, kind)
    assert "a library says something" in stderr
    assert "Traceback" not in stderr


def test_numbers_that_json_has_no_words_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraflow.commands import doctor as module

    report = {"ok": True, "findings": [], "servers": {"a": float("nan"), "b": {float("inf")}}}
    monkeypatch.setattr(module, "doctor", lambda _: report)
    result = runner.invoke(app, ["doctor", "--json"])
    answer = json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert answer["servers"] == {"a": None, "b": [None]}


def test_in_a_process_of_its_own_stdout_is_the_document_alone(tmp_path: Path) -> None:
    """Also what C libraries and child processes print; and Ctrl-C while modules are still being imported."""
    script = tmp_path / "call.py"
    script.write_text(
        "import os, sys\n"
        "from loraflow.cli import main\n"
        "import loraflow.launch\n"
        "real = loraflow.launch.serve_command\n"
        "def noisy(options):\n"
        "    os.write(1, b'from C')\n"
        "    os.system('echo from a child')\n"
        "    if sys.argv[2] == 'interrupt':\n"
        "        raise KeyboardInterrupt\n"
        "    return real(options)\n"
        "loraflow.launch.serve_command = noisy\n"
        "main()\n"
    )
    for model, code in (("m", 0), ("interrupt", 130)):
        call = [sys.executable, str(script), "serve", model, "--json", "--print-command"]
        done = subprocess.run(call, capture_output=True, text=True, timeout=300)
        assert done.returncode == code
        assert set(json.loads(done.stdout)) == ({"argv", "env", "url"} if code == 0 else {"error"})
        assert "from C" in done.stderr
        assert "from a child" in done.stderr


@pytest.mark.parametrize("args", [("check", "--json"), ("--help",)], ids=" ".join)
@pytest.mark.parametrize("reader", ["gone", "full disk"])
def test_an_output_that_takes_nothing_is_told_in_a_line(args: tuple[str, ...], reader: str) -> None:
    if reader == "gone":
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open("/dev/full", os.O_WRONLY)
    with os.fdopen(write, "wb") as stdout:
        call = [sys.executable, "-m", "loraflow", *args]
        done = subprocess.run(call, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert reader == "gone" or "No space left on device" in done.stderr


@pytest.mark.parametrize("args", [("serve", "--json"), ("doctor",)], ids=" ".join)
def test_no_command_fails_for_what_stdout_is(args: tuple[str, ...]) -> None:
    """One that is closed, and one whose encoding lacks the signs that tables are made of."""
    call = [sys.executable, "-m", "loraflow", *args]
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "timeout": 300}
    usual = subprocess.run(call, stdout=subprocess.PIPE, **options)
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *call], **options)
    narrow = subprocess.run(
        call, stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "5"}, **options
    )
    for done in (closed, narrow):
        assert done.returncode == usual.returncode
        assert b"Traceback" not in done.stderr
    assert narrow.stdout.isascii()


# ---------------------------------------------------------------- serve


@pytest.mark.parametrize(
    ("args", "url"),
    [
        (("--host", "::1", "--port", "9000"), "http://[::1]:9000"),
        (("--host", "0.0.0.0"), "http://127.0.0.1:8000"),
        (("--", "--port", "9001", "--host=::"), "http://[::1]:9001"),
        (("--port", "1", "--", "--port=9001"), "http://127.0.0.1:9001"),
        (("--", "--ssl-keyfile", "k.pem", "--ssl-certfile=c.pem"), "https://127.0.0.1:8000"),
        (("--host", "::", "--", "--ssl_keyfile=k.pem", "--ssl_certfile=c.pem"), "https://[::1]:8000"),
    ],
)
def test_serve_tells_where_it_is_reached(args: tuple[str, ...], url: str) -> None:
    code, answer, _ = run("serve", "m", "--print-command", *args)
    assert (code, answer["url"]) == (0, url)


@pytest.mark.parametrize(
    "args",
    [
        ("--axolotl", "c.yaml", "--port", "9000"),
        ("--axolotl", "c.yaml", "--merged"),
        ("m", "--axolotl", "c.yaml"),
        ("m", "--merged", "--max-lora-rank", "8"),
    ],
    ids=" ".join,
)
def test_serve_reads_every_option_or_refuses_it(args: tuple[str, ...]) -> None:
    code, answer, _ = run("serve", "--print-command", *args)
    assert code == 1
    assert "would not be read" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("",), "empty name"),
        (("m", "--host", ""), "the host is ''"),
        (("m", "--host", "http://10.0.0.5"), "expected a host name"),
        (("m", "--adapter-root", " "), "names no folder"),
    ],
)
def test_serve_refuses_what_a_variable_that_is_not_set_makes(args: tuple[str, ...], told: str) -> None:
    """To vLLM an empty host means every address of this machine."""
    code, answer, _ = run("serve", "--print-command", *args)
    assert (code, answer["error"]["type"]) == (1, "ConfigError")
    assert told in answer["error"]["message"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xff\xfe\x00", "is not valid YAML"),
        (b"base_model: m\nwhen: 2020-13-45\n", "is not valid YAML"),
        (b"base_model: " + b"[" * 5000, "is not valid YAML"),
        (b"base_model: m\ntrl: {use_vllm: true}\nloraflow: {on: true}\n", "True is no name of an option"),
    ],
    ids=["no UTF-8", "no date", "deep", "a key that is no text"],
)
def test_serve_on_an_axolotl_config_that_cannot_be_read(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(content)
    code, answer, _ = run("serve", "--print-command", "--axolotl", str(tmp_path / "c.yaml"))
    assert (code, answer["error"]["type"]) == (1, "ConfigError")
    assert told in answer["error"]["message"]


def test_serve_passes_on_what_follows_an_axolotl_config(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("base_model: m\nadapter: lora\nlora_r: 8\nrl: grpo\ntrl: {use_vllm: true}\n")
    code, answer, _ = run(
        "serve", "--print-command", "--axolotl", str(tmp_path / "c.yaml"), "--", "--swap-space", "1", "--seed", "3"
    )
    assert code == 0
    assert answer["argv"][-4:] == ["--swap-space", "1", "--seed", "3"]


def test_serve_without_vllm_says_one_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    import loraflow.launch as module

    def missing() -> None:
        raise LoraflowError("vLLM is not installed beside loraflow")

    monkeypatch.setattr(module, "require_vllm", missing)
    code, answer, _ = run("serve", "m")
    assert (code, set(answer)) == (1, {"error"})


# ---------------------------------------------------------------- bench, demo


@pytest.mark.parametrize(
    ("args", "kind", "told"),
    [
        (("--server", "ftp://a"), "ConfigError", "no URL of a server"),
        (("--server", "http://127.0.0.1:9"), "Unreachable", "connection refused"),
        (("--transports", ""), "ConfigError", "no way of syncing is called ''"),
        (("--transports", "direct, teleport"), "ConfigError", "no way of syncing is called 'teleport'"),
        (("--scale", "rank=1,8", "--transports", "direct,teleport"), "ConfigError", "'teleport'"),
        (("--scale", "rank=1,8", "--transports", "direct, fold"), "ConfigError", "fold is none"),
    ],
)
def test_bench_looks_at_its_options_before_anything_is_started(
    args: tuple[str, ...], kind: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraflow.bench.session.make_server", lambda _: pytest.fail("a server was started"))
    code, answer, _ = run("bench", "--out", str(tmp_path), *args)
    assert (code, answer["error"]["type"]) == (1, kind)
    assert told in answer["error"]["message"]


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_a_folder_for_results_that_cannot_be_written_to(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/loraflow")):
        code, answer, _ = run(command, "--out", str(out))
        assert (code, answer["error"]["type"]) == (1, "ConfigError")
        assert str(out) in answer["error"]["message"]
        assert "--out" in answer["error"]["message"]


# ---------------------------------------------------------------- status, push


def test_the_newest_policy_is_of_the_run_that_came_last() -> None:
    from loraflow.commands.status import _newest

    old = [{"run": "old", "version": version} for version in (48, 49)]
    new = [{"run": "new", "version": version} for version in (2, 3)]
    assert _newest([*old, *new]) == new[1]
    assert _newest([*new, *old]) == old[1]
    assert _newest([]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_push_loads_what_lies_in_the_folder(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    from loraflow.commands.push import load_policy

    peft_model(tiny_model, **KINDS[kind]).save_pretrained(tmp_path)
    load_policy(tmp_path, str(tiny_model))


def test_push_refuses_what_peft_leaves_out_or_makes_up(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    from loraflow.commands.push import load_policy

    tensors = load_file(adapter / "adapter_model.safetensors")
    first = next(iter(tensors))
    (tmp_path / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    lacking = {name: tensor for name, tensor in tensors.items() if name != first}
    for changed in (lacking, {**tensors, first.replace("lora_A", "lora_C"): tensors[first].clone()}):
        save_file(changed, tmp_path / "adapter_model.safetensors")
        with pytest.raises(AdapterError, match="other tensors than the file's"):
            load_policy(tmp_path, str(tiny_model))


def test_push_on_damaged_weights_of_the_base(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    from loraflow.commands.push import load_policy

    shutil.copytree(tiny_model, tmp_path / "base")
    weights = tmp_path / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(AdapterError, match="PEFT cannot load"):
        load_policy(adapter, str(tmp_path / "base"))
