"""`verify` of attention whose code counts its heads in a way of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import main
from tests.support.remote_code import with_code

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_attention_that_counts_heads_by_a_name_of_its_own_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_code(tmp_path / "model", "fused")
    code = Path(folder) / "modeling_fused.py"
    text = code.read_text().replace("x.shape[:-1], -1, self.head_dim", "x.shape[:-1], self.nh, self.head_dim")
    code.write_text(text.replace("self.head_dim =", "self.nh = config.num_attention_heads\n        self.head_dim ="))
    plan, said = tmp_path / "plan.yaml", "the plan's attention shards its heads) Its forward finds a rank's heads in"
    for more, is_told in (("", True), (", gathered: true", False)):  # the remedy that the message names
        plan.write_text(f"attention: {{blocks.*.attend: {{fused: qkv, output: back{more}}}}}\n")
        options = ["--plan", str(plan), "--tp-size", "2", "--trust-remote-code", "--allow-replicated"]
        assert main(["verify", folder, *options]) == is_told
        assert (said in capsys.readouterr().out) is is_told
