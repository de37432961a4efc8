"""How a server's log looks: lines for people, or one JSON object a line for machines.

A record may carry `extra={"fields": {...}}`, which both formats show beside the message.
"""

import json
import logging
import logging.config
from datetime import UTC, datetime
from typing import Any

from prefixkv.api.options.server_options import LogFormat
from prefixkv.api.requests.request_id import current_request_id


class TextFormatter(logging.Formatter):
    """Time, level, logger and message, then `name=value` of each field."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line without a traceback."""
        fields = {"request_id": current_request_id(), **getattr(record, "fields", {})}
        told = [f" {name}={_shown(value)}" for name, value in fields.items() if value is not None]
        return super().formatMessage(record).rstrip() + "".join(told)


def _shown(value: Any) -> str:
    """Return a value in quotes if it has spaces: a client's id must not look like more fields."""
    text = str(value)
    return json.dumps(text) if " " in text else text


class JsonFormatter(logging.Formatter):
    """An object with time (UTC), level, logger and message, fields, and perhaps an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line of ASCII, whatever is in the record."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage().strip(),
        }
        if (request_id := current_request_id()) is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


_FORMATTERS: dict[LogFormat, type[logging.Formatter]] = {
    "text": TextFormatter,
    "json": JsonFormatter,
}


def configure_logs(format_: LogFormat, level: str, http_level: str) -> None:
    """Send all logs of the process to standard error in one format.

    Args:
        format_: of each line.
        level: of prefixkv's own loggers; other libraries tell warnings only.
        http_level: of the server's connections and of the line for each request.
    """
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"chosen": {"()": _FORMATTERS[format_]}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "chosen"}},
            "root": {"level": "WARNING", "handlers": ["stderr"]},
            "loggers": {
                "prefixkv": {"level": level.upper()},
                "prefixkv.access": {"level": http_level.upper()},
                "uvicorn": {"level": http_level.upper()},
            },
        }
    )
    logging.captureWarnings(format_ == "json")
