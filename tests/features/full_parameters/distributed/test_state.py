"""A tensor-parallel model behaves like a model in everything about its state; references are of one process."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import tp_transformers
from tests.support.comparisons import different_tensors, full_parameters, gradient_differences, read_folder, relative
from tests.support.models import MASK, PROMPTS, VOCAB, load, load_both
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide

TOLERANCE = 1e-4  # fp32 sums in another order


@pytest.fixture
def checkpoint(cases: Any, tmp_path: Path, kind: str) -> str:
    """A model of few layers: with tied weights, with KV heads that ranks share, or with experts."""
    if kind == "tied":
        return cases(9, 3, tie_word_embeddings=True, num_hidden_layers=1).folder
    if kind == "shared heads":
        return cases(8, 2).folder
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "num_local_experts": 3}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads, initializer_range=0.2)).save_pretrained(tmp_path / "mixtral")
    return str(tmp_path / "mixtral")


def assert_same_model(model: Any, whole: Any) -> None:
    """The ranks' shards are the parameters of `whole`, in order, name, dtype and value; so are ties and logits."""
    ours, theirs = dict(model.named_parameters()), dict(whole.named_parameters())
    assert list(ours) == list(theirs)
    for name, param in theirs.items():
        full = tp_transformers.full_tensor(ours[name])
        assert full.dtype == param.dtype, name
        assert torch.equal(full, param), name
    prompts = PROMPTS.clamp(max=whole.config.vocab_size - 1)
    with torch.no_grad():
        logits, expected = (each(prompts, attention_mask=MASK).logits for each in (model, whole))
    # bf16 sums in another order differ by a few of its steps of 2**-8
    assert relative(logits, expected) < (TOLERANCE if expected.dtype == torch.float32 else 0.1)


