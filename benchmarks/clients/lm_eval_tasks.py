"""EleutherAI's evaluation harness: a task of two questions, by log-likelihood and by generation."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.clients.features import Checks, Service, expect

check = Checks("lm-eval")
QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " purple seven"], "answer": 0},
    {"question": "One, two, three,", "choices": [" of the of", " four"], "answer": 1},
]
MULTIPLE_CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
GENERATION = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[answer].strip()}}",
    "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 8, "do_sample": False},
    "filter_list": [
        {
            "name": "word",
            "filter": [{"function": "regex", "regex_pattern": "(Paris|four)"}, {"function": "take_first"}],
        }
    ],
    "metric_list": [{"metric": "exact_match"}],
}


def _scores(at: Service, model: str, path: str, task: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The results of `lm_eval --model MODEL --tasks tiny`, with its samples."""
    folder = Path(tempfile.mkdtemp(prefix="lm-eval-"))
    os.environ |= {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    import lm_eval
    from lm_eval.tasks import TaskManager

    (folder / "tiny.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "tiny.jsonl")}}}
    (folder / "tiny.yaml").write_text(json.dumps({"task": "tiny", **data, "test_split": "test", **task}))
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={"model": at.model, "base_url": f"{at.base_url}/{path}", "max_retries": 1, "timeout": 240},
        tasks=["tiny"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    samples: list[Any] = found["samples"]["tiny"]
    expect(len(samples) == len(QUESTIONS), samples)
    return {**found["results"]["tiny"], "samples": samples}


@check("loglikelihood")
def loglikelihood(at: Service) -> str:
    """The tokenizer is the service's own (/tokenizer_info): nothing of the model is needed here."""
    scores = _scores(at, "local-completions", "completions", MULTIPLE_CHOICE)
    expect(scores["acc,none"] == 1.0, scores)
    sums = [value for sample in scores["samples"] for ((value, _),) in sample["resps"]]
    expect(len(sums) == 4 and all(value < 0 for value in sums), sums)
    return f"acc {scores['acc,none']:.2f}"


@check("generate")
def generate(at: Service) -> str:
    scores = _scores(at, "local-completions", "completions", GENERATION)
    expect(scores["exact_match,word"] == 1.0, scores)
    return f"exact match {scores['exact_match,word']:.2f}"


@check("generate-chat")
def generate_chat(at: Service) -> str:
    scores = _scores(at, "local-chat-completions", "chat/completions", GENERATION, apply_chat_template=True)
    expect(all(sample["resps"][0][0] for sample in scores["samples"]), scores)
    return f"exact match {scores['exact_match,word']:.2f}"
