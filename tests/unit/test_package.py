"""The package as a whole: importing it changes nothing, its rooms import one way, its hook comes off clean."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel, modeling_utils
from transformers.models.auto.auto_factory import _BaseAutoModelClass

import tp_transformers
from tests.support.house import House
from tests.support.imports import ORDER, Imports, tree_of
from tests.support.readme import PAGES, blocks
from tp_transformers import transformers_api

ROOT = Path(tp_transformers.__file__).parent

LONGEST = 400
"""Lines of a module, at most."""
MOST = 15
"""Modules in one folder, at most."""
LONGEST_FUNCTION = 70
"""Lines of a function, at most, its docstring included."""
IN_FORKS = """
import os, sys, torch
for program in sys.argv[1:]:
    if program == "transformers":
        import transformers
        from transformers import PreTrainedModel
        continue
    child = os.fork()
    if not child:
        exec(program)
        os._exit(0)
    assert not os.waitpid(child, 0)[1], program
"""
"""A program that runs each of its arguments in a process that has not imported the package, but torch."""
IMPORT_ALL = """
import sys, tp_transformers
for name in tp_transformers.__all__:
    value = getattr(tp_transformers, name)
    for inner in getattr(value, "__all__", ()):
        getattr(value, inner)
"""
"""A program that uses every public name."""
LONGEST_TEST = 400
"""Lines of a file of the tests, at most; parallel runs hand out whole files."""
IMPORTED = 100
"""Modules that `enable()` imports, two of them for each feature; all others are imported when they are first used."""


@pytest.fixture(scope="module")
def imports() -> Imports:
    return Imports()


def test_imports_go_one_way(imports) -> None:
    assert set(imports.of_package) == set(ORDER)
    unmoved = House().feature_of  # may import features already
    assert not [edge for edge in imports.upward if edge[0] not in unmoved]
    assert not imports.circles


def test_folders_and_modules_stay_small(imports) -> None:
    folders = Counter(path.parent for path in imports.files.values() if path.name != "__init__.py")
    assert not {str(folder): count for folder, count in folders.items() if count > MOST}
    assert not {name: lines for name, lines in imports.lines.items() if lines > LONGEST}


def test_functions_stay_small(imports) -> None:
    lines: dict[str, int] = {}
    for module, path in imports.files.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                name = f"{module}.{node.name}"
                lines[name] = max(lines.get(name, 0), node.end_lineno - node.lineno + 1)
    assert len(lines) > 1000
    assert not {name: count for name, count in lines.items() if count > LONGEST_FUNCTION}


def test_files_of_the_tests_stay_small() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in Path(__file__).parents[1].rglob("*.py")}
    assert len(lines) > 100
    assert not {str(path): count for path, count in lines.items() if count > LONGEST_TEST}


FEW_NEED = (
    IMPORT_ALL + "few = ['commands', 'verify', 'trainer', 'features.trainer.trainer', 'features.trainer.methods']\n"
    "assert not sys.modules.keys() & {'matplotlib', *(f'tp_transformers.{room}' for room in few)}"
)
HOOK_BEFORE_TRAINER = f"""
import sys, tp_transformers
tp_transformers.enable()
ours = [name for name in sys.modules if name.partition('.')[0] == 'tp_transformers']
assert len(ours) <= {IMPORTED}, ours
assert 'transformers.trainer' not in sys.modules
from tp_transformers.trainer import Trainer
from transformers import Trainer as original
assert original.compute_loss.__wrapped__ is not original.compute_loss and issubclass(Trainer, original)
"""
HOOK_BEFORE_MODELS = """
import sys, tp_transformers, transformers
from transformers import AutoModelForCausalLM
tp_transformers.enable()
assert 'transformers.modeling_utils' not in sys.modules
release, transformers.__version__ = transformers.__version__, '6.0.0'
try:
    AutoModelForCausalLM.from_pretrained('nowhere', tp_plan='auto')
except tp_transformers.UnsupportedError as error:
    assert '6.0.0' in str(error)
else:
    raise AssertionError('loaded by an unsupported release')
