"""`tp-transformers serve` over HTTP, by the `openai` client, answers as one process does; its ranks end together."""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.features.run.distributed.test_signals import processes
from tests.support.models import VOCAB
from tests.support.pool import free_port
from tests.support.waiting import until
from tests.support.words import words
from tp_transformers.features.run.launch import end_with_parent

openai = pytest.importorskip("openai")
for package in ("fastapi", "uvicorn"):
    pytest.importorskip(package)

pytestmark = pytest.mark.slow

QUESTIONS = ["w5 w17", "w98", "w3 w77 w12 w9", "w150 w41"]
NEW = 8
LAUNCHER = "tp_transformers.features.run.agent"
END = 60
"""Seconds in which all ranks have to end, on a busy machine too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cases: Any) -> str:
    target = tmp_path_factory.mktemp("served") / "checkpoint"
    shutil.copytree(cases(9, 3).folder, target)
    config = LlamaConfig.from_pretrained(target)
    config.max_position_embeddings = 4096  # longer than any request here
    config.save_pretrained(target)
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    words(VOCAB, pad_token="w0", chat_template=template).save_pretrained(target)
    return str(target)


def serving(port: int) -> list[str]:
    """Options of transformers' server, with a small cache."""
    return ["--host", "127.0.0.1", "--port", str(port), "--cb-num-blocks", "40", "--cb-max-batch-tokens", "256"]


def client_of(port: int, runs: Callable[[], bool]) -> Any:
    """A client of the server at a port, once it answers."""
    for _ in range(1200):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            break
        except OSError:
            assert runs()
            time.sleep(0.1)
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120)


@contextmanager
def served(
    folder: str, ranks: int, options: Sequence[str] = (), log: Path | None = None, **environment: str
) -> Iterator[tuple[Any, subprocess.Popen[bytes]]]:
    """A client of a server that answers, and its process, whose output goes to the file `log`."""
    port = free_port()
    command = [sys.executable, "-m", "tp_transformers", "serve", folder, "-n", str(ranks), *serving(port), *options]
    own = {"env": {**os.environ, **environment}, "start_new_session": True, "preexec_fn": end_with_parent}
    with (
        log.open("wb") if log else nullcontext() as output,
        subprocess.Popen(command, stdout=output, stderr=output, **own) as process,
    ):
        try:
            yield client_of(port, lambda: process.poll() is None), process
        finally:
            for pid in processes_of(folder):
                os.kill(pid, signal.SIGKILL)
            process.kill()


def processes_of(folder: str) -> list[int]:
    """The processes of a server: its launcher and its ranks, in the order of their start."""
    return processes(folder, "tp_transformers.features.serve.rank")


def ranks_of(folder: str) -> list[int]:
    """The ranks of a server, in the order of their start."""
    return [pid for pid in processes_of(folder) if pid not in processes(folder, LAUNCHER)]


def ask(client: Any, folder: str, question: str, stream: bool) -> str:
    answer = client.chat.completions.create(
        model=folder,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=NEW,
        stream=stream,
    )
    if not stream:
        return str(answer.choices[0].message.content)
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)


