"""`artifact bench ...`: measurements of parts, each in its own file of `artifact/bench/`."""

from __future__ import annotations

import importlib
import importlib.util

import click

from artifact.errors import UserError

# subject: where it lives per device, and its line in the help
BENCHES = {"kernels": "Every kernel of the decode step against the read bandwidth of the same run."}


class LazyBench(click.Group):
    """Benchmarks that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _kernels() if cmd_name == "kernels" else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            formatter.write_dl(list(BENCHES.items()))


def _kernels() -> click.Command:
    """The kernel benchmark of this machine's device."""
    from artifact.profiles import cuda_available

    name = "artifact.bench.cuda" if cuda_available() else "artifact.bench.cpu"
    if importlib.util.find_spec("artifact.bench") is None or importlib.util.find_spec(name) is None:
        raise UserError(f"{name} is not part of this installation; run from a complete checkout")
    command = importlib.import_module(name).command
    if not isinstance(command, click.Command):
        raise TypeError(f"{name}.command is not a command")
    return command


@click.group("bench", cls=LazyBench)
def command() -> None:
    """Measure parts of the decode step on this machine."""
