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
        return kernels if cmd_name == "kernels" else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            formatter.write_dl(list(BENCHES.items()))


def _kernels(device: str) -> click.Command:
    """The kernel benchmark of a device; "auto": of this machine's."""
    from artifact.profiles import cuda_available

    if device == "cuda" and not cuda_available():
        raise UserError("no usable CUDA GPU here; leave --device out, and `artifact doctor` says what is missing")
    name = "artifact.bench.cuda" if device != "cpu" and cuda_available() else "artifact.bench.cpu"
    if importlib.util.find_spec("artifact.bench") is None or importlib.util.find_spec(name) is None:
        raise UserError(f"{name} is not part of this installation; run from a complete checkout")
    found = importlib.import_module(name).command
    if not isinstance(found, click.Command):
        raise TypeError(f"{name}.command is not a command")
    return found


@click.command(
    "kernels",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def kernels(device: str, rest: tuple[str, ...]) -> None:
    """Every kernel of the decode step against the read bandwidth of the same run; options are those of the device."""
    names = ["-h", "--help"]
    _kernels(device).main(list(rest), "artifact bench kernels", standalone_mode=False, help_option_names=names)


@click.group("bench", cls=LazyBench)
def command() -> None:
    """Measure parts of the decode step on this machine."""
