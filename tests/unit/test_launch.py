from __future__ import annotations

import json
import sys

import pytest

from loraflow.config import default_adapter_root
from loraflow.errors import ConfigError, LoraflowError
from loraflow.launch import ServeCommand, ServeOptions, ServerProcess, free_port, round_up_rank, serve_command


def flags(*extra: str, **options: object) -> list[str]:
    return list(serve_command(ServeOptions(model="m", device="cpu", extra=extra, **options)).argv)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (2, 8), (12, 16), (33, 64), (200, 256), (512, 512)])
def test_rank_is_rounded_up_to_one_that_vllm_takes(rank: int, served: int) -> None:
    assert round_up_rank(rank) == served


def test_rank_above_all() -> None:
    with pytest.raises(ConfigError, match="merged"):
        round_up_rank(513)


@pytest.mark.parametrize(
    "options", [{"max_lora_rank": 0}, {"max_staleness": -1}, {"port": 0}, {"port": 65536}], ids=str
)
def test_numbers_that_cannot_be_served(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        flags(**options)


def test_what_adapters_may_be_loaded_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin takes absolute folders, and URLs in a variable of their own: anything else ends the server."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir("/tmp")

    def roots(adapter_root: str) -> tuple[str | None, str | None]:
        env = serve_command(ServeOptions(model="m", device="cpu", adapter_root=adapter_root)).env
        return env.get("LORAFLOW_ADAPTER_ROOTS"), env.get("LORAFLOW_STORE_ROOTS")

    assert roots("~/my adapters") == ("/home/me/my adapters", None)
    assert roots("some/where/") == ("/tmp/some/where", None)
    assert roots("file:///mnt/ä") == ("/mnt/ä", None)
    assert roots("s3://bucket/runs/") == (default_adapter_root(), "s3://bucket/runs")
    with pytest.raises(ConfigError, match="separates folders"):
        roots("/a:/b")


def test_slots_follow_staleness() -> None:
    argv = flags(max_staleness=3)
    assert argv[argv.index("--max-loras") + 1] == "5"


def test_what_the_user_sets_is_not_set_again() -> None:
    argv = flags("--max-loras", "9", "--logprobs-mode=raw_logprobs")
    assert argv.count("--max-loras") == 1
    assert argv[argv.index("--max-loras") + 1] == "9"
    assert not [a for a in argv if a == "processed_logprobs"]


def test_merged_server_has_no_slots() -> None:
    argv = flags(max_lora_rank=None)
    assert "--enable-lora" not in argv


def test_weight_transfer_by_device() -> None:
    argv = flags()
    assert json.loads(argv[argv.index("--weight-transfer-config") + 1]) == {"backend": "gloo"}
    argv = list(serve_command(ServeOptions(model="m", device="cuda")).argv)
    assert json.loads(argv[argv.index("--weight-transfer-config") + 1]) == {"backend": "nccl"}


def test_users_plugins_stay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "mine,other")
    assert serve_command(ServeOptions(model="m", device="cpu")).env["VLLM_PLUGINS"] == "loraflow,mine,other"


def test_loopback_unless_told_otherwise() -> None:
    argv = flags()
    assert argv[argv.index("--host") + 1] == "127.0.0.1"
    assert serve_command(ServeOptions(model="m", device="cpu", host="0.0.0.0")).url == "http://127.0.0.1:8000"


def test_a_server_that_ends_is_reported_with_its_log(tmp_path) -> None:  # type: ignore[no-untyped-def]
    command = ServeCommand(
        (sys.executable, "-c", "print('no such model'); raise SystemExit(7)"), {}, "http://127.0.0.1:9"
    )
    with ServerProcess(command, log=tmp_path / "log") as process, pytest.raises(LoraflowError) as caught:
        process.wait_ready(30)
    assert "exit code 7" in str(caught.value)
    assert "no such model" in str(caught.value)


def test_a_server_is_waited_for_without_the_environments_proxy(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """As all else of loraflow: a proxy for the outside world does not reach this host's own address."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    port = free_port()
    (tmp_path / "health").write_text("")
    argv = (sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path))
    with ServerProcess(ServeCommand(argv, {}, f"http://127.0.0.1:{port}"), log=tmp_path / "log") as process:
        process.wait_ready(10)


def test_nothing_is_left_behind(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import os

    child = "import time; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); {child}"
    process = ServerProcess(ServeCommand((sys.executable, "-c", code), {}, "http://127.0.0.1:9"), log=tmp_path / "log")
    with process:
        group = process.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
