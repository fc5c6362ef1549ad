"""`loraflow serve --axolotl`: what vLLM is started with."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from loraflow.errors import ConfigError
from loraflow.launch import serve_command
from loraflow.launch_axolotl import serve_options, serve_options_from_axolotl
from tests.helpers.axolotl_configs import GUIDE, merged, own, trl


def vllm(**keys: object) -> dict[str, object]:
    return {"vllm": keys}


def flags(*patches: dict[str, object]) -> dict[str, str | None]:
    """The command's flags and their values."""
    argv = serve_command(serve_options(merged(GUIDE, *patches))).argv[3:]
    out: dict[str, str | None] = {}
    for index, word in enumerate(argv):
        if word.startswith("--"):
            follows = argv[index + 1] if index + 1 < len(argv) else "--"
            out[word] = None if follows.startswith("--") else follows
    return out


def test_the_guides_minimal_server() -> None:
    found = flags()
    assert (
        found.items()
        >= {
            "--model": "Qwen/Qwen2.5-1.5B-Instruct",
            "--host": "0.0.0.0",
            "--port": "8000",
            "--gpu-memory-utilization": "0.85",
            "--dtype": "auto",
            "--max-model-len": "4096",
            "--enable-lora": None,
            "--max-lora-rank": "32",
        }.items()
    )


def test_every_option_of_the_guides_table_reaches_vllm() -> None:
    found = flags(
        vllm(
            device="cuda",
            tensor_parallel_size=2,
            data_parallel_size=2,
            enable_prefix_caching=True,
            enable_reasoning=True,
            reasoning_parser="deepseek_r1",
            enforce_eager=True,
            serve_module="axolotl.scripts.vllm_serve_lora",
            worker_extension_cls="my.Extension",
        ),
        {"trust_remote_code": True, "revision_of_model": "abc"},
    )
    assert (
        found.items()
        >= {
            "--tensor-parallel-size": "2",
            "--data-parallel-size": "2",
            "--api-server-count": "1",
            "--enable-prefix-caching": None,
            "--reasoning-parser": "deepseek_r1",
            "--enforce-eager": None,
            "--worker-extension-cls": "my.Extension",
            "--trust-remote-code": None,
            "--revision": "abc",
        }.items()
    )
    assert serve_options(merged(GUIDE, vllm(device="cuda"))).device == "cuda"


def test_what_is_switched_off_stays_off() -> None:
    found = flags(vllm(enable_prefix_caching=False, enable_reasoning=False, reasoning_parser="x", enforce_eager=False))
    assert "--no-enable-prefix-caching" in found
    assert not {"--enable-prefix-caching", "--reasoning-parser", "--enforce-eager"} & set(found)


@pytest.mark.parametrize(("rank", "served"), [(1, "1"), (4, "8"), (24, "32"), (257, "320")])
def test_rank_is_rounded_up(rank: int, served: str) -> None:
    assert flags({"lora_r": rank})["--max-lora-rank"] == served


def test_ranks_of_single_modules_count() -> None:
    assert flags({"lora_r": 8, "lora_rank_pattern": {"q_proj": 60, "v_proj": 4}})["--max-lora-rank"] == "64"
    with pytest.raises(ConfigError, match=r"lora_rank_pattern\.q_proj: .* at least 1"):
        serve_options(merged(GUIDE, {"lora_rank_pattern": {"q_proj": 0}}))


def test_merged_serves_no_slots() -> None:
    assert "--enable-lora" not in flags(trl(vllm_lora_sync=False))


def test_slots_and_folder_are_those_that_the_trainer_expects() -> None:
    options = serve_options(merged(GUIDE, own(max_staleness=3, adapter_root="/mnt/a", server_adapter_root="/srv/a")))
    assert (options.max_staleness, options.adapter_root) == (3, "/srv/a")
    ahead = trl(use_data_producer=True, async_prefetch=True, prefetch_depth=2)
    assert serve_options(merged(GUIDE, ahead)).max_staleness == 2


def test_where_it_listens() -> None:
    loopback = {"vllm": ..., **trl(vllm_server_host="localhost", vllm_server_port=9000)}
    assert (serve_options(merged(GUIDE, loopback)).host, serve_options(merged(GUIDE, loopback)).port) == (
        "127.0.0.1",
        9000,
    )
    assert serve_options(merged(GUIDE, {"vllm": ..., **trl(vllm_server_host=..., vllm_server_port=...)})).port == 8000
    assert serve_options(merged(GUIDE, {"vllm": ..., **trl(vllm_server_host="::1")})).host == "::1"
    with pytest.raises(ConfigError, match=r"connects to '10.0.0.7', and without vllm.host"):
        serve_options(merged(GUIDE, {"vllm": ..., **trl(vllm_server_host="10.0.0.7")}))


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (vllm(max_model_length=5), "unknown key vllm.max_model_length; did you mean max_model_len"),
        (vllm(port="eight thousand"), r"vllm.port: .* \(given: 'eight thousand'\)"),
        (vllm(port=0), "vllm.port: must be a port"),
        (vllm(tensor_parallel_size=0), "vllm.tensor_parallel_size: must be at least 1"),
        (vllm(tensor_parallel_size=True), "vllm.tensor_parallel_size: True is of the wrong type"),
        (vllm(gpu_memory_utilization=85), "vllm.gpu_memory_utilization: must be above 0 and at most 1"),
        (vllm(enforce_eager="sometimes"), "vllm.enforce_eager: Input should be a valid boolean"),
        (vllm(enforce_eager=1), "vllm.enforce_eager: 1 is of the wrong type"),
        (vllm(device="tpu"), "vllm.device: 'tpu' is not auto, cuda or cpu"),
        (vllm(device="cuda:1"), "CUDA_VISIBLE_DEVICES"),
        (vllm(enable_reasoning=True), "name the parser with vllm.reasoning_parser"),
        (
            vllm(serve_module="trl.scripts.vllm_serve"),
            "vllm.serve_module: trl.scripts.vllm_serve is a server of its own",
        ),
        ({"lora_r": ...}, "lora_r: the adapter's rank must be at least 1"),
        ({"base_model": ...}, "base_model: the model to serve is not given"),
        (own(max_stalenes=1), "unknown option 'max_stalenes'; did you mean 'max_staleness'?"),
    ],
)
def test_refused(patch: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve_options(merged(GUIDE, patch))


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(GUIDE))
    assert serve_options_from_axolotl(str(path)) == serve_options(GUIDE)
    path.write_text("- a\n- list\n")
    with pytest.raises(ConfigError, match="is no Axolotl config"):
        serve_options_from_axolotl(str(path))
    path.write_text("trl: [")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        serve_options_from_axolotl(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        serve_options_from_axolotl(str(tmp_path / "missing.yaml"))
