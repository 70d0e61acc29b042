"""The `artifact` command: verbs in the order a person works. Each verb's module is imported only when it is called.

A user's mistake is one line and exit code 2; Ctrl-C is exit code 130 and loses no finished cell; a traceback is our
bug.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

from artifact.errors import UserError

# verb: where it lives, and its line in the help, which must be known without importing it
VERBS = {
    "doctor": (
        "artifact.verbs.doctor:command",
        "Say what this machine can run, what is missing and the command that adds it.",
    ),
    "fetch": ("artifact.embedded:fetch_command", "Fetch the embedded model (98 MB) and verify it."),
    "list": ("artifact.verbs.list:command", "List the claims: what each needs, its minutes and memory."),
    "predict": ("artifact.predict:command", "Predict crossing and bounds of a model from its dimensions alone."),
    "gate": ("artifact.verbs.gate:command", "Measure which mode is fastest at which length and write it as a table."),
    "generate": ("artifact.verbs.generate:command", "Generate text in one mode, or in the one that the gate chooses."),
    "verify": ("artifact.verbs.verify:command", "Measure and judge the named claims."),
    "verify-all": ("artifact.verbs.verify:all_command", "Measure and judge every claim and write the tables."),
    "campaign": ("artifact.verbs.campaign:command", "Measure claims without judging, in pieces that add up."),
    "show": ("artifact.verbs.show:command", "Explain a claim, or show a finished run."),
    "tables": ("artifact.verbs.tables:command", "Render the LaTeX tables of a run again from its samples."),
    "quality": (
        "artifact.verbs.quality:command",
        "Perplexity and retrieval of one configuration of a model.",
    ),
    "finetune": ("artifact.verbs.finetune:command", "Train a LoRA adapter for a thresholded model, sparse as it runs."),
    "report": ("artifact.verbs.report:command", "Write page, figures and standard records of a run again; --pdf too."),
    "compare": ("artifact.verbs.compare:command", "Two runs side by side, with what differs between the machines."),
    "selftest": ("artifact.verbs.selftest:command", "See that seeded faults turn every claim away from `reproduced`."),
    "docs": ("artifact.verbs.docs:command", "Write the generated parts of the documentation again."),
    "bench": ("artifact.verbs.bench:command", "Measure the kernels against the read bandwidth of this machine."),
}
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


class LazyGroup(click.Group):
    """A group whose verbs are imported when they are called; its help needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{VERBS[cmd_name][0]} is not a command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="sparse-decoding-artifact", message="%(version)s")
@click.pass_context
def group(context: click.Context) -> None:
    """Check the claims of four papers about sparse LLM decoding on this machine.

    Exit codes of verify: 0 all asserted predicates reproduced, 1 something contradicted, 2 wrong usage,
    3 inconclusive or not run, 4 an error, 130 interrupted.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        result: Any = group.main(args=None if argv is None else list(argv), prog_name="artifact", standalone_mode=False)
    except UserError as error:
        return _complain(str(error))
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = f" (see `{context.command_path} --help`)" if context is not None else ""
        return _complain(f"{error.format_message()}{where}")
    except (KeyboardInterrupt, click.Abort):
        print("Interrupted; finished cells are kept, resume with --run.", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)
    return result if isinstance(result, int) else 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _complain(message: str) -> int:
    print(f"artifact: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    raise SystemExit(main())
