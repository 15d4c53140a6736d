"""Models that go from rank to rank, held against one process, and against loads on the new ranks bit by bit."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.features.quantized.distributed.test_quantized import VARIANTS, packed_folder
from tests.support.architectures import ARCHITECTURES
from tests.support.comparisons import full_gradients, read_folder, relative, relative_errors, worst
from tests.support.models import MASK, PROMPTS, load, save_as_loaded
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tests.support.tiny_mixers import MIXERS
from tp_transformers.features.reshard.reshard import REPORT
from tp_transformers.ranks.mesh import join
from tp_transformers.strategies import layout_of, local_tensor

STEPS = (4, 3, 1, 2, 5, (2, 1, 1), (1, 1))
"""Numbers of ranks, or their shares."""
TOLERANCE = 1e-9  # float64: only the order of the sums differs, which delta nets magnify

MAKERS: dict[str, Any] = {
    "tied": partial(ARCHITECTURES["gemma"].make, 8, 2),
    "llama 9/3": partial(ARCHITECTURES["llama"].make, 9, 3),
    "phi3": partial(ARCHITECTURES["phi3"].make, 6, 3),
    "mixtral": partial(ARCHITECTURES["mixtral"].make, 8, 2),
    "gpt_oss": partial(ARCHITECTURES["gpt_oss"].make, 8, 2),
    "deepseek_v3": partial(ARCHITECTURES["deepseek_v3"].make, 8, 8),  # with a persistent buffer
    "qwen3_next": partial(MIXERS["qwen3_next"].make, 8, 2),
    "falcon": partial(ARCHITECTURES["falcon"].make, 8, 2),
}


def in_float64() -> Any:
    """Context in which norms and routers, too, compute in float64."""
    from tp_transformers.features.verify.small_models.model import computing_in

    return computing_in(torch.float64)


def mesh_of(to: Any) -> DeviceMesh:
    size = to if isinstance(to, int) else len(to)
    return DeviceMesh("cpu", [*range(size)], mesh_dim_names=("tp",))


def loaded(folder: str, to: Any, mesh: DeviceMesh, **options: Any) -> Any:
    shares = {} if isinstance(to, int) else {"tp_shares": to}
    return load(folder, device_mesh=mesh, tp_map=False, **shares, **options)  # bits depend on alignment


def seen(model: Any, *, trains: bool = True) -> dict[str, Any]:
    """What a model does with a left-padded batch, and the gradients that it leaves."""
    with in_float64() if trains else torch.no_grad():
        with torch.no_grad():
            logits = model(PROMPTS, attention_mask=MASK).logits
        tokens = model.generate(PROMPTS, attention_mask=MASK, max_new_tokens=5, do_sample=False)
        if trains:
            model.train()
            model(PROMPTS, attention_mask=MASK, labels=PROMPTS, use_cache=False).loss.backward()
            model.eval()
    return {"logits": logits, "tokens": tokens}


def tensors(model: Any) -> dict[str, tuple[Any, torch.Tensor]]:
    """All tensors of a model, with what is known of each."""
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    places: dict[int, str] = {}
    return {
        name: (
            (type(value), value.dtype, value.requires_grad, layout_of(value), places.setdefault(id(value), name)),
            local_tensor(value),
        )
        for name, value in named.items()
    }


def differing(model: Any, fresh: Any, *, trains: bool = True) -> list[str]:
    """What of a model is not as in one that is loaded on its ranks, bit by bit."""
    ours, theirs, found = tensors(model), tensors(fresh), []
    found += ["names"] if [*ours] != [*theirs] else []
    for name, (known, value) in theirs.items():
        same = value.is_meta or torch.equal(ours[name][1], value)
        found += [] if same and ours[name][0] == known else [name]
    mine, other = seen(model, trains=trains), seen(fresh, trains=trains)
    found += [name for name in mine if not torch.equal(mine[name], other[name])]
    for (name, param), value in zip(model.named_parameters(), fresh.parameters(), strict=True):
        if value.grad is not None and not torch.equal(local_tensor(param.grad), local_tensor(value.grad)):
            found.append(f"gradient of {name}")
    modules = zip(model.modules(), fresh.modules(), strict=True)
    found += [str(type(mine)) for mine, other in modules if type(mine) is not type(other)]
    found += [] if model.tp_plan == fresh.tp_plan and model.config.to_dict() == fresh.config.to_dict() else ["plan"]
    return found


def walk(folder: str, reference: str | None, saved: str, steps: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    """Run on every rank: load on some ranks, then reshard step by step; compare after each."""
    join()
    rank, trains = dist.get_rank(), reference is not None
    expected = torch.load(reference) if reference is not None else {}
    found, mesh = [], mesh_of(steps[0])
    model = loaded(folder, steps[0], mesh, **options) if mesh.get_coordinate() is not None else None
    for to in steps[1:]:
        old, model = model, tp_transformers.reshard(model, to)
        if old is not None:
            with pytest.raises(tp_transformers.UnsupportedError, match="was resharded"):
                old(PROMPTS)
        mesh = mesh_of(to)
        if model is None:
            assert mesh.get_coordinate() is None
            continue
        fresh = loaded(folder, to, mesh, **options)
        result: dict[str, Any] = {"to": to, "rank": rank, "different": differing(model, fresh, trains=trains)}
        if trains:
            outputs = seen(model)
            result["logits"] = relative(outputs["logits"], expected["logits"])
            result["tokens"] = torch.equal(outputs["tokens"], expected["tokens"])
            gradients = {name: value / 2 for name, value in full_gradients(model).items()}
            result["gradient"] = worst(relative_errors(gradients, expected["grads"]))
            model.zero_grad()
        model.save_pretrained(f"{saved}/{to}")
        report = REPORT.of(model)
        held = sum(value.nbytes for value in {id(value): value for _, value in tensors(fresh).values()}.values())
        result |= {"got": report.here + report.ranks, "held": held, "read": report.checkpoint}
        found.append(result)
    return found


def check_saved(folder: str, saved: Path) -> None:
    """The tensors of a save are those of the checkpoint, if they were cast to a wider dtype between."""
    before, after = read_folder(folder), read_folder(saved)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        value = after[name].to(tensor.dtype)
        assert torch.equal(tensor.view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), name


WALKS = [("tied", (3, 1, 4, (2, 1, 1))), *((name, STEPS if name != "llama 9/3" else STEPS[:-2]) for name in MAKERS)]
"""(model, numbers of ranks or their shares), the quick one first."""


@pytest.mark.parametrize(("name", "steps"), wide(WALKS, 1))
def test_a_model_goes_from_ranks_to_ranks(pool, tmp_path, name, steps) -> None:
    save_as_loaded(MAKERS[name](), tmp_path)
    folder, reference = str(tmp_path / "checkpoint"), str(tmp_path / "reference.pt")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    outputs = seen(model)
    torch.save({**outputs, "grads": full_gradients(model)}, reference)
    size = max(to if isinstance(to, int) else len(to) for to in steps)
    results = pool.run(size, walk, folder, reference, str(tmp_path / "saved"), steps, {"dtype": torch.float64})
    for result in (each for of_rank in results for each in of_rank):
        print(name, result)
        assert result["different"] == []
        assert result["logits"] < TOLERANCE
        assert result["tokens"]
        assert result["gradient"][1] < TOLERANCE
        assert result["read"] == 0
    for to in steps[1:]:
        check_saved(folder, tmp_path / "saved" / str(to))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), [("gpt_oss", "mxfp4"), ("llama", "gptq"), ("qwen3_moe", "awq")])
def test_packed_weights_stay_packed(pool, tmp_path, name, variant) -> None:
    folder = str(packed_folder(tmp_path, name, VARIANTS[variant])[0])
    options = {"dtype": torch.bfloat16, "tp_dequantize": False}
    steps = (4, 3, 1, 2, 5)
    for found in pool.run(5, walk, folder, None, str(tmp_path / "s"), steps, options):
        print(name, found)
        assert [result["different"] for result in found] == [[]] * len(found)
    for to in steps[1:]:
        check_saved(folder, tmp_path / "s" / str(to))


@on_ranks()
def test_modes_and_options_stay(folder) -> None:
    """What a user sets on a model."""
    model = load(folder, tp_map=False)
    model.train()
    model.model.layers[0].eval().requires_grad_(False)
    model.gradient_checkpointing_enable()
    model.generation_config.max_new_tokens = 3

    def found() -> dict[str, Any]:
        modules = [(each.training, getattr(each, "gradient_checkpointing", None)) for each in model.modules()]
        frozen = [param.requires_grad for param in model.parameters()]
        return {"modules": modules, "frozen": frozen, "options": model.tp_options, **model.generation_config.to_dict()}

    before = found()
    model = tp_transformers.reshard(model, 2)
    assert found() == before
    assert before["options"] == {"tp_map": False}
