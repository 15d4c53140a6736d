"""Install the wheel in a folder into a new environment, and load a model there on 2 ranks.

`python .ci/try_wheel.py dist [ARGUMENT OF PIP ...]`, such as `torch==2.13.0`. The environment, this script and the
model lie in a temporary folder, so nothing of the source can be imported.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

RANKS = 2
TOLERANCE = 1e-5  # fp32 sums in another order


def make(folder: str) -> None:
    """Save a small Llama, whose 9 query and 3 KV heads two ranks cannot share evenly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 101}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=9, num_key_value_heads=3)).save_pretrained(folder)


def load(folder: str) -> None:
    """On every rank: compare the logits with those of one process."""
    import torch
    from transformers import AutoModelForCausalLM

    import tp_transformers

    assert Path(tp_transformers.__file__).is_relative_to(sys.prefix), tp_transformers.__file__
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
        error = (model(tokens.to(model.device)).logits.cpu() - expected).abs().max().item()
    assert model.tp_size == RANKS
    assert error < TOLERANCE, error
    held = sum(tp_transformers.local_tensor(parameter).numel() for parameter in model.parameters())
    print(f"rank {model.tp_group.rank} holds {held} of {sum(p.numel() for p in model.parameters())} parameters")


def main(folder: str, *arguments: str) -> None:
    """Make the environment, install the wheel, and run the rest in it."""
    (wheel,) = Path(folder).resolve().glob("*.whl")
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        script = shutil.copy(__file__, home / "try.py")
        venv.create(home / "venv", with_pip=True)
        binaries = home / "venv" / "bin"
        constraints = [str(Path(word).resolve()) if Path(word).is_file() else word for word in arguments]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        for command in (
            ["python", "-m", "pip", "install", "--quiet", str(wheel), *constraints],
            ["tp-transformers", "env"],
            ["python", script, "make", "model"],
            ["tp-transformers", "run", "-n", str(RANKS), script, "load", "model"],
        ):
            print("$", *command, flush=True)
            subprocess.run([str(binaries / command[0]), *command[1:]], check=True, cwd=home, env=environment)
    print(f"{wheel.name} loads a model on {RANKS} ranks")


if __name__ == "__main__":
    {"make": make, "load": load}.get(sys.argv[1], main)(*sys.argv[1 + (sys.argv[1] in ("make", "load")) :])
