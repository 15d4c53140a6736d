"""Inference by actors of Ray, one a rank, on any nodes of a cluster: python ray_actors.py [MODEL [RANKS]]"""

import os
import socket
import sys

import ray
import torch


@ray.remote
class Rank:
    """One rank of a model."""

    def place(self):
        """The address of this actor's node, and a free port of it."""
        with socket.create_server(("", 0)) as server:
            return ray.util.get_node_ip_address(), server.getsockname()[1]

    def load(self, name, rank, ranks, place):
        """Meet the other ranks at `place`, that of rank 0, and load a shard. Call it on all actors at once."""
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR=place[0], MASTER_PORT=str(place[1]))
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import tp_transformers

        tp_transformers.enable()
        self.model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto", dtype="float32")
        self.tokenizer = AutoTokenizer.from_pretrained(name)

    def answer(self, prompt):
        """Continue a prompt. Call it on all actors at once."""
        inputs = self.tokenizer(prompt, return_tensors="pt").to(self.model.device)
        output = self.model.generate(**inputs, max_new_tokens=12, do_sample=False)
        return self.tokenizer.decode(output[0], skip_special_tokens=True)


def main():
    """Start the actors, each with a GPU if there are any, and ask them."""
    given = ("HuggingFaceTB/SmolLM2-135M-Instruct", "2")
    name, ranks = (*sys.argv[1:], *given[len(sys.argv) - 1 :])
    ray.init()
    needs = {"num_gpus": 1} if torch.cuda.is_available() else {"num_cpus": 1}
    actors = [Rank.options(**needs).remote() for _ in range(int(ranks))]
    place = ray.get(actors[0].place.remote())
    ray.get([actor.load.remote(name, rank, len(actors), place) for rank, actor in enumerate(actors)])
    for prompt in ["The sky is", "Grass is"]:
        texts = ray.get([actor.answer.remote(prompt) for actor in actors])  # one from each rank, all equal
        print(repr(texts[0]))


if __name__ == "__main__":
    main()
