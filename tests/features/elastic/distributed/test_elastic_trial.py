"""Ranks of an elastic server are killed at random moments: each request of its clients is answered with its text."""

import os
import random
import signal
import threading
import time

import pytest

from tests.features.elastic.distributed.test_elastic import NEW, WAIT, elastic
from tests.features.serve.distributed.test_serve import answers, folder

pytestmark = pytest.mark.slow

__all__ = ["folder"]

CLIENTS, KILLS = 8, int(os.environ.get("KILLS", 20))
MOMENTS = ("prefill", "decode", "between", "reshard", "two at once")


def test_trial_of_many_kills(folder, tmp_path) -> None:
    draw = random.Random(5)
    words = [" ".join(f"w{draw.randrange(3, 190)}" for _ in range(draw.choice((2, 4, 400)))) for _ in range(CLIENTS)]
    texts, lines, counts, pauses = answers(folder, words, NEW), 0, dict.fromkeys(MOMENTS, 0), []
    with elastic(folder, tmp_path, "--rejoin", "5000") as server:
        over, rest = threading.Event(), threading.Event()

        def asks(index: int) -> int:
            """One client; returns how many answers were right."""
            count = 0
            while not over.is_set():
                if rest.is_set():
                    time.sleep(0.05)
                    continue
                text, pause = server.text(words[index])
                assert text == texts[index]
                pauses.append(pause)
                count += 1
            return count

        clients = [server.threads.submit(asks, index) for index in range(CLIENTS)]
        killed = 0
        while killed < KILLS:
            moment = MOMENTS[sum(counts.values()) % len(MOMENTS)]
            victims = draw.sample([1, 2], 2)
            time.sleep(draw.uniform(0.1, 2))
            if moment == "between":
                rest.set()
                time.sleep(1)
            if moment == "prefill":
                threading.Timer(draw.uniform(0, 0.2), server.kill, victims[:1]).start()
                server.ask([" ".join(["w9"] * 3000)], 1)
            elif moment == "reshard":
                (tmp_path / f"reshard{victims[1]}").touch()
                server.kill(victims[0])
            else:
                server.kill(*victims[: 2 if moment == "two at once" else 1])
            both = moment in ("reshard", "two at once")
            rest.clear()
            killed, lines = killed + 1 + both, lines + 1
            counts[moment] += 1
            server.until(lines, 1 if both else 2)
            server.process.send_signal(signal.SIGUSR1)  # the lost ranks are started
            server.until(lines + 1, 3)
            lines = len(server.said())
            assert all(not client.done() for client in clients), [
                client.exception() for client in clients if client.done()
            ]
        over.set()
        answered = [client.result(WAIT) for client in clients]
    print(counts, f"{killed} kills, {sum(answered)} answers; longest pauses", sorted(pauses)[-10:])
    print(*server.said(), sep="\n")
    assert min(answered) > 0
