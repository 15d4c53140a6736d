"""The openai client and `tp-transformers serve MODEL -n 2 --port 8000`: python ask.py MODEL [URL [REQUESTS]]

It asks one question after the other, then all at once, as streams, and prints tokens a second of both.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

name, url, requests = (*sys.argv[1:], *("", "http://127.0.0.1:8000/v1", "32")[len(sys.argv) - 1 :])
client = OpenAI(base_url=url, api_key="none", timeout=600)
questions = ["Why is the sky blue?", "Why is grass green?", "Why is snow white?", "Why is coal black?"]


def ask(question: str) -> tuple[str, int]:
    """The streamed answer, and its number of pieces, which are tokens."""
    messages = [{"role": "user", "content": question}]
    stream = client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=16, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    return "".join(pieces), sum(bool(piece) for piece in pieces)


ask(questions[0])  # the first request makes the cache
started = time.perf_counter()
one_by_one = [ask(question) for question in questions]
alone = sum(count for _, count in one_by_one) / (time.perf_counter() - started)
started = time.perf_counter()
with ThreadPoolExecutor(int(requests)) as threads:
    together = list(threads.map(lambda index: ask(questions[index % 4]), range(int(requests))))
rate = sum(count for _, count in together) / (time.perf_counter() - started)
same = sum(answer == one_by_one[index % 4][0] for index, (answer, _) in enumerate(together))
for question, (answer, _) in zip(questions, one_by_one, strict=True):
    print(repr(question), repr(answer))
print(f"{same} of {requests} at once say the same")
print(f"tokens a second: {alone:.1f} one by one, {rate:.1f} at once", file=sys.stderr)
