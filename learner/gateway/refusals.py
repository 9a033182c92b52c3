"""Answers that are not success: a status and the words that say what the caller then does."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc


class Refused(Exception):
    """Ends a call with a status. The message names the rule, every value in it, and the way out."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def precondition(message: str) -> Refused:
    """FAILED_PRECONDITION: the same call cannot succeed later."""
    return Refused(grpc.StatusCode.FAILED_PRECONDITION, message)


def unavailable(message: str) -> Refused:
    """UNAVAILABLE: the same call may succeed later."""
    return Refused(grpc.StatusCode.UNAVAILABLE, message)


Method = Callable[[Any, Any, Any], Awaitable[Any]]


def answering(method: Method) -> Method:
    """Wraps a servicer method (self, request, context): Refused becomes its status, ValueError INVALID_ARGUMENT."""

    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except Refused as refused:
            code, message = refused.code, str(refused)
        except ValueError as error:
            code, message = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        return await context.abort(code, message)

    return wrapper
