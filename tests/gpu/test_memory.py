"""Loads to a GPU: the shards are those of the files, and the device holds them and nothing beside."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import tp_transformers
from benchmarks.check import check
from tests.support.devices import IS_GPU, allocated, forget_peak, load_here, peak
from tests.support.models import llama_config
from tests.support.tiers import wide

BLOCK = 512
"""Bytes of the blocks of torch's allocator."""


def checked(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run on every rank: number of tensors that are equal to the files', and the bytes that a load takes."""
    rank_memory = allocated()
    forget_peak()
    model = load_here(folder, **options)
    group, held, most = model.tp_group, allocated() - rank_memory, peak() - rank_memory
    tensors = [tp_transformers.local_tensor(each) for each in (*model.parameters(), *model.buffers())]
    own = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return {
        "tensors": check(model, Path(folder), rank=group.rank, size=group.size, collectives=True),
        "shard": sum(own.values()),
        "rounded": sum(-(-nbytes // BLOCK) * BLOCK for nbytes in own.values()),
        "held": held,
        "peak": most,
        "devices": {each.device.type for each in tensors},
        "share": model.tp_report.share,
    }


@pytest.mark.parametrize("options", [{}, {"tp_map": False}], ids=["default", "copied"])
@pytest.mark.parametrize("size", wide([2, 3], 1))
def test_a_load_takes_the_bytes_of_the_shard(pool, tmp_path, size, options) -> None:
    torch.manual_seed(0)
    config = llama_config(9, 3, intermediate_size=3000, vocab_size=8000)
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="500KB")
    count = len(model.state_dict())
    for result in pool.run(size, checked, str(tmp_path), {**options, "dtype": torch.bfloat16}):
        print(result)
        assert result["tensors"] == count
        if IS_GPU:
            assert result["devices"] == {"cuda"}
            assert result["shard"] <= result["held"] <= result["rounded"], "the device holds shards alone"
            assert result["peak"] - result["held"] <= result["shard"] // 2 + (1 << 20), "no second copy on the device"
        else:
            assert result["devices"] == {"cpu"}
