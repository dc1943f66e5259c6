"""Whether a tracker's server answers, asked before its library is: some of those wait for minutes, even at exit."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request

_ANSWER_S = 10.0


def require_answer(url: str) -> None:
    """Raises ConnectionError if nothing answers at an address within 10 s; whatever it answers will do."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_ANSWER_S).close()
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if not isinstance(reason, ssl.SSLError):  # the library may know certificates that are not known here
            raise ConnectionError(f"no answer from {url} ({reason})") from error
