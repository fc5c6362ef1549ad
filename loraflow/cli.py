"""The ``loraflow`` command. Every command takes ``--json``: one document on stdout, everything else on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup
from typing_extensions import override

from loraflow.commands.output import Output, only_a_document, ready_stdout, stdout_failed
from loraflow.config import SyncConfig, default_adapter_root
from loraflow.errors import AdapterError, ConfigError, LoraflowError

__all__ = ["main"]


class _Commands(TyperGroup):
    """The commands; with ``--json`` a document is written whatever happens, also where the call itself is wrong."""

    @override
    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        try:
            return self._documented(args, *rest, **options)
        except OSError as error:  # of stdout: commands tell of all others
            sys.exit(stdout_failed(error))

    def _documented(self, args: Sequence[str] | None, *rest: Any, **options: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        own = given[: given.index("--")] if "--" in given else given
        if "--json" not in own or "--help" in own:
            return super().main(args, *rest, **options)
        with only_a_document() as stdout:
            output = Output(as_json=True)
            try:
                code = super().main(args, *rest, **{**options, "standalone_mode": False})
            except Exception as error:
                if not hasattr(error, "format_message"):  # of click, which typer brings in a copy of its own
                    raise
                output.fail("UsageError", error.format_message())
                code = getattr(error, "exit_code", 2)
            if code == 130 and not stdout.written:
                output.fail("KeyboardInterrupt", "interrupted")
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=_Commands,
    help="LoRA-first weight sync for reinforcement learning with vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
Server = Annotated[list[str], typer.Option("--server", help="Base URL of a vLLM server; may be repeated.")]
Root = Annotated[str, typer.Option(help="Folder or URL where versions are published.")]
TransportName = Literal["auto", "adapter", "merged"]


def main() -> None:
    """Entry point of the console script."""
    ready_stdout()
    app()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Model folder or hub name.")] = None,
    max_lora_rank: Annotated[
        int, typer.Option(min=1, help="Largest adapter rank; rounded up to one that vLLM takes.")
    ] = 64,
    max_staleness: Annotated[int, typer.Option(min=0, help="Versions that rollouts may lag behind.")] = 1,
    adapter_root: Annotated[str, typer.Option(help="Folder that adapters may be loaded from.")] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    merged: Annotated[
        bool, typer.Option("--merged", help="No LoRA slots: weights are folded or broadcast, generation is faster.")
    ] = False,
    weight_transfer: Annotated[
        Literal["nccl", "gloo", "ipc"] | None,
        typer.Option(
            help="How merged weights are broadcast: nccl from another GPU (the default on a GPU), gloo (on a CPU), or "
            "ipc where trainer and server share a GPU."
        ),
    ] = None,
    axolotl: Annotated[Path | None, typer.Option(help="Take everything from an Axolotl config file.")] = None,
    print_command: Annotated[bool, typer.Option("--print-command", help="Only print the command.")] = False,
    json: Json = False,
) -> None:
    """Start upstream vLLM with all that sync needs. What comes after -- goes to vLLM as it stands."""
    output = Output(as_json=json)
    with output.guard():
        from loraflow.launch import ServeOptions, require_vllm, serve_command

        extra = tuple(context.args)
        if model is not None and model.startswith("-"):  # nothing stood before the --
            extra = (model, *extra)
            model = None
        _refuse_unread(context, merged=merged, axolotl=axolotl, model=model)
        if axolotl is not None:
            from loraflow.launch_axolotl import serve_options_from_axolotl

            options = serve_options_from_axolotl(str(axolotl))
            options = replace(options, extra=(*options.extra, *extra))
        elif model is None:
            raise LoraflowError("no model was given", hint="loraflow serve MODEL, or --axolotl config.yaml")
        else:
            options = ServeOptions(
                model=model,
                max_lora_rank=None if merged else max_lora_rank,
                max_staleness=max_staleness,
                adapter_root=adapter_root or default_adapter_root(),
                host=host,
                port=port,
                weight_transfer=weight_transfer,
                extra=extra,
            )
        command = serve_command(options)
        if not print_command:
            require_vllm()
        output.document({"argv": list(command.argv), "env": dict(command.env), "url": command.url})
        if not json:
            output.say(str(command))
        if print_command:
            return
    sys.stdout.flush()
    os.execvpe(command.argv[0], list(command.argv), {**os.environ, **command.env})  # noqa: S606 - our own command


def _refuse_unread(context: typer.Context, *, merged: bool, axolotl: Path | None, model: str | None) -> None:
    """Refuse options of `serve` that another one would leave unread."""
    given = {
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    if axolotl is not None:
        unread = given & {"max_lora_rank", "max_staleness", "adapter_root", "host", "port", "merged", "weight_transfer"}
        names = sorted(f"--{name.replace('_', '-')}" for name in unread) + ([f"the model {model}"] if model else [])
        if names:
            raise ConfigError(
                f"--axolotl takes everything from its file, so {', '.join(names)} would not be read",
                hint="set it in the file, or leave --axolotl out; what comes after -- goes to vLLM all the same",
            )
    elif merged and "max_lora_rank" in given:
        raise ConfigError(
            "--merged serves no LoRA slots, so --max-lora-rank would not be read", hint="give one of them"
        )


@app.command()
def check(
    adapter: Annotated[Path, typer.Argument(help="Folder of a saved adapter.")],
    base: Annotated[str, typer.Option(help="Folder or name of the base model.")],
    max_lora_rank: Annotated[int | None, typer.Option(min=1, help="Largest rank that the server takes.")] = None,
    json: Json = False,
) -> None:
    """Preflight of an adapter folder, no server. Exit 3: only merged can serve it; 1: nothing can."""
    output = Output(as_json=json)
    with output.guard():
        from loraflow.basemodel import BaseShapes
        from loraflow.preflight import Preflight, check_folder

        try:
            shapes = BaseShapes.from_folder(base)
        except AdapterError as error:
            output.say(str(error), style="red")
            result = Preflight(error.problems, None)
        else:
            result = check_folder(adapter, shapes, max_lora_rank=max_lora_rank)
    output.document(result.to_dict())
    rows = [(problem.code, problem.message, problem.tensor) for problem in result.problems]
    if rows:
        output.table(f"{adapter}", ("code", "problem", "tensor"), rows)
    verdict = {"adapter": "servable as an adapter", "merged": "only servable merged", None: "not servable"}
    output.say(verdict[result.transport], style="green" if result.transport == "adapter" else "red")
    raise typer.Exit({"adapter": 0, "merged": 3, None: 1}[result.transport])


@app.command()
def plan(
    server: Server,
    adapter: Annotated[Path | None, typer.Option(help="Folder of a saved adapter.")] = None,
    transport: Annotated[TransportName, typer.Option(help="Ask for one.")] = "auto",
    carrier: Annotated[str, typer.Option(help="Ask for one.")] = "auto",
    adapter_root: Root = "",
    json: Json = False,
) -> None:
    """Which transport would be used and why, and what each would cost. Exit 1: none works."""
    output = Output(as_json=json)
    with output.guard():
        from loraflow.commands.plan import show_plan

        config = _config(adapter_root, transport=transport, carrier=carrier)
        show_plan(output, server, adapter, config)


@app.command()
def push(
    adapter: Annotated[Path, typer.Argument(help="Folder of a saved adapter.")],
    server: Server,
    run_id: Annotated[str | None, typer.Option(help="Continue a run; a new one where not given.")] = None,
    base: Annotated[str | None, typer.Option(help="Folder or name of the base model, for the proof.")] = None,
    transport: Annotated[TransportName, typer.Option(help="Ask for one.")] = "auto",
    carrier: Annotated[str, typer.Option(help="Ask for one.")] = "auto",
    adapter_root: Root = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the servers.")] = 30.0,
    json: Json = False,
) -> None:
    """Publish, load on every server, prove, commit. Exit 1: refused; every server serves what it served before."""
    output = Output(as_json=json)
    with output.guard():
        from loraflow.commands.push import push as run

        config = _config(adapter_root, run_id=run_id, transport=transport, carrier=carrier, start_timeout=timeout)
        with output.console.status("connecting") as status:
            result = run(adapter, server, config, base=base, progress=status.update)
    output.document(result)
    proofs = {f"proof, {url}": f"{proof['kind']} passed" for url, proof in result["proofs"].items()}
    shown = ("policy", "digest", "transport", "carrier", "bytes")
    output.pairs("pushed", {name: result[name] for name in shown} | proofs | {"ms": result["timings_ms"]})


@app.command()
def status(server: Server, json: Json = False) -> None:
    """What is served: policy, version, digest, run, base fingerprint, capabilities. Exit 1: unreachable."""
    output = Output(as_json=json)
    with output.guard():
        from loraflow.commands.status import status as ask
        from loraflow.server import VLLMServer

        found = [ask(VLLMServer(url, request_timeout=10)) for url in server]
    output.document(found[0] if len(found) == 1 else {"servers": found})
    for item in found:
        shown = {name: item[name] for name in ("policy", "version", "digest", "run", "weights", "weight_version")}
        base = {f"base {name}": value for name, value in item["base"].items()}
        output.pairs(item["capabilities"]["url"], shown | base | item["capabilities"])


@app.command()
def bench(
    preset: Annotated[str, typer.Option(help="Shapes: tiny, 0.5b, 1.5b or 7b; random weights.")] = "tiny",
    model: Annotated[Path | None, typer.Option(help="Measure with this model folder instead.")] = None,
    adapter: Annotated[Path | None, typer.Option(help="Measure with an adapter of this one's shape.")] = None,
    server: Annotated[str | None, typer.Option(help="Use this server; one is started where not given.")] = None,
    transports: Annotated[str | None, typer.Option(help="Comma-separated; all that work where not given.")] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="LoRA rank.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Syncs per transport.")] = 20,
    scale: Annotated[
        str | None, typer.Option(help="Scaling curves: rank=1,16,64, layers=4,28 or preset=0.5b,1.5b.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for JSON and plots.")] = Path("outputs/bench"),
    json: Json = False,
) -> None:
    """The standalone sync throughput test: table, JSON, plots."""
    output = Output(as_json=json)
    with output.guard():
        from loraflow.bench.run import run_bench

        options: dict[str, Any] = {"preset": preset, "server": server, "rank": rank, "repeats": repeats, "out": out}
        options |= {"model": model, "adapter": adapter, "scale": scale}
        ways = None if transports is None else [way.strip() for way in transports.split(",")]
        report = run_bench(output, transports=ways, **options)
    output.document(report)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the model, logs and plot.")] = Path("outputs/demo"),
    steps: Annotated[int, typer.Option(min=1, help="GRPO steps of the first run.")] = 30,
    json: Json = False,
) -> None:
    """The whole thing on this machine: a real vLLM, real TRL GRPO, syncs proven, then a second run."""
    output = Output(as_json=json)
    with output.guard():
        from loraflow.demo.run import run_demo

        report = run_demo(output, out, steps=steps)
    output.document(report)
    raise typer.Exit(0 if report["passed"] else 1)


@app.command()
def doctor(
    server: Annotated[list[str] | None, typer.Option("--server", help="Base URL; may be repeated.")] = None,
    json: Json = False,
) -> None:
    """Environment, versions, capabilities, what is missing and how to get it."""
    output = Output(as_json=json)
    with output.guard():
        from loraflow.commands.doctor import doctor as look

        report = look(server or [])
    output.document(report)
    rows = [
        (f["what"], {"ok": "✓", "note": "·", "problem": "✗"}[f["state"]], f["found"], f["advice"])
        for f in report["findings"]
    ]
    output.table("loraflow doctor", ("what", "", "found", "advice"), rows)
    raise typer.Exit(0 if report["ok"] else 1)


def _config(adapter_root: str, **options: Any) -> SyncConfig:
    given = {name: value for name, value in options.items() if value is not None}
    return SyncConfig(adapter_root=adapter_root or default_adapter_root(), **given)
