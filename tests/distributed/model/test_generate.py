"""`generate` on several ranks: what one process generates, whatever the ranks' seeds, clocks and users' code."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, pipeline
from transformers.generation import stopping_criteria
from transformers.generation.streamers import BaseStreamer

from tests.support.architectures import ARCHITECTURES
from tests.support.comparisons import relative
from tests.support.models import MASK, PROMPTS, VOCAB, load, load_both
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers import MeshError

NEW = 6
TOLERANCE = 1e-4  # fp32 sums in another order
BATCH = {"inputs": PROMPTS, "attention_mask": MASK, "max_new_tokens": NEW, "do_sample": False}
ONE = {"inputs": PROMPTS[1:], "attention_mask": MASK[1:]}


def letters() -> Any:
    """A tokenizer whose tokens are letters; token 0 is "!", which pads."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="!", chat_template=template)


def rank() -> int:
    return int(os.environ["RANK"])


# -- one random state


def sampled_otherwise(folder: str, draft: str) -> list[str]:
    """The ways to sample in which ranks of different seeds are not one process with the seed of rank 0."""
    ours, theirs = load(folder), LlamaForCausalLM.from_pretrained(folder)
    whole = LlamaForCausalLM.from_pretrained(draft)
    ways: dict[str, dict[str, Any]] = {
        "sampling": {},
        "top k and p": {"top_k": 9, "top_p": 0.9, "temperature": 1.4, "num_return_sequences": 2},
        "beam sampling": {"num_beams": 3, "cache_implementation": "static"},
        "prompt lookup": {**ONE, "prompt_lookup_num_tokens": 2},
        "a whole assistant": {**ONE, "assistant_model": whole},
        "a sharded assistant": {**ONE, "assistant_model": load(draft)},
    }
    different = []
    for name, settings in ways.items():
        torch.manual_seed(7 + rank())
        tokens = ours.generate(**{**BATCH, "do_sample": True, **settings})
        state = torch.get_rng_state()
        torch.manual_seed(7)
        if "assistant_model" in settings:
            settings["assistant_model"] = whole
        expected = theirs.generate(**{**BATCH, "do_sample": True, **settings})
        if not torch.equal(tokens, expected) or not torch.equal(state, torch.get_rng_state()):
            different.append(name)
    return different


@pytest.mark.parametrize("size", wide([3, 2], 1))
def test_ranks_sample_what_one_process_with_the_seed_of_rank_0_does(pool, cases, size) -> None:
    assert pool.run(size, sampled_otherwise, cases(9, 3).folder, cases(8, 2).folder) == [[]] * size


@on_ranks(4)
def test_replicas_of_a_mesh_with_a_data_parallel_axis_are_their_own(folder) -> None:
    """Two replicas of two ranks: each samples from its own prompt, by the seed of its own first rank.

    With synced_gpus, the replica that is done first keeps the other company.
    """
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, replica = load(folder, device_mesh=mesh), mesh.get_local_rank("dp")
    prompt = {"inputs": PROMPTS[:, replica + 3 :], "max_new_tokens": NEW + replica, "do_sample": True}
    torch.manual_seed(rank())
    tokens = model.generate(**prompt, synced_gpus=True)
    torch.manual_seed(2 * replica)
    assert torch.equal(tokens, LlamaForCausalLM.from_pretrained(folder).generate(**prompt))


# -- one prompt, one moment to stop


def message(function: Any, **settings: Any) -> str:
    try:
        function(**{**BATCH, **settings})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Collector(BaseStreamer):
    """Keeps what it is given; fails at its own number of calls."""

    def __init__(self, fails_at: int = -1) -> None:
        self.tokens: list[torch.Tensor] = []
        self.fails_at, self.ended = fails_at, False

    def put(self, value: torch.Tensor) -> None:
        if len(self.tokens) == self.fails_at:
            raise BrokenPipeError("nobody reads")
        self.tokens.append(value.flatten())

    def end(self) -> None:
        self.ended = True


