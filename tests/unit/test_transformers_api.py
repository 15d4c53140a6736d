"""Private names of transformers stand in one module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import transformers

import tp_transformers
from tests.support.imports import tree_of
from tp_transformers import transformers_api

ROOT = Path(tp_transformers.__file__).parent

ALLOWED = {
    ("features/command_line/models.py", "transformers.dynamic_module_utils"),
    ("features/cpu_decode/attention.py", "transformers.integrations"),
    ("features/elastic/running.py", "transformers.generation.continuous_batching.continuous_api"),
    ("features/expert_parallel/patch.py", "transformers.distributed.expert_parallel"),
    ("features/foreign_styles/registration.py", "transformers.distributed.tensor_parallel"),
    ("features/foreign_styles/registration.py", "transformers.integrations.tensor_parallel"),
    ("features/gguf/blocks.py", "transformers.integrations.gguf.utils"),
    ("features/gguf/blocks.py", "transformers.modeling_gguf_pytorch_utils"),
    ("features/hub_streaming/hub.py", "transformers.modeling_utils"),
    ("features/loss_parallel/rewrite.py", "transformers.loss.loss_utils"),
    ("features/quantized/bitnet.py", "transformers.quantizers.base"),
    ("features/trainer/checkpoints.py", "transformers.trainer"),
    ("features/serve/rank.py", "transformers.cli.serve"),
    ("features/serve/rank.py", "transformers.cli.serving.model_manager"),
    ("features/serve/requests.py", "transformers.cli.serving.model_manager"),
    ("features/serve/requests.py", "transformers.cli.serving.utils"),
    ("features/serve/batches.py", "transformers.generation.continuous_batching"),
    ("loading/hook.py", "transformers.models.auto"),
}
"""Imports elsewhere: those of one feature, and late, those of modules that take a second to import."""


def below_public(path: Path) -> list[str]:
    """Imports from transformers in `path` that are neither of its public names nor of `transformers.utils`."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.startswith("transformers.")]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module == "transformers":
            found += [f"transformers.{each.name}" for each in node.names if each.name not in transformers.__all__]
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("transformers."):
            names = [each.name for each in node.names if each.name.startswith("_")]
            if node.module != "transformers.utils" or names:
                found.append(node.module or "")
    return [name for name in found if name != "transformers.utils"]


def test_private_names_stand_in_one_module() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in ROOT.rglob("*.py")
        if path.name != "transformers_api.py"
        for name in below_public(path)
    }
    assert found == ALLOWED
    assert below_public(ROOT / "transformers_api.py")


def test_private_methods_are_there() -> None:
    transformers_api.check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_api, "METHODS", {"_gone": "a test"})
        with pytest.raises(tp_transformers.UnsupportedError, match="no _gone"):
            tp_transformers.enable()
