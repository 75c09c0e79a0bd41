"""What stands before the routes: request ids, keys, rates, CORS, and the limits of bodies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import serving
from tests.api.test_errors import error_of
from triptych.api import body
from triptych.api.keys import VARIABLE, Keys
from triptych.api.rates import MAX_BUCKETS, Rates
from triptych.errors import AuthenticationError, ConfigError, OverloadedError, RateLimitError

CHAT = "/v1/chat/completions"


# -- ids ---------------------------------------------------------------------------------------------------------------


async def test_a_request_id_goes_in_and_out_and_into_the_log(api: Any, caplog: Any) -> None:
    response = await api.http.post(CHAT, json=BODY, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "chatcmpl-mine-1"
    assert api.router.requests[0].request_id.startswith("chatcmpl-mine-1-")
    with caplog.at_level("INFO", logger="triptych.request"):
        response = await api.http.post(CHAT, json=BODY | {"n": 0}, headers={"x-request-id": "mine-2"})
    assert (response.status_code, response.headers["x-request-id"]) == (400, "mine-2")
    assert "request_id=mine-2 status=400" in caplog.text


BODY = {"messages": [{"role": "user", "content": "hi"}]}


async def test_the_field_goes_before_the_header(api: Any) -> None:
    response = await api.http.post(CHAT, json=BODY | {"request_id": "field"}, headers={"x-request-id": "header"})
    assert (response.headers["x-request-id"], response.json()["id"]) == ("field", "chatcmpl-field")


@pytest.mark.parametrize("given", ["", "two words", "x" * 129])
async def test_an_id_is_made_where_none_is_usable(api: Any, given: str) -> None:
    response = await api.http.post(CHAT, json=BODY, headers={"x-request-id": given})
    made = response.headers["x-request-id"]
    assert len(made) == 16
    assert response.json()["id"] == f"chatcmpl-{made}"


async def test_every_answer_has_an_id(api: Any) -> None:
    api.router.script = [RuntimeError("a bug")]
    answers = [await api.http.get("/nothing"), await api.http.get(CHAT), await api.http.get("/ping"), await api.chat()]
    assert [answer.status_code for answer in answers] == [404, 405, 200, 500]
    assert all(answer.headers["x-request-id"] for answer in answers)


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    (tmp_path / "keys").write_text("# ours\nkey-one\n\n  key-two \n")
    return str(tmp_path / "keys")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer key-thre\u00fc", "Basic key-one", "key-one"])
async def test_without_a_key_nothing_but_the_probes_answers(keys_file: str, header: str | None) -> None:
    async with serving(api_keys_file=keys_file) as api:
        headers = [] if header is None else [(b"authorization", header.encode())]
        response = await api.http.post(CHAT, json=BODY, headers=headers)
        assert error_of(response) == (401, "AuthenticationError", None)
        assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/topology", "/load", "/nothing"):
            assert (await api.http.get(path, headers=headers)).status_code == 401
        for path in ("/health", "/ping", "/ready", "/metrics", "/version"):
            assert (await api.http.get(path)).status_code == 200
        assert api.router.requests == []


async def test_each_key_is_a_client_of_its_own(keys_file: str) -> None:
    async with serving(api_keys_file=keys_file) as api:
        for key in ("Bearer key-one", "bearer key-two"):
            assert (await api.http.post(CHAT, json=BODY, headers={"authorization": key})).status_code == 200
        first, second = (request.client for request in api.router.requests)
        assert first != second
        assert "key" not in first + second


async def test_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch, keys_file: str) -> None:
    monkeypatch.setenv(VARIABLE, "a, b")
    keys = Keys.load(keys_file)
    assert len({keys.client_of(f"Bearer {key}") for key in ("a", "b", "key-one", "key-two")}) == 4
    with pytest.raises(AuthenticationError):
        keys.client_of("Bearer c")


def test_a_file_of_keys_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_keys_file"):
        Keys.load(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="no key"):
        Keys.load(str(tmp_path / "empty"))


# -- rates -------------------------------------------------------------------------------------------------------------


def test_a_bucket_fills_evenly() -> None:
    now_s = 0.0
    rates = Rates(6, lambda: now_s)
    for _ in range(6):
        rates.take("a")
    with pytest.raises(RateLimitError) as caught:
        rates.take("a")
    assert caught.value.retry_after_s == 10
    rates.take("b")
    now_s = 9.9
    with pytest.raises(RateLimitError):
        rates.take("a")
    now_s = 10.0
    rates.take("a")


def test_no_more_buckets_are_kept_than_clients_that_asked_lately() -> None:
    now_s = 0.0
    rates = Rates(1, lambda: now_s)
    for k in range(MAX_BUCKETS):
        rates.take(f"{k}")
    now_s = 61.0
    rates.take("one more")
    assert len(rates._buckets) == 1


async def test_too_many_requests(keys_file: str) -> None:
    async with serving(api_keys_file=keys_file, requests_per_minute=2) as api:
        answers = [await api.http.post(CHAT, json=BODY, headers={"authorization": "Bearer key-one"}) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert error_of(answers[2]) == (429, "RateLimitError", None)
        assert answers[2].headers["retry-after"] == "30"
        assert (await api.http.get("/v1/models", headers={"authorization": "Bearer key-one"})).status_code == 200
        assert (await api.http.post(CHAT, json=BODY, headers={"authorization": "Bearer key-two"})).status_code == 200


# -- CORS --------------------------------------------------------------------------------------------------------------

PREFLIGHT = {"origin": "https://a.example", "access-control-request-method": "POST"}


async def test_no_page_of_another_origin_may_call_by_default(api: Any) -> None:
    response = await api.http.options(CHAT, headers=PREFLIGHT)
    assert response.status_code == 405
    response = await api.http.post(CHAT, json=BODY, headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in response.headers


async def test_named_origins_may(keys_file: str) -> None:
    async with serving(api_keys_file=keys_file, cors_origins="https://a.example, https://b.example") as api:
        response = await api.http.options(CHAT, headers=PREFLIGHT)
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        response = await api.http.post(CHAT, json=BODY, headers={"origin": "https://b.example"})
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == "https://b.example"
        response = await api.http.options(CHAT, headers=PREFLIGHT | {"origin": "https://c.example"})
        assert "access-control-allow-origin" not in response.headers


# -- bodies ------------------------------------------------------------------------------------------------------------


async def test_refused_before_the_body_is_read(api: Any) -> None:
    async def never() -> Any:
        raise AssertionError("the body was read")
        yield b""  # type: ignore[unreachable]

    api.router.refusal = OverloadedError("full")
    response = await api.http.post(CHAT, content=never(), headers={"content-type": "application/json"})
    assert error_of(response) == (503, "ServiceUnavailableError", None)
    assert response.headers["retry-after"] == "1"


async def test_as_many_inside_as_may_be(api: Any) -> None:
    block = asyncio.Event()
    api.router.script.insert(0, block)
    running = [asyncio.create_task(api.chat()) for _ in range(200)]
    done, inside = await asyncio.wait(running, timeout=2)
    assert (len(done), len(inside)) == (184, 16)
    assert {task.result().status_code for task in done} == {503}
    block.set()
    assert {(await task).status_code for task in inside} == {200}
    assert api.admission.num_inside == 0


async def test_a_body_that_does_not_arrive() -> None:
    async def half() -> Any:
        yield b'{"messages": '
        await asyncio.sleep(60)

    async with serving(body_timeout_s=0.05) as api:
        response = await api.http.post(CHAT, content=half(), headers={"content-type": "application/json"})
        assert error_of(response) == (408, "RequestTimeoutError", None)
        assert api.admission.num_inside == 0


def begin(api: Any, path: str, first: bytes, go_on: asyncio.Event, last: bytes) -> asyncio.Task[httpx.Response]:
    """A POST whose body ends when the event is set."""

    async def content() -> AsyncIterator[bytes]:
        yield first
        await go_on.wait()
        yield last

    headers = {"content-type": "application/json"}
    return asyncio.create_task(api.http.post(path, content=content(), headers=headers))


async def test_bodies_that_do_not_arrive_keep_nobody_out(api: Any) -> None:
    go_on = asyncio.Event()

    waiting = [begin(api, path, b"{", go_on, b"}") for path in (CHAT, "/v1/responses", "/tokenize", "/detokenize") * 10]
    await asyncio.sleep(0.01)
    assert (api.admission.num_arriving, api.admission.num_inside) == (40, 0)
    assert (await api.chat()).status_code == 200
    go_on.set()
    assert {(await task).status_code for task in waiting} == {400}
    assert (api.admission.num_arriving, api.admission.num_inside) == (0, 0)


async def test_full_when_its_body_has_been_read(api: Any) -> None:
    go_on, block = asyncio.Event(), asyncio.Event()

    late = begin(api, CHAT, b'{"messages": [{"role": "user", "content": "hi"}]', go_on, b"}")
    await asyncio.sleep(0.01)
    api.router.script.insert(0, block)
    running = [asyncio.create_task(api.chat()) for _ in range(16)]
    await asyncio.sleep(0.05)
    assert api.admission.num_inside == 16
    go_on.set()
    assert error_of(await late) == (503, "ServiceUnavailableError", None)
    block.set()
    assert {(await task).status_code for task in running} == {200}


async def test_what_is_being_read_when_the_door_closes_is_waited_for_and_answered(api: Any) -> None:
    go_on = asyncio.Event()

    late = begin(api, CHAT, b'{"messages": [{"role": "user", "content": "hi"}]', go_on, b"}")
    await asyncio.sleep(0.01)
    api.admission.close()
    assert not await api.admission.wait_idle(0.01)
    assert (await api.chat()).status_code == 503
    go_on.set()
    assert (await late).status_code == 200
    assert await api.admission.wait_idle(1)


async def test_so_many_bodies_are_read_at_once(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_READING", 1)
    go_on = asyncio.Event()

    first = begin(api, CHAT, b"{", go_on, b"}")
    await asyncio.sleep(0.01)
    assert error_of(await api.chat()) == (503, "ServiceUnavailableError", None)
    go_on.set()
    assert (await first).status_code == 400
    assert (await api.chat()).status_code == 200


async def test_all_bodies_together_are_bounded() -> None:
    go_on = asyncio.Event()

    async with serving(max_reading_bytes=1000) as api:
        headers = {"content-type": "application/json"}
        first = begin(api, CHAT, b" " * 900, go_on, b"{}")
        await asyncio.sleep(0.01)
        response = await api.http.post(CHAT, content=b" " * 200, headers=headers)
        assert error_of(response) == (503, "ServiceUnavailableError", None)
        go_on.set()
        assert (await first).status_code == 400
        assert (await api.chat()).status_code == 200
