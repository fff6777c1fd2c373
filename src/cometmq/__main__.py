"""`python -m cometmq`: the `cometmq` command."""

from cometmq.cli import main

main()
