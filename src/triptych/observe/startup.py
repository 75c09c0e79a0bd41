"""Lines that a person reads while a deployment starts. Used by `launch.py` in the router process."""

from __future__ import annotations

from triptych.types import WorkerInfo


def describe_worker(info: WorkerInfo) -> str:
    weights = info.weights
    cores = ",".join(map(str, info.cores)) or "any"
    megabytes = f"{weights.bytes_read / 1e6:.1f} of {weights.bytes_total / 1e6:.1f} MB"
    kernels = ", ".join(f"{part} {runs}" for part, runs in info.kernels.items()) or "unknown"
    return (
        f"  {info.address.name:<16} {'+'.join(info.stages):<22} cores {cores:<8} pid {info.pid:<8} weights "
        f"{weights.shards_read} of {weights.shards_total} shards, {megabytes} in {weights.load_s:.2f} s, "
        f"kernels: {kernels}"
    )


def curl_line(url: str, model: str, needs_key: bool) -> str:
    """A first question to paste. A key stays out of the terminal."""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is 2 plus 3?"}}]}}'
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