def answers(folder: str, questions: Sequence[str] = QUESTIONS, new: int = NEW) -> list[str]:
    """The answers of one process."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        tokens = model.generate(**inputs, max_new_tokens=new, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        found.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return found


def wait_for_end(folder: str) -> None:
    until(lambda: not processes_of(folder), END)


@pytest.mark.parametrize("ranks", [2, 3])
def test_concurrent_answers_are_those_of_one_process(folder, ranks) -> None:
    expected = answers(folder)
    with served(folder, ranks) as (client, process):
        assert [ask(client, folder, question, False) for question in QUESTIONS] == expected
        with ThreadPoolExecutor(32) as threads:
            given = threads.map(lambda index: ask(client, folder, QUESTIONS[index % 4], True), range(32))
            assert list(given) == expected * 8
        stream = client.chat.completions.create(
            model=folder, messages=[{"role": "user", "content": "w5"}], max_tokens=200, stream=True
        )
        next(iter(stream))
        stream.close()  # cancels
        assert ask(client, folder, QUESTIONS[0], False) == expected[0]
        assert len(ranks_of(folder)) == ranks
        process.send_signal(signal.SIGTERM)
        wait_for_end(folder)


TALK = {"messages": [{"role": "user", "content": "w5"}]}
SCORE = {"type": "score", "instructions": "w5", "criteria": ["w5", "w6", "w7"]}
BAD = [
    ("completions", {"prompt": ""}, "prompt: got 0 tokens"),
    ("completions", {"prompt": "w5 " * 20_000}, "prompt: got 20000 tokens, expected between 1 and"),
    ("completions", {"prompt": "w5", "stop": ["w9"]}, "stop: got"),
    ("chat/completions", {**TALK, "n": 2}, "n: got 2"),
    ("chat/completions", {**TALK, "generation_config": '{"repetition_penalty": 1.5}'}, "RepetitionPenalty"),
    ("chat/completions", {**TALK, "generation_config": '{"num_beams": 3}'}, "num_beams"),
    ("chat/completions", {**TALK, "temperature": -1.0}, "settings of generation: got"),
    ("responses", {"input": "w5", "text": {"format": {"type": "json_object"}}}, "text: got"),
    ("systemone", {"state": "w5", "questions": {"q": SCORE}}, "endpoint: got"),
]
"""(endpoint, fields, part of the reason) of requests that cannot be answered."""


def test_what_cannot_be_answered_is_refused_and_the_server_goes_on(folder) -> None:
    expected = answers(folder)
    with served(folder, 2) as (client, process):
        for endpoint, fields, said in BAD:
            with pytest.raises(openai.APIStatusError) as refused:
                client.post(f"/{endpoint}", body={"model": folder, **fields}, cast_to=object)
            assert refused.value.status_code in (400, 422)
            assert said in str(refused.value)
        assert [ask(client, folder, question, False) for question in QUESTIONS] == expected
        process.send_signal(signal.SIGTERM)
        wait_for_end(folder)


@pytest.mark.parametrize("drain", [2, 60])
def test_requests_are_drained_for_a_time_that_can_be_set(folder, tmp_path, drain) -> None:
    log = tmp_path / "output"
    with served(folder, 2, ["--drain", str(drain)], log) as (client, process), ThreadPoolExecutor(3) as threads:

        def answer(stream: bool) -> str:
            try:
                text = client.with_options(max_retries=0).chat.completions.create(
                    model=folder, **TALK, max_tokens=1000 if drain > 2 else 9000, temperature=0, stream=stream
                )
                last = list(text)[-1] if stream else text
                return str(last.choices[0].finish_reason)
            except openai.APIError as error:
                return str(getattr(error, "status_code", error))

        running = [threads.submit(answer, stream) for stream in (True, False, True)]
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        ends = [each.result() for each in running]
        wait_for_end(folder)
        assert process.wait(END) == 128 + signal.SIGTERM
    printed = log.read_text()
    assert printed.count(f"may take {drain} s more") == 1
    assert "Traceback" not in printed
    assert ends == ["length"] * 3 if drain > 2 else ends[1] == "503" and "length" not in ends


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_dies_ends_all(folder, tmp_path, killed) -> None:
    with served(folder, 2, log=tmp_path / "said") as (client, process):
        ask(client, folder, QUESTIONS[0], False)
        os.kill(ranks_of(folder)[killed], signal.SIGKILL)
        wait_for_end(folder)
        assert process.wait(END) == 137
    told = (tmp_path / "said").read_text()
    assert f"tp-transformers serve: rank {killed} ended by SIGKILL" in told
    assert "Traceback" not in told


def test_a_rank_that_is_paused_ends_all(folder, tmp_path) -> None:
    """A request meets a rank that gives no sign of life for `--watch` seconds."""
    with served(folder, 2, ["--watch", "3"], tmp_path / "said") as (client, process):
        assert ask(client, folder, QUESTIONS[0], stream=False)
        os.kill(ranks_of(folder)[1], signal.SIGSTOP)
        with pytest.raises(openai.APIError):
            ask(client.with_options(max_retries=0), folder, QUESTIONS[1], stream=False)
        assert process.wait(90) != 0  # torchrun waits 30 s for the rank that hears no signal
        wait_for_end(folder)
    told = (
        "a batch: got no sign of life of rank 1, expected an answer. It was killed; or paused or swapped out for 18 s"
    )
    assert (tmp_path / "said").read_text().count(told) == 1
    assert "may take 20 s" not in (tmp_path / "said").read_text()


@pytest.mark.parametrize("asked", [False, True])
def test_an_interrupt_in_the_terminal_ends_all_in_silence(folder, tmp_path, asked) -> None:
    with served(folder, 2, log=tmp_path / "output") as (client, process):
        (model,) = client.models.list().data  # without a cache of the Hub, too
        assert model.id == folder
        if asked:
            ask(client, folder, QUESTIONS[0], False)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all that it shows
        wait_for_end(folder)
        assert process.wait(END) == 130
    printed = (tmp_path / "output").read_text()
    assert not [word for word in ("Traceback", "Interrupt", "SIG") if word in printed]


REFUSED = {
    "an option misspelt": (["{folder}", "--prot", "8000"], "No such option: --prot"),
    "no folder": (["./no/such"], "./no/such: got no such folder"),
    "an empty folder": (["{empty}"], "got a folder without config.json"),
    "no weights": (["{bare}"], "no file named model.safetensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_told_once(folder, tmp_path, name) -> None:
    empty, bare = tmp_path / "empty", tmp_path / "bare"
    empty.mkdir()
    bare.mkdir()
    shutil.copy(Path(folder) / "config.json", bare)
    arguments, said = REFUSED[name]
    arguments = [each.format(folder=folder, empty=empty, bare=bare) for each in arguments]
    command = [sys.executable, "-m", "tp_transformers", "serve", *arguments, "-n", "2", "--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.count(said) == 1
    assert "Traceback" not in done.stderr
    assert "Loading" not in done.stderr


def test_an_interrupt_ends_an_answer(folder) -> None:
    with served(folder, 2, ["--drain", "2"]) as (client, process):
        chat = [{"role": "user", "content": QUESTIONS[0]}]
        answer = client.chat.completions.create(
            model=folder, messages=chat, max_tokens=5000, temperature=0, stream=True
        )
        next(iter(answer))
        process.send_signal(signal.SIGINT)
        wait_for_end(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's end")
@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("ended", ["SIGTERM of the command", "SIGKILL of the command", "SIGKILL of torchrun"])
def test_a_launcher_that_is_ended_ends_all(folder, ended, is_asked) -> None:
    with served(folder, 2) as (client, process):
        if is_asked:
            ask(client, folder, QUESTIONS[0], False)
        (torchrun,) = processes(folder, LAUNCHER)
        name, _, target = ended.partition(" of ")
        os.kill(torchrun if target == "torchrun" else process.pid, signal.Signals[name])
        wait_for_end(folder)


def test_chat_answers_as_one_process(folder) -> None:
    """In a terminal of its own, which shows nothing of the server, behind a proxy that does not answer, and offline."""
    said = f"{QUESTIONS[0]}\nn\n!exit\n"  # n: do not go on with an answer that has reached its length
    flags = [f"max_new_tokens={NEW}", "do_sample=False"]
    command = [sys.executable, "-m", "tp_transformers", "chat", folder, "-n", "2", *flags]
    away = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **away, "no_proxy": "", "NO_PROXY": ""}
    chat = subprocess.run(command, input=said, env=environment, capture_output=True, text=True, timeout=240)
    assert chat.returncode == 0, chat.stderr
    assert answers(folder)[0] in " ".join(chat.stdout.split())
    assert not [line for line in (chat.stdout + chat.stderr).splitlines() if "Traceback" in line or "INFO" in line]
    wait_for_end(folder)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_chat_that_is_ended_ends_its_server_and_its_terminal(folder, by) -> None:
    command = [sys.executable, "-m", "tp_transformers", "chat", folder, "-n", "2"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent, **pipes) as process:
        while not processes(folder, "transformers.cli.transformers"):
            assert process.poll() is None
            time.sleep(0.5)
        process.send_signal(by)
        assert process.wait(60) == (128 + by if by != signal.SIGKILL else -by)
        wait_for_end(folder)
        assert not processes(folder, "transformers.cli.transformers")
