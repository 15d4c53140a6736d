"""Losses that are not from the model's own call: of a base model, a head, an embedding, `forward`, hooks.

Gradients and a step equal those of one process in every way to train, whichever module or method people call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PromptTuningConfig, get_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.comparisons import gradient_differences, parameter_differences, ranks_agree, relative
from tests.support.models import VOCAB, load, load_both
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks, refused
from tests.support.tiers import wide
from tests.support.training import mesh_of
from tp_transformers.errors import UnsupportedError

TOLERANCE = 1e-4  # fp32 sums in another order
BATCH = torch.randint(3, VOCAB, (8, 7), generator=torch.Generator().manual_seed(5))


def predict(logits: Tensor, ids: Tensor) -> Tensor:
    """The loss of next tokens, as people write it."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def by_layers(model: Any, ids: Tensor) -> Tensor:
    states, positions = model.get_input_embeddings()(ids), torch.arange(ids.shape[1])[None]
    mask = torch.full((ids.shape[1],) * 2, float("-inf")).triu(1)[None, None]
    rotations = model.model.rotary_emb(states, positions)
    for layer in model.model.layers:
        states = layer(states, attention_mask=mask, position_ids=positions, position_embeddings=rotations)
    return predict(model.lm_head(model.model.norm(states)), ids)


def by_hooks(model: Any, ids: Tensor) -> Tensor:
    """A loss of what hooks have seen, without the outputs of the model."""
    base, seen = model.model, {}
    modules = {"layer": base.layers[0], "mlp": base.layers[1].mlp, "norm": base.norm}
    for name, module in modules.items():
        modules[name] = module.register_forward_hook(lambda _, args, output, name=name: seen.update({name: output}))
    model(ids)
    for handle in modules.values():
        handle.remove()
    return predict(model.lm_head(seen["norm"]), ids) + seen["layer"].pow(2).mean() + seen["mlp"].pow(2).mean()


def by_parts(model: Any, ids: Tensor) -> Tensor:
    return model.model.layers[1].mlp(model.get_input_embeddings()(ids)).pow(2).mean()


def by_states(model: Any, ids: Tensor) -> Tensor:
    return model.model(ids, output_hidden_states=True).hidden_states[1].pow(2).mean()


ENTRIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "get_decoder and head": lambda model, ids: predict(
        model.get_output_embeddings()(model.get_decoder()(ids).last_hidden_state), ids
    ),
    "model.forward": lambda model, ids: predict(model.forward(ids).logits, ids),
    "embeddings, then the model": lambda model, ids: predict(
        model(inputs_embeds=model.get_input_embeddings()(ids)).logits, ids
    ),
    "hooks": by_hooks,
    "model.model.forward": lambda model, ids: model.model.forward(ids).last_hidden_state.pow(2).mean(),
    "embeddings alone": lambda model, ids: model.get_input_embeddings()(ids).pow(3).mean(),
    "layer by layer": by_layers,
    "a part of a layer": by_parts,
    "hidden states": by_states,
    "weight of the head": lambda model, ids: predict(
        linear(model.model(ids).last_hidden_state, model.lm_head.weight), ids
    ),
    "two forwards": lambda model, ids: predict(model(ids).logits, ids) + by_states(model, ids.flip(1)),
    "functional_call": lambda model, ids: predict(
        functional_call(model, {name: param * 1 for name, param in model.named_parameters()}, (ids,)).logits, ids
    ),
}
"""{name: a loss}."""
QUICK = list(ENTRIES)[:4]
REFUSED = {"shard": {"weight of the head", "functional_call"}}
"""Refused by torch's FSDP2, which gathers parameters for calls of modules alone."""
WAYS: dict[str, tuple[int, str | None, dict[str, Any]]] = {
    "replicate": (2, "replicate", {}),
    "shard": (2, "shard", {}),
    "tp": (1, None, {}),
    "sequence": (1, None, {"tp_sequence_parallel": True}),
    "loss": (1, None, {"tp_loss_parallel": True}),
    "batch-sharded": (1, "replicate", {"tp_batch_sharded": True}),
    "replicate, sequence": (2, "replicate", {"tp_sequence_parallel": True}),
    "shard, sequence": (2, "shard", {"tp_sequence_parallel": True}),
    "shard, batch-sharded": (2, "shard", {"tp_batch_sharded": True}),
}
"""{name: (copies, mode of `data_parallel`, options of `from_pretrained`)}."""


def start(folder: str, copies: int, mode: str | None, options: dict[str, Any]) -> tuple[Any, Any, list[Tensor], int]:
    """A model, the model of one process, the parts of the batch, and the part of this rank."""
    mesh, ranks = mesh_of(copies), dist.get_world_size()
    model = load(folder, device_mesh=mesh, **options).train()
    if mode is not None:
        tp_transformers.data_parallel(model, mesh, mode=mode)
    parts = ranks if options.get("tp_batch_sharded") else copies
    batches = list(BATCH.chunk(parts))
    return model, AutoModelForCausalLM.from_pretrained(folder).train(), batches, dist.get_rank() * parts // ranks


