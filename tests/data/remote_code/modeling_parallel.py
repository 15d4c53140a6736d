"""A model that came with its own code: grouped heads, a gated MLP, and attention and MLP beside each other."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class ParallelConfig(PreTrainedConfig):
    model_type = "parallel_of_tomorrow"

    def __init__(
        self, vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=100, **kwargs,
    ):  # fmt: skip
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.intermediate_size = intermediate_size
        super().__init__(**kwargs)


class Attend(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        kv_width = config.num_key_value_heads * self.head_dim
        self.to_q = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.to_k = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.to_v = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.back = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, mask):
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.to_q, self.to_k, self.to_v))
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.back(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.inner = nn.Linear(config.hidden_size, config.intermediate_size)
        self.outer = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.outer(silu(self.gate(x)) * self.inner(x))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size)
        self.attend = Attend(config)
        self.mlp = Gated(config)

    def forward(self, x, mask):
        y = self.norm(x)
        return x + self.attend(y, mask) + self.mlp(y)


class ParallelForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = ParallelConfig

    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def get_output_embeddings(self):
        return self.head

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        if attention_mask is not None:
            own = torch.eye(length, dtype=torch.bool, device=input_ids.device)
            mask = mask & attention_mask.bool()[:, None, None, :] | own
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