def fail(folder: str) -> list[str]:
    """What is told where one rank fails."""
    model, last = load(folder), rank() == 1
    fails = stopping_criteria.StoppingCriteriaList([lambda *_, **__: 1 // 0])
    return [
        message(model.generate, stopping_criteria=fails if last else None),
        message(model.generate, **ONE, streamer=Collector(fails_at=2) if last else None),
        message(model.generate, **ONE, streamer=Collector(fails_at=NEW) if last else None),
        message(model.generate, num_beams=2, streamer=Collector() if last else None),
        message(model.generate),
    ]


def test_what_fails_on_one_rank_is_told_on_all(pool, cases) -> None:
    here, there = pool.run(2, fail, cases(9, 3).folder, timeout=90)
    assert here == there
    assert here[0] == "RemoteRankError: rank 1: ZeroDivisionError: integer division or modulo by zero"
    assert here[1] == here[2] == "RemoteRankError: rank 1: BrokenPipeError: nobody reads"
    assert here[3].startswith("ValueError: `streamer` cannot be used with beam search")
    assert here[4] == "no error"


@on_ranks(2)
def test_ranks_stop_together(folder) -> None:
    """Where they would stop at different steps."""
    model, whole, first = load(folder), LlamaForCausalLM.from_pretrained(folder), rank() == 0
    tokens, start = whole.generate(**BATCH), PROMPTS.shape[1]
    for beams in (1, 2):  # the clock of rank 1 goes by a second a step
        clock = iter(range(100))
        now = (lambda: 0.0) if first else (lambda clock=clock: float(next(clock)))
        with mock.patch.object(stopping_criteria, "time", SimpleNamespace(time=now)):
            found = model.generate(**BATCH, num_beams=beams, max_time=2.5)
        if beams == 1:  # its clock started at 0, and says 3 at the third
            assert torch.equal(found, tokens[:, : start + 3])
        assert found.shape[1] < start + NEW
    enough = stopping_criteria.StoppingCriteriaList(
        [lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] == start + 2)]
    )
    found = model.generate(**BATCH, stopping_criteria=enough if first else None)
    assert torch.equal(found, tokens[:, : start + 2])
    strings = {**ONE, "stop_strings": letters().decode(tokens[1, -3]), "tokenizer": letters()}
    assert torch.equal(*(each.generate(**{**BATCH, **strings}) for each in (model, whole)))
    streamer = Collector()
    model.generate(**{**BATCH, **ONE}, streamer=streamer if first else None)
    if first:
        assert torch.equal(torch.cat(streamer.tokens), tokens[1])
        assert streamer.ended


@on_ranks(2)
def test_a_chat_through_a_pipeline(folder) -> None:
    messages = [[{"role": "user", "content": text}] for text in ("Hello", "Who are you?")]
    texts = []
    for model in (load(folder), LlamaForCausalLM.from_pretrained(folder)):
        torch.manual_seed(7 + rank() * hasattr(model, "tp_group"))
        pipe = pipeline("text-generation", model=model, tokenizer=letters())
        texts.append(pipe(messages, max_new_tokens=NEW, do_sample=True, batch_size=2))
    assert texts[0] == texts[1]
    assert texts[0][0][0]["generated_text"][-1]["role"] == "assistant"


# -- caches, and what is returned


FIELDS = (
    "sequences",
    "scores",
    "logits",
    "attentions",
    "hidden_states",
    "encoder_attentions",
    "encoder_hidden_states",
    "decoder_attentions",
    "decoder_hidden_states",
    "cross_attentions",
)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value or () for tensor in tensors(each)]


def generated_otherwise(name: str, folder: str) -> dict[str, Any]:
    """What differs from one process, by cache and field."""
    auto = getattr(transformers, ARCHITECTURES[name].model)
    # Eager attention alone has weights to return.
    ours, theirs = (load(folder, auto, tp_plan=plan, attn_implementation="eager") for plan in ("auto", None))
    returned = ("scores", "logits", "attentions", "hidden_states")
    everything = {f"output_{field}": True for field in returned} | {"return_dict_in_generate": True}
    ways: dict[str, dict[str, Any]] = {
        "dynamic": {"cache_implementation": "dynamic", **everything},
        "static": {"cache_implementation": "static", **everything},
        "beams": {"num_beams": 3, "cache_implementation": "static"},
        "none": {"use_cache": False},
    }
    if not theirs.config.is_encoder_decoder:
        ways["prefill in chunks"] = {"cache_implementation": "static", "prefill_chunk_size": 3}
    different: dict[str, Any] = {}
    for way, settings in ways.items():
        mine, whole = (model.generate(**BATCH, **settings) for model in (ours, theirs))
        if isinstance(mine, torch.Tensor):
            mine, whole = {"sequences": mine}, {"sequences": whole}
        for field in FIELDS:
            here, there = tensors(mine.get(field)), tensors(whole.get(field))
            finite = [(a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)) for a, b in zip(here, there, strict=True)]
            error = max((relative(*pair) for pair in finite), default=0.0)
            if error > (0 if field == "sequences" else TOLERANCE):
                different[f"{way}, {field}"] = error
        if way == "dynamic":
            different["fields"] = {field for field in FIELDS if tensors(mine.get(field))}
    return different


