"""Multiple-choice accuracy through EleutherAI's `lm-eval`: its tasks, prompts and metric on this engine's models.

Every token but the first of a prompt takes the branch, as the papers' models do; what a choice scores is the sum of
the log-probabilities of its tokens. lm-eval is an extra (`eval`) and its data come from the Hugging Face hub: cells
read what is cached there and fetch nothing. ARTIFACT_CHOICE_TASKS names other tasks, or files that define some.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from artifact.engine import teacher
from artifact.engine.models import Weights
from artifact.engine.prefill import logits, prefill
from artifact.errors import UserError, one_line
from artifact.measure.masked_bench import MaskedBench, open_bench
from artifact.measure.masked_plan import Arm, Sizes, arm_of, sizes_of
from artifact.measure.quality_cells import profile_params
from artifact.projection.branch import Projection
from artifact.records import Cell, Run

Row = dict[str, Any]
VARIABLE = "ARTIFACT_CHOICE_TASKS"
# Of our choosing: the text of the paper prints averages and names no task.
TASKS = ("arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande", "boolq")
LIMIT, QUICK_LIMIT = 100, 20  # documents of a task that are asked; all of them at the paper's scale
FETCH = "lm-eval run --model dummy --limit 1 --tasks"


def installed() -> bool:
    """Whether lm-eval can be imported here."""
    return importlib.util.find_spec("lm_eval") is not None


def tasks() -> list[str]:
    """Names of tasks, or files that define one, that the user wants asked."""
    named = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    return [str(Path(name).resolve()) if name.endswith((".yaml", ".yml")) else name for name in named] or list(TASKS)


def choice_cell(run: Run, claim: str, sizes: Sizes, arms: Sequence[Arm]) -> Cell:
    """A cell that asks every arm the same questions."""
    limit = QUICK_LIMIT if run.quick else None if run.profile.name == "paper" else LIMIT
    params = profile_params(run.profile) | {"sizes": sizes.record(), "arms": [arm.record() for arm in arms]}
    params |= {"tasks": tasks(), "limit": limit}
    return Cell(claim, "choices", "artifact.measure.multiple_choice:asked", params, timeout_s=7200.0)


def asked(params: Row) -> Iterator[Row]:
    """Task: a row of kind `choice` per arm and document, or one of kind `no-choice` with the reason when the data of a
    task are not cached.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    yield {"progress": 0.0, "doing": "loading tasks"}
    try:
        loaded = load(params["tasks"])
    except ConnectionError as error:  # what the hub's client raises for data that it has not cached
        names = ",".join(Path(name).stem for name in params["tasks"])
        reason = f"the data of {names} are not cached ({one_line(error)[:200]}); run `{FETCH} {names}` once"
        yield {"kind": "no-choice", "reason": reason}
        return
    said: list[Row] = []
    bench = open_bench(
        *(params["model"], params["text"], params["device"], params["dtype"]),
        sizes_of(params["sizes"]),
        lambda share, doing: said.append({"progress": share, "doing": doing}),
    )
    arms = [arm_of(record) for record in params["arms"]]
    for number, arm in enumerate(arms):
        yield {"progress": number / len(arms), "doing": f"{arm.label} answers {len(loaded)} tasks"}
        branch = bench.branch(arm, torch.zeros(0, dtype=torch.int64))
        for task, document, right in answers(bench, branch, loaded, params["limit"]):
            yield arm.record() | {
                "kind": "choice",
                "label": arm.label,
                "task": task,
                "document": document,
                "right": right,
                "identity": bench.weights.identity,
            }


def load(names: Sequence[str]) -> dict[str, Any]:
    """Tasks of lm-eval by name, their data read. UserError for one that is unknown or not multiple-choice."""
    from lm_eval.tasks import TaskManager, get_task_dict

    folders = sorted({str(Path(name).parent) for name in names if name.endswith((".yaml", ".yml"))})
    try:
        found: dict[str, Any] = get_task_dict([Path(name).stem for name in names], TaskManager(include_path=folders))
    except KeyError as error:
        raise UserError(f"{VARIABLE}: {one_line(error)}; `lm-eval ls tasks` names those there are") from error
    for name, task in found.items():
        if getattr(task, "OUTPUT_TYPE", None) != "multiple_choice":
            raise UserError(f"{VARIABLE} names {name}, which is not multiple-choice; name tasks that are")
    return found


def answers(
    bench: MaskedBench, branch: Projection | None, loaded: dict[str, Any], limit: int | None
) -> Iterator[tuple[str, int, float]]:
    """Task, number of the document, and 1.0 where the likeliest choice is the right one."""
    from lm_eval.evaluator import evaluate

    result = evaluate(
        harness_model(bench, branch), loaded, limit=limit, bootstrap_iters=0, log_samples=True, verbosity="ERROR"
    )
    for task, samples in result["samples"].items():
        for sample in samples:
            yield task, int(sample["doc_id"]), float(sample["acc"])


def harness_model(bench: MaskedBench, branch: Projection | None) -> Any:
    """The model under a branch, as lm-eval asks it."""
    from lm_eval.api.model import TemplateLM

    class Asked(TemplateLM):
        tokenizer = bench.tokenizer

        @property
        def eot_token_id(self) -> int:
            found = bench.tokenizer.bos_token_id
            return int(found if found is not None else bench.tokenizer.eos_token_id)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return list(bench.tokenizer(string, **special).input_ids)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return [likelihood(bench.weights, branch, before, choice) for _, before, choice in requests]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            raise UserError(f"a task asks for perplexity, which `artifact quality` measures; take it out of {VARIABLE}")

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            raise UserError(f"a task asks for generated text and is not multiple-choice; take it out of {VARIABLE}")

    return Asked()


def likelihood(
    weights: Weights, branch: Projection | None, before: Sequence[int], choice: Sequence[int]
) -> tuple[float, bool]:
    """Log-probability in nats of the tokens of a choice behind others, and whether greedy decoding would write them.

    What does not fit the window is cut from the front.
    """
    ids = torch.tensor([*before, *choice][-weights.shape.window :], dtype=torch.int64, device=weights.device)
    first = prefill(weights, ids[:1])
    hidden = first.hidden
    if len(ids) > 2:
        hidden = torch.cat((hidden, teacher.forward(weights, first.cache, ids[1:-1], branch).hidden))
    scores = logits(weights, hidden[-len(choice) :]).log_softmax(-1)
    targets = ids[-len(choice) :]
    total = float(scores.double().gather(1, targets[:, None]).sum())
    return total, bool((scores.argmax(-1) == targets).all())
