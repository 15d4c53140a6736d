"""Many prompts by transformers' continuous batching: torchrun --nproc-per-node 2 batch.py [MODEL]"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

import tp_transformers

tp_transformers.enable()
name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(name)
prompts = ["The sky is", "Grass is", "Snow is", "Coal is"]
outputs = model.generate_batch(
    inputs=[tokenizer(prompt).input_ids for prompt in prompts],
    generation_config=GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0),
    continuous_batching_config=ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=128),  # else: all free memory
)
if model.tp_group.rank == 0:
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        print(repr(prompt), repr(tokenizer.decode(output.generated_tokens)))
