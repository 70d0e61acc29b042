"""`artifact generate --model PATH --mode auto|dense|projection|kv|both --prompt-file F`: text, greedily, as it comes.

The text goes to standard output; what was decoded in which mode, how fast and with how many bytes per step goes to
standard error when it ends. With --json standard output holds one JSON object instead of the text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from artifact.account import Mode
from artifact.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from artifact.engine.session import Session
    from artifact.measure.workbench import Workbench
    from artifact.profiles import Profile

AUTO = "auto"
MODES = (AUTO, *(mode.value for mode in Mode))
R_P, R_KV = 0.7, 0.3


@click.command("generate")
@click.option("--model", metavar="PATH", help="A Hugging Face directory or GGUF file; default: the embedded model.")
@click.option("--mode", type=click.Choice(MODES), default=AUTO, show_default=True, help="auto asks the gate's table.")
@click.option("--prompt-file", "prompt_file", required=True, metavar="FILE", help="The prompt; - is standard input.")
@click.option("--new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="At most this many.")
@click.option("--switch", "switches", multiple=True, metavar="STEP:MODE", help="Change the mode before a step; repeat.")
@click.option("--gate", "gate_file", metavar="FILE", help="The table for auto; default: what `artifact gate` wrote.")
@click.option("--r-p", type=float, help=f"Projection keep ratio.  [default: the table's, else {R_P}]")
@click.option("--r-kv", type=float, help=f"KV keep ratio.  [default: the table's, else {R_KV}]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output instead of the text.")
def command(
    model: str | None,
    mode: str,
    prompt_file: str,
    new_tokens: int,
    switches: tuple[str, ...],
    gate_file: str | None,
    r_p: float | None,
    r_kv: float | None,
    as_json: bool,
) -> int:
    """Generate text; every branch may be left and taken up again between two steps."""
    from artifact.engine import prompts
    from artifact.measure import workbench

    plan = switch_plan(switches, new_tokens)
    text = read_prompt(prompt_file)
    if mode != AUTO and gate_file is not None:
        raise UserError(f"--gate goes with --mode auto, not with --mode {mode}; leave one of them out")
    if mode == AUTO and (r_p, r_kv) != (None, None):
        raise UserError("--mode auto takes its keep ratios from the gate's table; run `artifact gate` with other ones")
    profile = profile_for(model)
    bench = workbench.open_workbench(profile.model, None, profile.device, profile.dtype)
    prompt = prompts.encode(bench.tokenizer, text)
    if prompt.shape[0] + new_tokens > bench.weights.shape.window:
        raise UserError(
            f"{prompt_file} has {prompt.shape[0]} tokens, with {new_tokens} new ones that exceeds the model's window "
            f"of {bench.weights.shape.window}; shorten it or lower --new-tokens"
        )
    first, why = Mode(mode) if mode != AUTO else Mode.DENSE, "asked for"
    if mode == AUTO:
        first, why, r_p, r_kv = ask_gate(bench, profile, gate_file, int(prompt.shape[0]), new_tokens)
    session = opened(bench, prompt, new_tokens, R_P if r_p is None else r_p, R_KV if r_kv is None else r_kv)
    pieces = []
    for piece in stream(session, bench.tokenizer, {0: first} | plan, new_tokens):
        pieces.append(piece)
        if not as_json:
            click.echo(piece, nl=False)
            sys.stdout.flush()
    found = report(session, why)
    if as_json:
        click.echo(json.dumps(found | {"text": "".join(pieces)}, sort_keys=True, separators=(",", ":")))
    else:
        click.echo()
        click.echo(card(found), err=True)
    return 0


def profile_for(model: str | None) -> Profile:
    """The device of this machine with the given model, or the embedded one. UserError for a name without weights."""
    from artifact import embedded, profiles
    from artifact.measure.cells import is_name

    path = model or str(embedded.path())
    if is_name(path) and not Path(path).exists():
        raise UserError(
            f"--model {path} names dimensions, and text needs trained weights; give a directory or GGUF file"
        )
    return profiles.choose("gpu" if profiles.cuda_available() else "embedded", path)


def read_prompt(name: str) -> str:
    """The text of the prompt file. UserError when it cannot be read, is not UTF-8 or is empty."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"--prompt-file {name} cannot be read ({reason}); give a text file") from None
    if not text.strip():
        raise UserError(f"--prompt-file {name} is empty; give the text to go on from")
    return text


