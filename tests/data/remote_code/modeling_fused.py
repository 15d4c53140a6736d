"""A model that came with its own code: one projection to queries, keys and values, learned positions, two norms."""

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class FusedConfig(PreTrainedConfig):
    model_type = "fused_of_tomorrow"

    def __init__(
        self, vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=8,
        max_position_embeddings=64, **kwargs,
    ):  # fmt: skip
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)


class Attend(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.back = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, mask):
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.back(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.before = nn.LayerNorm(config.hidden_size)
        self.attend = Attend(config)
        self.between = nn.LayerNorm(config.hidden_size)
        self.inner = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.outer = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, x, mask):
        x = x + self.attend(self.before(x), mask)
        return x + self.outer(gelu(self.inner(self.between(x))))


class FusedForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = FusedConfig

    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size)
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
        x = self.tokens(input_ids) + self.positions(torch.arange(length, device=input_ids.device))
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
