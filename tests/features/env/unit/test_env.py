"""`tp-transformers env`: what a report of a problem begins with."""

import io
import json
import os
import platform
from contextlib import redirect_stdout
from importlib.metadata import version
from types import SimpleNamespace

import transformers

import tp_transformers
from tests.support.commands import main
from tests.support.needs import needs
from tests.support.pool import Pool
from tp_transformers import patches, torch_api, transformers_api
from tp_transformers.loading import hook  # noqa: F401 - makes all patches, before a test takes them away
from tp_transformers.model import clip  # noqa: F401 - likewise
from tp_transformers.patches import Patch, nothing, replace_all
from tp_transformers.seams import added


def env(variables: dict[str, str]) -> str:
    """Run in a process of its own, since others may have patches of their tests: the output of the command."""
    os.environ.update(variables)
    with redirect_stdout(io.StringIO()) as out:
        assert main(["env", "--json"]) == 0
    return out.getvalue()


@needs("trainer")
def test_versions_devices_and_variables(printed, monkeypatch) -> None:
    hidden = {"TP_TRANSFORMERS_API_KEY": "hidden", "HF_HUB_TOKEN": "hidden"}
    pool = Pool()
    try:
        (out,) = pool.run(1, env, {"TP_TRANSFORMERS_SHARES": "2,1", **hidden})
    finally:
        pool.close()
    found = json.loads(out)
    assert found["tp_transformers"] == [tp_transformers.__version__]
    assert found["python"][0].startswith(platform.python_version())
    assert found["libraries"]["torch"] == version("torch")  # of CUDA builds, torch.__version__ names CUDA's too
    assert found["libraries"]["transformers"] == transformers.__version__
    assert found["variables"]["TP_TRANSFORMERS_SHARES"] == "2,1"
    assert f"{len(os.sched_getaffinity(0))} cores for this process" in found["devices"][-1]
    assert found["not supported"] == []
    assert {"from_pretrained", "Trainer"} <= set(found["patched"]["transformers"].split(", "))
    assert "GradScaler" in found["patched"]["torch"]
    assert found["lacking"] == torch_api.lacking()  # older releases lack names that need not be there
    assert "hidden" not in out
    for name, value in hidden.items():
        monkeypatch.setenv(name, value)
    out = printed("env")
    assert f"torch {version('torch')}" in out
    assert "CPU tensors of ranks on one machine: " in out
    assert "hidden" not in out


def test_what_the_installed_releases_lack(printed, monkeypatch) -> None:
    library = SimpleNamespace(__name__="library.module")
    added("model_patches")
    monkeypatch.setattr(patches, "ALL", [])
    Patch("library", "doubling", lambda: replace_all([(library, "_double", lambda original: None)]))
    Patch("library", "halving", lambda: replace_all([(library, "_halve", lambda original: None)]), without=nothing)
    monkeypatch.setattr(torch_api, "lacking", lambda then="": {} if then else {"torch._gone": "it is not called"})
    monkeypatch.setattr(transformers_api, "OLDEST", (99, 0))
    found = json.loads(printed("env", "--json", code=1))
    assert found["lacking"] == {
        "torch._gone": "it is not called",
        "library": "no library.module._double: doubling on a tensor-parallel model refused; "
        "no library.module._halve: halving on a tensor-parallel model without the change",
    }
    assert found["patched"] == {"library": "doubling, halving"}
    (refusal,) = found["not supported"]
    assert f"transformers {transformers.__version__} with another version" in refusal
