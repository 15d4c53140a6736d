"""A model that sees, its image tower cut, too: torchrun --nproc-per-node 2 vision.py [MODEL [PICTURE [QUESTION]]]"""

import sys

from transformers import AutoModelForImageTextToText, AutoProcessor

import tp_transformers

tp_transformers.enable()
defaults = ("llava-hf/llava-interleave-qwen-0.5b-hf", "picture.png", "What is in this picture?")
name, picture, question = (*sys.argv[1:], *defaults[len(sys.argv) - 1 :])
model = AutoModelForImageTextToText.from_pretrained(name, tp_plan="auto", dtype="float32")
processor = AutoProcessor.from_pretrained(name)
content = [{"type": "image", "path": picture}, {"type": "text", "text": question}]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}],
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
    return_tensors="pt",
).to(model.device)
tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False)
if model.tp_group.rank == 0:
    print("answer", processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
