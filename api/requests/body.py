"""From the bytes of a request to a JSON object, within bounds."""

import json
import re
from math import isinf
from typing import Any, NoReturn

from starlette.requests import Request

from prefixkv.api.errors import BodyTooLarge, WrongMediaType
from prefixkv.errors import InvalidRequest

# only an escape can smuggle half a surrogate pair through UTF-8
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body of `request`, which must be declared as JSON.

    Raises:
        WrongMediaType: the content type is not JSON.
        BodyTooLarge: more than `max_bytes`; noticed while reading, and no more is kept.
        ClientDisconnect: the client left before the end of the body.
    """
    _require_json(request.headers.get("content-type", ""))
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise BodyTooLarge(f"The body has {declared[:20]} bytes; the limit is {max_bytes}.")
    body = bytearray()
    async for piece in request.stream():
        if len(body) + len(piece) > max_bytes:
            raise BodyTooLarge(f"The body has more than {max_bytes} bytes, which is the limit.")
        body += piece
    return bytes(body)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse one JSON object, refusing all that Python's parser tolerates beyond JSON.

    Raises:
        InvalidRequest: saying where the text stops being JSON.
    """
    try:
        parsed = json.loads(
            raw.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite
        )
        if _SURROGATE_ESCAPE.search(raw):
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest("The body has half of a surrogate pair in a string.") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not UTF-8 at byte {error.start}.") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None
    except ValueError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {_json_type(parsed)}.")
    return parsed


def _require_json(content_type: str) -> None:
    media_type = content_type.partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    if not is_json:
        raise WrongMediaType(
            f"Content-Type is {content_type[:100]!r}; it must be 'application/json'."
        )


def _finite(number: str) -> float:
    value = float(number)
    if isinf(value):  # which JSON could not tell back
        raise ValueError(f"{number[:40]} is too large a number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