@pytest.mark.parametrize(("kind", "size"), wide([("tied", 2), ("shared heads", 3), ("experts", 2)], 1))
@on_ranks()
def test_state_of_a_model(checkpoint, tmp_path) -> None:
    model, whole = load_both(checkpoint)
    rank = dist.get_rank()

    # counts
    for options in ({}, {"only_trainable": True}, {"exclude_embeddings": True}):
        assert model.num_parameters(**options) == whole.num_parameters(**options), options
    held = {id(p): tp_transformers.local_tensor(p).nbytes for p in model.parameters()}
    assert model.get_memory_footprint(return_buffers=False) == sum(held.values())
    assert model.get_memory_footprint() < whole.get_memory_footprint()

    # state dicts: what came out, and whole ones
    ours, theirs = model.state_dict(), {name: value.clone() for name, value in whole.state_dict().items()}
    assert list(ours) == list(theirs)
    assert all(type(value) is not torch.nn.Parameter for value in ours.values())
    ours = copy.deepcopy(ours)  # what state_dict() returns is the parameters' own memory
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    from_disk = torch.load(buffer, weights_only=True)
    params = dict(model.named_parameters())
    for source in (ours, theirs, from_disk):
        for assign in (False, True):
            with torch.no_grad():
                for param in model.parameters():
                    tp_transformers.local_tensor(param).zero_()
            result = model.load_state_dict(copy.deepcopy(source), assign=assign)
            assert not result.missing_keys
            assert not result.unexpected_keys
            model.tie_weights()
            assert_same_model(model, whole)
        # Loading kept what the parameters are.
        assert {name: type(param) for name, param in model.named_parameters()} == {
            n: type(p) for n, p in params.items()
        }
    name = next(iter(theirs))
    partial = {key: value for key, value in theirs.items() if key != name}
    result = model.load_state_dict({**partial, "other": torch.ones(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == ([name], ["other"])
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{name}".*\n.*Unexpected.*"other"'):
        model.load_state_dict({**partial, "other": torch.ones(1)})
    bad = {**theirs, name: torch.ones(3, 5)}
    with pytest.raises(
        RuntimeError, match=rf"size mismatch for {name}: got a tensor of shape \(3, 5\), expected the full"
    ):
        model.load_state_dict(bad if rank == 0 else theirs)
    model.load_state_dict(theirs)

    # other dtypes; gradients, copies and checkpoints after them
    for change in ("bfloat16", "float", "half"):
        getattr(model, change)(), getattr(whole, change)()
        if change != "half":
            assert_same_model(model, whole)
    model.to(torch.float32), whole.to(torch.float32)
    assert_same_model(copy.deepcopy(model), whole)
    assert model.lm_head.weight is not model.get_input_embeddings().weight or whole.config.tie_word_embeddings
    for each in (model, whole):
        each.zero_grad()
        each(PROMPTS, attention_mask=MASK, labels=PROMPTS).loss.backward()
    errors = gradient_differences(model, whole)
    assert max(errors.values()) < TOLERANCE, errors
    model.to(torch.bfloat16).to(torch.float32)  # with gradients around
    whole.to(torch.bfloat16).to(torch.float32)
    assert all(param.grad is not None for param in model.parameters())
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    model.save_pretrained(tmp_path / "saved")
    dist.barrier()
    assert read_folder(tmp_path / "saved").keys() == read_folder(checkpoint).keys()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in whole.state_dict().items())

    # modes
    assert model.train().model.layers[0].training
    assert not model.eval().model.layers[0].training
    model.requires_grad_(False)
    assert not any(param.requires_grad for param in model.parameters())
    assert model.num_parameters(only_trainable=True) == 0
    model.requires_grad_(True)
    model.to("cpu").cpu()
    for refused in (lambda: pickle.dumps(model), lambda: torch.save(model, io.BytesIO())):
        with pytest.raises(tp_transformers.UnsupportedError, match=r"expected its state\. Call model.save_pretrained"):
            refused()
    assert_same_model(model, whole)

    # embeddings
    model.set_input_embeddings(model.get_input_embeddings())
    model.tie_weights(), whole.tie_weights()
    assert_same_model(model, whole)
    for size in (VOCAB + 9, VOCAB + 9, VOCAB - 20):
        torch.manual_seed(7 + rank)  # rank 0's draw counts
        embeddings = model.resize_token_embeddings(size)
        torch.manual_seed(7)
        whole.resize_token_embeddings(size)
        assert embeddings is model.get_input_embeddings()
        assert model.config.get_text_config().vocab_size == size
        assert embeddings.weight.tp_shard.local_shape[0] < size
    assert_same_model(model, whole)
    prompts = PROMPTS.clamp(max=size - 1)
    tokens = [each.generate(prompts, attention_mask=MASK, max_new_tokens=4, do_sample=False) for each in (model, whole)]
    assert torch.equal(*tokens)
    fresh = torch.nn.Embedding(size, embeddings.embedding_dim)
    dist.broadcast(fresh.weight.data, 0)
    whole.set_input_embeddings(copy.deepcopy(fresh)), model.set_input_embeddings(fresh)
    whole.tie_weights(), model.tie_weights()
    assert fresh.weight.tp_shard.local_shape[0] < size
    assert_same_model(model, whole)


# -- files of one rank


@pytest.mark.parametrize("heads", [(8, 4), (9, 3)])
@on_ranks(vocab_size=202)
def test_the_file_of_one_rank_is_refused_on_others(folder, tmp_path) -> None:
    """Loads of rank 0's files; loads of a rank's own files are right."""

    def saved(value: Any) -> tuple[Any, Any]:
        """What torch.save of rank 0, and of this rank, gives back."""
        rank = dist.get_rank()
        torch.save(value, tmp_path / f"{rank}.pt")
        dist.barrier()
        files = [torch.load(tmp_path / f"{file}.pt", weights_only=True) for file in (0, rank)]
        dist.barrier()
        return files[0], files[1]

    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters())
    model(PROMPTS, labels=PROMPTS).loss.backward()
    optimizer.step()
    name = "model.layers.0.self_attn.q_proj.weight"
    param = model.get_parameter(name)
    weights, gradient = full_parameters(model), tp_transformers.full_tensor(param, param.grad)
    moments = [tp_transformers.full_tensor(param, optimizer.state[param]["exp_avg"]) for param in model.parameters()]
    first, own = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "grad": param.grad})
    tp_transformers.local_tensor(param).zero_()
    model.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])
    param.grad = copy.deepcopy(own["grad"])
    assert different_tensors(full_parameters(model), weights) == []
    loaded = [tp_transformers.full_tensor(param, optimizer.state[param]["exp_avg"]) for param in model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(loaded, moments, strict=True))
    assert torch.equal(tp_transformers.full_tensor(param, param.grad), gradient)

    other = "got the shard of rank 0 of 2, expected the shard of rank 1 of 2, or the full tensor"
    advice = "let every rank save and load a file of its own"
    for load_first in (
        lambda: model.load_state_dict(first["model"]),
        lambda: model.load_state_dict(first["model"], assign=True),
        lambda: optimizer.load_state_dict(first["optimizer"]),
    ):
        with pytest.raises(tp_transformers.CheckpointError, match=f"{other}(.|\n)*{advice}"):
            load_first()
    if dist.get_rank() and not isinstance(param, DTensor):  # for DTensors, torch's own assignment
        values = {"data": first["model"][name], "grad": first["grad"]}
        for attribute, value in values.items():
            with pytest.raises(tp_transformers.CheckpointError, match="the shard of rank 0 of 2, expected the shard"):
                setattr(param, attribute, value)
    assert different_tensors(full_parameters(model), weights) == []


@on_ranks()
def test_a_gradient_that_is_not_there_is_none(folder) -> None:
    """What `full_tensor` makes of gradients that are not there, everywhere or on one rank."""
    model, whole = load_both(folder)
    params = dict(model.named_parameters())
    assert all(tp_transformers.full_tensor(param, param.grad) is None for param in params.values())
    for each in (model, whole):
        each(PROMPTS, labels=PROMPTS).loss.backward()
    name = "model.layers.0.self_attn.q_proj.weight"
    shard = params[name].tp_shard
    if shard.group.rank:
        params[name].grad = None
    expected = whole.get_parameter(name).grad.clone()
    kept = torch.zeros_like(expected)
    start, stop = shard.layout.split.ranges[0][0]
    kept[start:stop] = expected[start:stop]
    assert relative(tp_transformers.full_tensor(params[name], params[name].grad), kept) < TOLERANCE
    assert tp_transformers.full_tensor(whole.lm_head.weight, None) is None
