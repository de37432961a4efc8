"""What a server says when it serves: where, and what to paste next."""

import json
import logging
import shlex

from rich.console import Console

from prefixkv.api.options.server_options import ServerOptions
from prefixkv.api.serving.listener import authority

_UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}

logger = logging.getLogger("prefixkv.api")


def announce(options: ServerOptions, port: int, model: str, *, needs_key: bool) -> None:
    """Print it for people, or log one line for machines."""
    scheme = "https" if options.ssl_certfile else "http"
    address = authority(_UNSPECIFIED.get(options.host, options.host), port)
    base_url = f"{scheme}://{address}{options.root_path}/v1"
    headline = f"prefixkv serves {model} at {base_url}"
    if options.log_format == "json":
        logger.info(headline)
        return
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for line in (headline, "", *_examples(base_url, model, needs_key)):
        console.print(line)


def _examples(base_url: str, model: str, needs_key: bool) -> tuple[str, ...]:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    # never a key: what is printed here ends in logs
    header = """ -H "Authorization: Bearer $API_KEY\"""" if needs_key else ""
    key = 'os.environ["API_KEY"]' if needs_key else '"none"'
    return (
        f"  curl {base_url}/chat/completions{header} -H 'Content-Type: application/json' "
        f"-d {shlex.quote(body)}",
        "",
        f'  openai.OpenAI(base_url="{base_url}", api_key={key})',
    )
