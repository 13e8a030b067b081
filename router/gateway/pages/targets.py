"""The targets that Prometheus scrapes, for its HTTP service discovery.

The answer is a list of groups in the form of `http_sd_configs`. There is one target for each
gateway port: processes that share a port answer for each other. Workers have no metrics port, since
they report to gateways. An address that means "all of this machine" is replaced by the host in the
request's `host` header.
"""

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from msgspec import Struct

from router.inbox.api_errors import invalid_value

ANY_ADDRESS = ("0.0.0.0", "::")
_HOST = re.compile(r"([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")


class TargetGroup(Struct):
    """Addresses to scrape, with labels for all of them."""

    targets: list[str]
    labels: dict[str, str]


def targets_of(urls: Iterable[str], scheme: str, asked: str) -> list[TargetGroup]:
    """Returns groups of targets. `asked` is the `host` header of the request.

    While no other gateway is known, `asked` is the only target. Raises ApiError if it is malformed.
    """
    if _HOST.fullmatch(asked) is None:
        raise invalid_value(f"host is {asked[:40]!r}; expected a name or address and a port", None)
    here = f"{scheme}://{asked}"
    groups: dict[str, TargetGroup] = {}
    for url in list(urls) or [here]:
        parts = urlsplit(url)
        host = urlsplit(here).hostname if parts.hostname in ANY_ADDRESS else parts.hostname
        port = parts.port or (443 if parts.scheme == "https" else 80)
        target = f"[{host}]:{port}" if ":" in (host or "") else f"{host}:{port}"
        labels = {"__scheme__": parts.scheme, "__metrics_path__": "/metrics"}
        groups[target] = TargetGroup([target], labels)
    return [groups[target] for target in sorted(groups)]