def check_entries(folder: str, way: str, names: list[str]) -> None:
    """Run on every rank: gradients, and weights after a step, of each loss."""
    model, one_process, batches, part = start(folder, *WAYS[way])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, one_process)]
    for name in names:
        loss = ENTRIES[name]
        loss(model, batches[part]).backward()
        (sum(loss(one_process, batch) for batch in batches) / len(batches)).backward()
        assert max(gradient_differences(model, one_process).values()) < TOLERANCE, name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert max(parameter_differences(model, one_process).values()) < TOLERANCE, name


def sizes(ways: Iterable[str]) -> list[tuple[str, int]]:
    """Ways, each with the number of ranks."""
    return [(way, 2 * WAYS[way][0]) for way in ways]


@pytest.mark.parametrize(("way", "size"), wide(sizes(WAYS), 2))
@on_ranks()
def test_gradients_are_averaged_whatever_is_called(folder, way) -> None:
    check_entries(folder, way, QUICK)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest, cases: Any) -> str:
    """A model whose head is, or is not, the embedding."""
    return cases(9, 3, tie_word_embeddings=request.param).folder


@pytest.mark.slow
@pytest.mark.parametrize(("way", "size"), sizes(WAYS))
@on_ranks()
def test_gradients_are_averaged_whatever_is_called_at_length(tied, way) -> None:
    check_entries(tied, way, [name for name in ENTRIES if name not in REFUSED.get(way.partition(",")[0], ())])


def fail(grad: Tensor) -> None:
    raise FloatingPointError


@on_ranks(4)
def test_a_backward_averages_after_another_one_failed(folder) -> None:
    """A backward fails, then another one averages, without a call of the model between them."""
    model, one_process, batches, part = start(folder, 2, "replicate", {})
    states = model.model(batches[part]).last_hidden_state
    handle = model.model.embed_tokens.weight.register_hook(fail)
    with pytest.raises(FloatingPointError):
        states.pow(2).mean().backward()
    handle.remove()
    model.zero_grad()
    loss = ENTRIES["embeddings alone"]
    loss(model, batches[part]).backward()
    (sum(loss(one_process, batch) for batch in batches) / len(batches)).backward()
    assert max(gradient_differences(model, one_process).values()) < TOLERANCE


@on_ranks(4)
def test_gradients_of_one_copy_are_refused(folder) -> None:
    """Of parameters in a dict of the caller; and of a hook that would step by the gradient of one copy."""
    model, _, batches, part = start(folder, 2, "replicate", {})
    params = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    with refused(UnsupportedError, "stood in for parameters"):
        predict(functional_call(model, params, (batches[part],)).logits, batches[part]).backward()
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda param: None)
    with refused(UnsupportedError, "one copy"):
        model(batches[part], labels=batches[part]).loss.backward()


@needs("full_parameters")
@on_ranks(4)
def test_parameters_that_are_added_are_the_same_in_all_copies(folder) -> None:
    """Embeddings that every copy draws by itself, and then takes from the first."""
    model, _, batches, part = start(folder, 2, "replicate", {})
    torch.manual_seed(part)
    model.resize_token_embeddings(VOCAB + 10, mean_resizing=False)
    model(batches[part], labels=batches[part]).loss.backward()
    weight = model.lm_head.weight
    assert ranks_agree(tp_transformers.full_tensor(weight), tp_transformers.full_tensor(weight, weight.grad))


@pytest.mark.parametrize("mode", wide(["shard", "replicate"], 1))
@on_ranks(4)
def test_prompts_are_averaged(folder, mode) -> None:
    """A prompt's gradient; PEFT calls the embeddings by themselves."""
    mesh, part = mesh_of(2), dist.get_rank() // 2
    models, batches = load_both(folder, device_mesh=mesh), BATCH.chunk(2)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapped = []
    for model in models:
        torch.manual_seed(0)
        wrapped.append(get_peft_model(model, config))
    tp_transformers.data_parallel(wrapped[0], mesh, mode=mode)
    wrapped[0](batches[part], labels=batches[part]).loss.backward()
    (sum(wrapped[1](batch, labels=batch).loss for batch in batches) / 2).backward()
    own, expected = (model.prompt_encoder.default.embedding.weight.grad for model in wrapped)
    assert relative(own.full_tensor() if isinstance(own, DTensor) else own, expected) < TOLERANCE


@needs("peft")
@pytest.mark.parametrize("comes_first", [True, False])
@pytest.mark.parametrize("mode", wide(["shard", "replicate"], 1))
@on_ranks(4)
def test_prompts_outside_of_the_copies_are_refused(folder, mode, comes_first) -> None:
    """A prompt around a model with copies, which no average reaches."""
    mesh, config = mesh_of(2), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = load(folder, device_mesh=mesh)
    with refused(UnsupportedError, "data_parallel(peft_model"):
        if comes_first:
            get_peft_model(model, config)
        tp_transformers.data_parallel(model, mesh, mode=mode)
        get_peft_model(model, config)


@needs("sequence")
@on_ranks()
def test_a_sequence_ends_after_the_last_layer(folder) -> None:
    check_entries(folder, "sequence", ["layer by layer", "a part of a layer"])
