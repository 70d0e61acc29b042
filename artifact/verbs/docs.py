"""`artifact docs`: write what the claim registry says into REPRODUCE.md, the appendix forms and codemeta.json."""

from __future__ import annotations

import click

from artifact.errors import UserError


@click.command("docs")
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 when something is out of date.")
def command(check: bool) -> int:
    """Write the generated parts of the documentation again, from the claims themselves."""
    from artifact.report import docs

    stale = docs.out_of_date()
    if not check:
        try:
            for path, text in docs.generated().items():
                (docs.ROOT / path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"documentation cannot be written ({error.strerror}); run it in a checkout") from None
    for path in stale:
        click.echo(f"{'out of date' if check else 'written'}: {path}")
    if not stale:
        click.echo("everything is up to date")
    return 1 if check and stale else 0