def switch_plan(switches: Sequence[str], new_tokens: int) -> dict[int, Mode]:
    """Modes by the step before which they are taken, from texts like 64:kv."""
    plan: dict[int, Mode] = {}
    for text in switches:
        step, _, name = text.partition(":")
        if not step.isdecimal() or name not in MODES[1:]:
            raise UserError(f"--switch {text} is not STEP:MODE; give one like 64:kv ({', '.join(MODES[1:])})")
        if not 0 < int(step) < new_tokens or int(step) in plan:
            raise UserError(f"--switch {text}: give every step between 1 and {new_tokens - 1} at most once")
        plan[int(step)] = Mode(name)
    return plan


def ask_gate(
    bench: Workbench, profile: Profile, file: str | None, prompt_tokens: int, new_tokens: int
) -> tuple[Mode, str, float, float]:
    """The mode that the gate chooses, why, and the keep ratios of its table."""
    from artifact.deploy.gate import Gate, current_device
    from artifact.verbs.gate import default_folder

    path = Path(file) if file else default_folder(bench.weights.identity) / "gate.json"
    if not path.is_file():
        raise UserError(
            f"there is no gate table {path}; run `artifact gate --model {Path(profile.model).name}` first, "
            "or name a --mode"
        )
    gate = Gate.load(path, bench.weights.identity, current_device(profile.device))
    chosen = gate.choose(prompt_tokens, new_tokens)
    why = f"gate: {chosen.ms / 1e3:.2f} s expected for {new_tokens} tokens, dense {chosen.dense_ms / 1e3:.2f} s"
    return chosen.mode, why, gate.table.r_p, gate.table.r_kv


def opened(bench: Workbench, prompt: Any, new_tokens: int, r_p: float, r_kv: float) -> Session:
    """Prefill the prompt."""
    from artifact.engine.session import Session

    return Session(bench.weights, prompt, new_tokens, bench.calibration, r_p, r_kv)


def stream(
    session: Session, tokenizer: PreTrainedTokenizerBase, plan: dict[int, Mode], new_tokens: int
) -> Iterator[str]:
    """Yield text as it is decoded, until the model ends it or the room is used up."""
    words = Words(tokenizer)
    for step in range(new_tokens):
        if step in plan:
            session.use(plan[step])
        token = session.step()
        if token == tokenizer.eos_token_id:
            break
        if piece := words.push(token):
            yield piece
    if piece := words.rest():
        yield piece


class Words:
    """Tokens to text piece by piece: a character may be spread over several tokens, so some wait for the next."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context, self._said = 0, 0  # tokenizers decode a token by its neighbours: one piece of context is kept

    def push(self, token: int) -> str:
        """The text that this token completes, often empty."""
        self._ids.append(token)
        piece = self._piece()
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._context, self._said = self._said, len(self._ids)
        return piece

    def rest(self) -> str:
        """What is left when no further token comes."""
        return self._piece() if self._said < len(self._ids) else ""

    def _piece(self) -> str:
        before = str(self._tokenizer.decode(self._ids[self._context : self._said]))
        return str(self._tokenizer.decode(self._ids[self._context :]))[len(before) :]


def report(session: Session, why: str) -> dict[str, Any]:
    """What was decoded: per stretch of one mode its tokens per second and bytes per step."""
    stretches = session.stretches()
    timed, seconds = sum(one.timed for one in stretches), sum(one.seconds for one in stretches)
    return {
        "prompt_tokens": session.prompt_tokens,
        "prefill_s": session.prefill_seconds,
        "selection_s": session.selection_seconds,
        "new_tokens": sum(one.steps for one in stretches),
        "tokens_per_s": timed / seconds if timed else None,
        "why": why,
        "r_p": session.r_p,
        "r_kv": session.r_kv,
        "stretches": [
            {
                "mode": one.mode.value,
                "steps": one.steps,
                "tokens_per_s": one.tokens_per_s,
                "step_bytes": one.step_bytes,
            }
            for one in stretches
        ],
    }


def card(found: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"{found['prompt_tokens']} prompt tokens in {found['prefill_s']:.2f} s, selection in "
        f"{found['selection_s']:.2f} s, {found['new_tokens']} new tokens at {_speed(found)} ({found['why']})"
    ]
    lines += [
        f"  {one['mode']}: {one['steps']} steps, {_speed(one)}, {one['step_bytes'] / 1e6:.1f} MB/step"
        for one in found["stretches"]
    ]
    return "\n".join(lines)


def _speed(found: dict[str, Any]) -> str:
    """Tokens per second without the first step of each mode, which compiles."""
    speed = found["tokens_per_s"]
    return "speed unknown: one step" if speed is None else f"{speed:.1f} tokens/s"
