"""`triptych demo`: a 1E/1P/1D deployment of the packaged checkpoint answers questions about pictures, over HTTP.

Pictures and answers are kept in `demo-output/`. Needs no network and no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.cli.serve import say
from triptych.config import ApiConfig, Config
from triptych.placement import Placement

if TYPE_CHECKING:
    import httpx
    from PIL import Image

    from triptych.demo.pages import Question, Task

NUM_QUESTIONS = 6
MAX_TOKENS = 48
MODEL = "demo"
HEARTBEATS_S = 1.2  # until every worker has told its last counts
TASKS: Sequence[Task] = ("title", "number", "count", "stamp", "colour", "list")
COUNTERS = ("encode_forwards_total", "encode_items_total", "encode_embeds_total", "embed_transfer_items_total")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", help="ask the packaged model about pictures", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="go on serving until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port of the API (default: a free one)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="other questions")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR", help="where answers go")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import uvloop

    from triptych.observe import logging

    logging.set_up("warning")
    args.output.mkdir(parents=True, exist_ok=True)
    return uvloop.run(_main(args))


async def _main(args: argparse.Namespace) -> int:
    from triptych.cli.foreground import serve
    from triptych.launch import Deployment

    config = Config(api=ApiConfig(port=args.port, log_level="warning"))
    deployment = Deployment(config, Placement.parse("1E/1P/1D"), say=say)

    async def then() -> int | None:
        answered = await ask_all(deployment.url, args.output, args.seed)
        if args.keep:
            say(f"still serving at {deployment.url}; Ctrl-C to stop")
            return None
        return 0 if answered else 1

    return await serve(deployment, say, then)


async def ask_all(url: str, output: Path, seed: int) -> bool:
    """Asks, prints and saves; True when every question was answered, rightly or not."""
    import httpx

    from triptych.demo.pages import held_out

    records: list[dict[str, Any]] = []
    timing: dict[str, Any] | None = None
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:
        for number, question in enumerate(held_out(NUM_QUESTIONS, seed, tasks=TASKS), 1):
            pictures = _save(question, number, output)
            record: dict[str, Any] = {"number": number, "question": question.text, "expected": question.answer}
            record["pictures"] = pictures
            say(f"\n{number}. {question.text}  [{', '.join(pictures)}]")
            answer = await (_stream if number == 1 else _ask)(client, question)
            timing = answer.pop("timing", None) or timing
            record |= answer
            say(f"   expected: {question.answer}\n   answer:   {record.get('answer', record.get('error'))}")
            records.append(record)
        await asyncio.sleep(HEARTBEATS_S)
        workers = (await client.get("/topology")).json()["workers"]
    _report(workers, timing)
    _write(output, records, workers)
    return all("answer" in record for record in records)


def _body(question: Question, stream: bool) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": _data_url(part)}}
        for part in question.parts
    ]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "timing": True,
        "stream": stream,
    }


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(_png(image)).decode()


def _save(question: Question, number: int, output: Path) -> list[str]:
    names = [f"{number}-{k}.png" for k in range(1, len(question.images) + 1)]
    for name, image in zip(names, question.images, strict=True):
        (output / name).write_bytes(_png(image))
    return names


async def _ask(client: httpx.AsyncClient, question: Question) -> dict[str, Any]:
    """Answer, seconds and timing, or the error."""
    started_s = time.monotonic()
    response = await client.post("/v1/chat/completions", json=_body(question, stream=False))
    body = response.json()
    if response.status_code != 200:
        return {"error": body["error"]["message"]}
    answer = body["choices"][0]["message"]["content"]
    return {"answer": answer, "seconds": round(time.monotonic() - started_s, 3), "timing": body["timing"]}


async def _stream(client: httpx.AsyncClient, question: Question) -> dict[str, Any]:
    """The same, chunk by chunk, each printed as it comes."""
    started_s = time.monotonic()
    record: dict[str, Any] = {}
    pieces: list[str] = []
    async with client.stream("POST", "/v1/chat/completions", json=_body(question, stream=True)) as response:
        if response.status_code != 200:
            return {"error": json.loads(await response.aread())["error"]["message"]}
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                return {"error": chunk["error"]["message"]}
            record["timing"] = chunk.get("timing") or record.get("timing")
            piece = "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
            if piece:
                say(f"   + {(time.monotonic() - started_s) * 1000:6.0f} ms  {piece!r}")
                pieces.append(piece)
    return record | {"answer": "".join(pieces), "seconds": round(time.monotonic() - started_s, 3)}


def _report(workers: Sequence[dict[str, Any]], timing: dict[str, Any] | None) -> None:
    """What each worker counted itself, and the timeline of the last question."""
    import msgspec

    from triptych.observe.trace import draw
    from triptych.types import Timing

    say("\nWhat the workers counted themselves:")
    for worker in workers:
        counted = {name: int(worker["counters"].get(name, 0)) for name in COUNTERS}
        shown = ", ".join(f"{name} {value}" for name, value in counted.items())
        say(f"  {worker['name']} (pid {worker['info']['pid']}, {'+'.join(worker['stages'])}): {shown}")
    if timing is not None:
        say("\nThe last question's way through the stages:")
        say(draw(msgspec.convert(timing, Timing)))


def _write(output: Path, records: list[dict[str, Any]], workers: Sequence[dict[str, Any]]) -> None:
    counters = {worker["name"]: worker["counters"] for worker in workers}
    (output / "answers.json").write_text(json.dumps({"answers": records, "counters": counters}, indent=2) + "\n")
    lines = ["# Answers of the demo", ""]
    for record in records:
        lines += [f"## {record['number']}. {record['question']}", ""]
        lines += [f"![{name}]({name})" for name in record["pictures"]]
        lines += ["", f"- expected: {record['expected']}", f"- answer: {record.get('answer', record.get('error'))}", ""]
    (output / "answers.md").write_text("\n".join(lines))
    right = sum(record.get("answer", "").strip() == record["expected"] for record in records)
    say(f"\n{right} of {len(records)} answers are as expected; pictures and answers are in {output}/")
