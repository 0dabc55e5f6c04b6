"""The Nuvemshop API, as far as thin webhooks need it: one resource by its id.

No redirects, a bounded answer, one timeout. What the answer means is said by the type of what is raised: nothing here
decides about attempts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import aiohttp

TIMEOUT_S = 20.0
MAX_BYTES = 5 * 1024 * 1024
# The API refuses a request that does not say who asks.
USER_AGENT = "Afluente (webhook-fetch-worker)"
DEFAULT_WAIT_S = 5.0
_IDENTIFIER = re.compile(r"[0-9]{1,20}\Z")


class ApiError(Exception):
    """The API did not give the resource; another try may. The message holds the status and nothing of the answer."""


class NotAllowed(ApiError):
    """The token is not, or no longer, good for this store."""


@dataclass(frozen=True)
class TooMany(Exception):
    """The store's rate limit is used up; ask again after so many seconds."""

    wait_s: float


class Client:
    """Open it in the event loop that uses it, and close it there."""

    def __init__(self, base_url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._base_url = base_url
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers={"User-Agent": USER_AGENT, "Accept": "application/json"},
            auto_decompress=True,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def get(self, store_id: str, resource: str, identifier: str, token: str) -> bytes | None:
        """The resource's JSON as it came; None when the store has no such thing (404)."""
        if not _IDENTIFIER.match(store_id) or not _IDENTIFIER.match(identifier):
            # Neither may lead to another path, or another store's.
            raise ApiError("an id is not a number")
        url = f"{self._base_url}/{store_id}/{resource}s/{identifier}"
        # The header is spelled so: Authentication, not Authorization.
        headers = {"Authentication": f"bearer {token}"}
        try:
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                match response.status:
                    case 200:
                        return await _bounded(response)
                    case 404:
                        return None
                    case 401 | 403:
                        raise NotAllowed(f"answered {response.status}: the store's access token is not taken")
                    case 429:
                        raise TooMany(_wait_s(response))
                    case status:
                        raise ApiError(f"answered {status}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(f"no answer: {type(error).__name__}") from None


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_chunked(65536):
        body += piece
        if len(body) > MAX_BYTES:
            raise ApiError("the answer is too large")
    return bytes(body)


def _wait_s(response: aiohttp.ClientResponse) -> float:
    """Seconds by Retry-After, else milliseconds by the API's own header."""
    for name, unit in (("Retry-After", 1.0), ("x-rate-limit-reset", 0.001)):
        value = response.headers.get(name, "")
        if value.isascii() and value.isdigit() and len(value) < 9:
            return max(1.0, int(value) * unit)
    return DEFAULT_WAIT_S
