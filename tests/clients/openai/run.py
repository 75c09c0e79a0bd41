"""OpenAI's own SDK against a server. `python -m tests.clients.openai.run URL MODEL`."""

from __future__ import annotations

from tests.clients.openai import chat, completions, errors, responses, structured, tools
from tests.clients.script import run, server_from_arguments

if __name__ == "__main__":
    run(
        server_from_arguments(__doc__),
        (
            *chat.CHECKS,
            *completions.CHECKS,
            *tools.CHECKS,
            *structured.CHECKS,
            *responses.CHECKS,
            *errors.CHECKS,
        ),
    )
