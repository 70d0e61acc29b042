"""`python -m artifact` is the `artifact` command."""

from artifact.cli import main

raise SystemExit(main())
