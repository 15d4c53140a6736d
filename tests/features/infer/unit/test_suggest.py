"""`tp-transformers suggest`: blocks that verify finds wrong stay whole, and the plan that is written loads."""

from dataclasses import replace
from typing import Any

from tests.support.commands import main
from tests.support.unplanned import unplanned
from tp_transformers.features.infer.suggestion import prove, suggest
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve
from tp_transformers.verify import Verdict


def test_a_block_that_is_found_wrong_stays_whole(monkeypatch) -> None:
    config = unplanned("mpt")
    suggestion = suggest(config)

    def check(given: Any, *, plan: Plan, sizes: tuple[int, ...], **options: Any) -> list[Verdict]:
        cut = [rule.pattern for rule in plan.rules if rule.strategy_name == "packed_colwise"]
        return [Verdict(2, tuple(f"transformer.{name}: its output differs" for name in cut))]

    logged: list[str] = []
    monkeypatch.setattr(f"{prove.__module__}.verify", check)
    proven, verdict = prove(suggestion, config, 2, log=logged.append)
    assert verdict.ok
    assert [block.kind for block in proven.blocks] == ["mlp", "vocabulary"]
    (line,) = logged
    assert line.startswith("attention transformer.blocks.*.attn stays replicated: transformer.blocks.*.attn.Wqkv: its")
    assert "replicated: verify found it wrong when sharded" in proven.text("")

    monkeypatch.setattr(f"{prove.__module__}.verify", lambda *_, **__: [Verdict(2, ("no",))])
    never = prove(suggestion, config, 2)
    assert never[0].blocks == []
    assert not never[1].ok


def test_the_command_writes_a_plan_that_loads(tmp_path, capsys, printed) -> None:
    unplanned("gptj").save_pretrained(tmp_path)
    out = tmp_path / "gptj.yaml"
    assert main(["suggest", str(tmp_path / "config.json"), str(out), "--no-verify"]) == 0
    captured = capsys.readouterr()
    assert captured.err == (
        "tp-transformers suggest: gptj has a plan already, gptj.yaml, which auto takes\n"
        "tp-transformers suggest: looking for what reaches what in a small gptj\n"
    )
    assert "sharded     attention  transformer.h.*.attn" in captured.out
    assert "not verified" in captured.out
    plan = Plan.from_yaml(out)
    suggestion = suggest(unplanned("gptj"))
    assert replace(suggestion.plan, source="") == replace(plan, source="")
    assert resolve(plan, suggestion.model, 3).uncovered == ()
    assert "--force" in printed("suggest", str(tmp_path), str(out), code=2)