DECODER = set(FIELDS[:5])


@needs("activations")
@pytest.mark.parametrize(
    ("name", "heads", "size", "fields"),
    wide(
        [
            ("gemma2", (9, 3), 2, DECODER),
            ("t5", (9, 9), 2, set(FIELDS) - {"attentions", "hidden_states"}),
            ("mistral", (8, 2), 3, DECODER),
            ("llama", (9, 3), 2, DECODER),
            ("phi3", (8, 2), 3, DECODER),
            ("bart", (8, 8), 3, set(FIELDS) - {"attentions", "hidden_states"}),
        ],
        2,
    ),
)
def test_every_cache_and_all_that_is_returned(pool, tmp_path, name, heads, size, fields) -> None:
    ARCHITECTURES[name].make(*heads).save_pretrained(tmp_path)
    assert pool.run(size, generated_otherwise, name, str(tmp_path)) == [{"fields": fields}] * size


# -- layers that differ


LAYERS_OF_THEIR_OWN = Version(transformers.__version__) >= Version("5.23")
"""True if transformers itself gives the shape of such a cache layer by layer; before, it raises in one process too."""


def generate_with_other_heads(folder: str) -> None:
    """Run on every rank: the shape of a static cache, and its tokens."""
    ours, theirs = load_both(folder)
    assert torch.equal(*(model.generate(**BATCH, cache_implementation="static") for model in (ours, theirs)))
    if LAYERS_OF_THEIR_OWN:
        assert ours._get_static_cache_init_shape() == ([2, 1], [8, 16])


@pytest.mark.skipif(not hasattr(transformers.PreTrainedConfig, "per_layer_config"), reason="one number for all layers")
def test_a_static_cache_where_layers_differ_in_kv_heads(pool, tmp_path) -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": 2, "global_head_dim": 16}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "attention_k_eq_v": True, "pad_token_id": 0}
    others = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "eos_token_id": None}
    config = transformers.Gemma4TextConfig(**sizes, **heads, **kinds, **others, initializer_range=0.2)
    transformers.Gemma4ForCausalLM(config).save_pretrained(tmp_path)
    pool.run(2, generate_with_other_heads, str(tmp_path))


# -- arguments by position, for classes with a `generate` of their own


class Passing(LlamaForCausalLM):
    """As Granite Speech and Kyutai's speech-to-text."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)


class Naming(LlamaForCausalLM):
    """With a name of its own for the prompt, which only a position can fill."""

    def generate(self, prompt: Any, /, *args: Any, **kwargs: Any) -> Any:
        return super().generate(prompt, *args, **kwargs)


@needs("debug")
@on_ranks(2)
def test_positions_stay_positions_where_a_class_has_its_own_generate(folder) -> None:
    config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    for kind in (Passing, Naming):
        model, whole, own = load(folder, kind), kind.from_pretrained(folder), Collector()
        tokens = (each.generate(PROMPTS, config, attention_mask=MASK) for each in (model, whole))
        assert torch.equal(*tokens), kind
        model.generate(PROMPTS[1:], config, *[None] * 5, own if rank() else None)
        expected = whole.generate(PROMPTS[1:], config)[0, -NEW:]
        assert not rank() or torch.equal(torch.cat(own.tokens[1:]), expected), kind
        with pytest.raises(MeshError, match=r"^generate's"):
            model.generate(PROMPTS + rank(), config)
        with pytest.raises(TypeError):
            model.generate(PROMPTS, config, generation_config=config)
