"""The one exception tree. Each leaf knows its HTTP status, whether a retry can help, and whose fault it is.

`api/errors.py` turns a `TriptychError` into the body that OpenAI clients expect; nothing else maps errors to HTTP.
"""

from __future__ import annotations


class TriptychError(Exception):
    """Base of every error that Triptych raises on purpose."""

    status = 500
    type = "InternalServerError"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the request field at fault, if one is


class ConfigError(TriptychError):
    """A setting, a checkpoint or a flag that cannot work; raised before a process serves."""


# -- the client's fault ------------------------------------------------------------------------------------------------


class BadRequestError(TriptychError):
    """The request is understood and cannot be served as it is."""

    status = 400
    type = "BadRequestError"


class MalformedRequestError(BadRequestError):
    """The body is not of the API's form: bad JSON, a missing field, a wrong type."""

    type = "Bad Request"


class UnsupportedFieldError(BadRequestError):
    """A field that would change the result and is not implemented."""


class MediaError(BadRequestError):
    """A media input that cannot be fetched, is too large, or cannot be decoded."""


class MediaTimeoutError(TriptychError):
    """A media URL did not answer within the fetch limit."""

    status = 504
    type = "GatewayTimeoutError"
    retryable = True


class GrammarError(BadRequestError):
    """The output's grammar turned out too complex to follow, or no token of the model goes on with it."""


class AuthenticationError(TriptychError):
    """No API key came with the request, or one that is not known here."""

    status = 401
    type = "AuthenticationError"


class NotFoundError(TriptychError):
    status = 404
    type = "NotFoundError"


class MethodNotAllowedError(TriptychError):
    """The path is there, and not for this method."""

    status = 405
    type = "MethodNotAllowedError"


class RequestTimeoutError(TriptychError):
    """The HTTP body did not arrive in time."""

    status = 408
    type = "RequestTimeoutError"


class RequestTooLargeError(TriptychError):
    """The HTTP body is longer than the limit."""

    status = 413
    type = "RequestEntityTooLargeError"


class HeadersTooLargeError(TriptychError):
    """The HTTP headers are longer than the limit."""

    status = 431
    type = "HeadersTooLargeError"


class RateLimitError(TriptychError):
    """This client asked too often. Ask again after `retry_after_s`."""

    status = 429
    type = "RateLimitError"
    retryable = True

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


# -- the server's state ------------------------------------------------------------------------------------------------


class OverloadedError(TriptychError):
    """Admission is closed: too many requests are in flight. Ask again after `retry_after_s`."""

    status = 503
    type = "ServiceUnavailableError"
    retryable = True
    retry_after_s = 1


class NoCapacityError(OverloadedError):
    """No live worker hosts a stage that the request needs."""


class WorkerLostError(OverloadedError):
    """The worker that held the request died and no other could take it over."""


class DeadlineExceededError(TriptychError):
    status = 504
    type = "GatewayTimeoutError"
    retryable = True


class EngineError(TriptychError):
    """A step failed in a worker; the request is over, the worker is not."""


# -- between workers ---------------------------------------------------------------------------------------------------


class TransferError(TriptychError):
    """Bytes did not arrive as published."""

    retryable = True


class PeerLostError(TransferError):
    """The producer is gone, or is a later life of the process that published."""


class LinkError(PeerLostError):
    """The producer may live, and cannot be reached from here, or not in time."""


class ChecksumError(TransferError):
    """What was read is not what was published."""


class PoolExhaustedError(TransferError):
    """The producer's memory pool has no free range of the size asked for."""