transformers.__version__ = release
from transformers import PreTrainedModel, modeling_utils
assert PreTrainedModel.from_pretrained.__wrapped__ and modeling_utils.get_hf_quantizer.__wrapped__
tp_transformers.disable()
assert not hasattr(modeling_utils.get_hf_quantizer, '__wrapped__')
tp_transformers.enable()
tp_transformers.disable()
"""
"""Models' classes are imported by the first load, which tells what `enable()` tells if they are there already."""
STRATEGIES_ALONE = """
import sys, tp_transformers.torch_api
assert not sys.modules.keys() & {'torch._dynamo', 'torch._inductor', 'transformers'}, 'imported'
import tp_transformers.strategies
assert 'transformers.modeling_utils' not in sys.modules, 'imported'
"""
"""As a script with torch's `parallelize_module` uses them: no models of transformers, and not the compiler."""
PATCHES_AND_STARTS_NOTHING = (
    "before = dict(vars(PreTrainedModel))\n" + IMPORT_ALL + "assert dict(vars(PreTrainedModel)) == before\n"
    "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()\n"
    "import logging\n"
    "package = logging.getLogger('tp_transformers')\n"
    "assert not package.handlers and not logging.root.handlers and package.level == logging.NOTSET\n"
    "loggers = [logger for logger in vars(logging.root.manager)['loggerDict'].values()\n"
    "           if isinstance(logger, logging.Logger) and logger.name.startswith('tp_transformers.')]\n"
    "assert loggers and all(logger.filters for logger in loggers), loggers\n"
)


def test_what_an_import_does_and_what_it_leaves() -> None:
    before, after = (STRATEGIES_ALONE, HOOK_BEFORE_MODELS), (FEW_NEED, HOOK_BEFORE_TRAINER, PATCHES_AND_STARTS_NOTHING)
    programs = (*before, "transformers", *after)
    subprocess.run([sys.executable, "-c", IN_FORKS, *programs], check=True, timeout=120)


def patched() -> dict[str, Any]:
    return {
        "model": vars(PreTrainedModel)["from_pretrained"],
        "loader": vars(PreTrainedModel)["_load_pretrained_model"],
        "auto": vars(AutoModelForCausalLM)["from_pretrained"],
        "base auto": vars(_BaseAutoModelClass)["from_pretrained"],
        "files": modeling_utils._get_resolved_checkpoint_files,
        "quantizer": modeling_utils.get_hf_quantizer,
    }


def test_disable_restores_the_same_objects_and_both_are_idempotent() -> None:
    before = patched()
    tp_transformers.enable()
    during = patched()
    assert all(during[name] is not before[name] for name in before)
    tp_transformers.enable()
    assert patched() == during
    with tp_transformers.enable():
        pass
    assert patched() == during, "an inner context leaves the hook as it found it"
    tp_transformers.disable()
    tp_transformers.disable()
    assert all(patched()[name] is before[name] for name in before)
    with pytest.raises(KeyError), tp_transformers.enable():
        raise KeyError
    assert all(patched()[name] is before[name] for name in before)


def test_a_transformers_whose_seam_changed_is_refused_unpatched(monkeypatch) -> None:
    def changed(model: Any, weights: Any) -> None: ...

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(changed))
    before = patched()
    with pytest.raises(tp_transformers.UnsupportedError, match=r"_load_pretrained_model\(model, weights\)"):
        tp_transformers.enable()
    assert patched() == before
    monkeypatch.undo()
    monkeypatch.setattr(modeling_utils, "_get_resolved_checkpoint_files", changed)
    with pytest.raises(tp_transformers.UnsupportedError, match=r"_get_resolved_checkpoint_files\(model, weights\)"):
        tp_transformers.enable()
    monkeypatch.undo()
    monkeypatch.setattr(modeling_utils, "get_hf_quantizer", changed)
    with pytest.raises(tp_transformers.UnsupportedError, match=r"get_hf_quantizer\(model, weights\)"):
        tp_transformers.enable()
    monkeypatch.undo()
    for version in ("4.57.1", "6.0.0", "6.0.0.dev0"):
        monkeypatch.setattr(transformers_api.transformers, "__version__", version)
        with pytest.raises(tp_transformers.UnsupportedError, match=version):
            tp_transformers.enable()


@pytest.mark.parametrize("argument", [[], ["no_such_script.py"], ["-m"]])
def test_the_runner_explains_itself(argument) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tp_transformers", *argument], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "usage: torchrun" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_yaml_of_the_pages_is_plans(tmp_path) -> None:
    found = [block.code for page in PAGES for block in blocks(page) if block.language == "yaml"]
    assert found
    for code in found:
        (tmp_path / "plan.yaml").write_text(code)
        plan = tp_transformers.plans.Plan.from_yaml(tmp_path / "plan.yaml")
        assert plan.rules
        assert all(rule.instance is not None for rule in plan.rules)
