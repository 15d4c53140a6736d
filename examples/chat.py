"""A chat in the terminal, in a loop of your own: torchrun --nproc-per-node 2 chat.py [MODEL]

Rank 0 reads what is typed, and all ranks answer it; an empty line ends the chat. `tp-transformers chat MODEL -n 2` is
the chat of transformers itself.
"""

import sys

import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import tp_transformers

tp_transformers.enable()
name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto")
tokenizer = AutoTokenizer.from_pretrained(name)
is_first = model.tp_group.rank == 0
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if is_first else None
chat = []
while True:
    if is_first:
        print("> ", end="", flush=True)
    said = [sys.stdin.readline().strip() if is_first else None]
    if dist.is_initialized():
        dist.broadcast_object_list(said)
    if not said[0]:
        break
    chat.append({"role": "user", "content": said[0]})
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False, streamer=streamer)
    answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    chat.append({"role": "assistant", "content": answer})
