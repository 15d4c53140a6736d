"""Tasks of lm_eval, the LM evaluation harness, that work without the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TASKS = ("loglikelihood", "rolling", "generation")


def write_tasks(folder: Path) -> Path:
    """Write `TASKS` (multiple choice, perplexity, generation) to `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"question": "The sky is", "choices": ["blue", "a dog", "seven"], "answer": 0},
        {"question": "Grass is", "choices": ["a car", "green", "late"], "answer": 1},
        {"question": "Snow is", "choices": ["hot", "a verb", "white"], "answer": 2},
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    kinds: dict[str, Any] = {
        "loglikelihood": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "brier_score"}],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_target": "{{question}} {{choices[answer]}}.",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "generation": {
            "output_type": "generate_until",
            "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False},
            "metric_list": [{"metric": "bleu"}, {"metric": "chrf"}],
        },
    }
    for name, settings in kinds.items():
        text = json.dumps({"task": name, **shared, **settings})  # JSON is valid YAML
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder
