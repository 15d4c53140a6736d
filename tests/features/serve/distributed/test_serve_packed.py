"""Quantised checkpoints served packed on 2 ranks: the text of one process, the end of a turn, memory and speed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, Mxfp4Config

from tests.features.quantized.distributed.test_quantized import SIZES, packed_folder
from tests.features.serve.distributed.test_serve import client_of, served, serving
from tests.support import quantized
from tests.support.logged import logged
from tests.support.models import load
from tests.support.pool import Pool, free_port
from tests.support.tiers import wide
from tests.support.words import words

QUESTION, NEW = "w5 w17", 8
TEMPLATE = (
    "{{% for message in messages %}}{{{{ message['content'] }}}}"
    "{{% if message['role'] == 'assistant' %}} {end}{{% endif %}} {{% endfor %}}"
)
"""`end` ends an answer, which neither the config nor the tokenizer says."""


def give_words(folder: Path, end: str) -> None:
    """Write a tokenizer of words, with a chat in which `end` ends an answer."""
    template = TEMPLATE.format(end=end)
    words(SIZES["vocab_size"], special=end, pad_token="w0", chat_template=template).save_pretrained(folder)


def asked(client: Any, folder: str) -> tuple[str, str, int]:
    """The text of an answer, why it ended, and how many tokens it has."""
    answer = client.chat.completions.create(
        model=folder, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=NEW
    )
    return answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.completion_tokens


def serve_in_pool(folder: str, port: int, options: list[str]) -> tuple[list[Any], list[str]]:
    """Run on every rank of a pool that ends after it: serve until rank 0 has asked; its answer, and what was logged."""
    from tp_transformers.features.serve import rank

    found: list[Any] = []

    def ask() -> None:
        try:
            client = client_of(port, lambda: True)
            found.append(asked(client, folder))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    if os.environ["RANK"] == "0":
        threading.Thread(target=ask).start()
    with logged() as said:
        rank.main([*options, "--", folder, *serving(port)])
    return found, said


OPTIONS = ["--packed", "--dtype", "fp32"]


@pytest.mark.parametrize(
    ("name", "quantise", "by_command"),
    wide(
        [
            ("llama", quantized.gptq, True),  # the one start of the command in the quick tests
            ("llama", quantized.gptq, False),
            ("llama", quantized.awq, True),
            ("gpt_oss", quantized.mxfp4, True),
        ],
        1,
    ),
)
def test_text_and_its_end_are_those_of_one_process(name, quantise, by_command, tmp_path) -> None:
    """By the command, or by ranks that a pool has started."""
    packed, plain = packed_folder(tmp_path, name, quantise)
    undone = {"quantization_config": Mxfp4Config(dequantize=True)} if quantise is quantized.mxfp4 else {}
    model = AutoModelForCausalLM.from_pretrained(packed if undone else plain, dtype=torch.float32, **undone)
    prompt = torch.tensor([[5, 17]])
    tokens = model.generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0, 2:].tolist()
    last = next(index for index in range(2, NEW) if tokens[index] not in tokens[:index])
    give_words(packed, f"w{tokens[last]}")
    expected = " ".join(f"w{token}" for token in tokens[:last]), "stop", last + 1
    if by_command:
        with served(str(packed), 2, OPTIONS, tmp_path / "said") as (client, _):
            found = asked(client, str(packed))
        said = (tmp_path / "said").read_text()
    else:
        pool = Pool()  # whose ranks keep the handlers of signals and the patches of a server
        try:
            ((found,), told), (nobody, _) = pool.run(2, serve_in_pool, str(packed), free_port(), OPTIONS)
        finally:
            pool.close()
        said = "\n".join(told)
        assert nobody == []
    assert found == expected
    assert "dequantised" not in said


@pytest.fixture(scope="module", params=["gptq", "awq", "mxfp4"])
def real(request: Any, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's weights in a format, or a GPT-OSS of random experts in MXFP4, in bfloat16, with SmolLM2's chat."""
    plain, target = tmp_path_factory.mktemp("plain") / "plain", tmp_path_factory.mktemp("real") / request.param
    if request.param == "mxfp4":
        torch.manual_seed(0)
        sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4, "num_local_experts": 32}
        heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
        config = GptOssConfig(vocab_size=49152, eos_token_id=None, **sizes, **heads)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(plain)
        quantized.mxfp4(plain, target)
    else:
        AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).save_pretrained(plain)
        getattr(quantized, request.param)(plain, target, group=64, is_random=False)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(target)
    return target


def held(folder: str) -> list[int]:
    """Bytes of the weights of this rank, packed and dequantised."""
    return [load(folder, dtype=torch.bfloat16, tp_dequantize=each).tp_report.share for each in (False, True)]


ROUNDS, LONG = 3, 48


@pytest.mark.slow
def test_memory_and_speed_packed_and_dequantised(pool, real) -> None:
    """Two servers side by side, asked in turn; prints the row of the feature's page."""
    other = real.with_name("dequantised")  # another name, by which the ranks of each server are found
    other.symlink_to(real)

    def speed(client: Any, folder: Path, count: int) -> float:
        """Tokens a second of `count` requests at once."""

        def answer(index: int) -> int:
            found = client.chat.completions.create(
                model=str(folder),
                messages=[{"role": "user", "content": f"Tell me {index + 2} long stories of the sea."}],
                temperature=0,
                max_tokens=LONG,
            )
            return int(found.usage.completion_tokens)

        started = time.perf_counter()
        with ThreadPoolExecutor(count) as threads:
            return sum(threads.map(answer, range(count))) / (time.perf_counter() - started)

    options = ["--dtype", "bf16"]
    with served(str(real), 2, [*options, "--packed"]) as (one, _), served(str(other), 2, options) as (two, _):
        sides = ((one, real), (two, other))
        found: dict[int, list[float]] = {}
        for count in (1, 4):
            rounds = [[speed(*side, count) for side in sides] for _ in range(ROUNDS)]
            found[count] = [median(each) for each in zip(*rounds, strict=True)]
    weights = [max(each) for each in zip(*pool.run(2, held, str(real)), strict=True)]
    columns = [[f"{each / 1e6:.0f}" for each in weights]]
    columns += [[f"{each:.1f}" for each in found[count]] for count in (1, 4)]
    print(f"\n| {real.name} | {' | '.join(' / '.join(column) for column in columns)} |")
    assert weights[0] < 0.75 * weights[1]


@pytest.mark.slow
def test_a_chat_ends_at_the_end_of_a_turn(smollm2, tmp_path) -> None:
    """Also where the config knows the end of a text alone."""
    folder = tmp_path / "chatting"
    shutil.copytree(smollm2, folder)
    for file in ("config.json", "generation_config.json"):
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(settings | {"eos_token_id": 0}))
    command = [sys.executable, "-m", "tp_transformers", "chat", str(folder), "-n", "2", "do_sample=False"]
    said = "What is the capital of France? Answer in one word.\n!exit\n"
    chat = subprocess.run(command, input=said, capture_output=True, text=True, timeout=240)
    assert chat.returncode == 0, chat.stderr
    print(chat.stdout)
    assert "Paris" in chat.stdout
    assert "token limit" not in chat.stdout
