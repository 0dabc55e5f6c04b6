"""Which targets a tenant may make us call: the judgement, without any look-up.

Two questions are answered here, and both must say yes before a byte is sent:

* ``parse_target``: is the URL one we call at all? Scheme, spelling of the host, port, no user and password.
* ``refusal_of_address``: may a socket be connected to this address? Asked of every answer of the resolver, and again
  of the address that the socket is about to connect to, because the text of a URL proves nothing about where it
  leads.

What must stay true: an address is allowed because it is known to be public, not because it is on no list of bad ones
(IPv6 is 2000::/3 less what is carved out of it). Addresses that carry an IPv4 address inside are judged by the one
inside.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import urlsplit

Network = IPv4Network | IPv6Network

MAX_URL = 2048

# IANA's special-purpose registries, and two that are public by their number only.
_REFUSED_V4 = tuple(
    (IPv4Network(network), kind)
    for network, kind in (
        ("0.0.0.0/8", "this network"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "carrier-grade NAT"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "cloud platform"),  # Azure's wire server: a public number, answered inside the machine
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved"),
        ("192.0.2.0/24", "documentation"),
        ("192.31.196.0/24", "reserved"),
        ("192.52.193.0/24", "reserved"),
        ("192.88.99.0/24", "reserved"),
        ("192.168.0.0/16", "private"),
        ("192.175.48.0/24", "reserved"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
    )
)
_PUBLIC_V6 = IPv6Network("2000::/3")
_REFUSED_V6 = tuple(
    (IPv6Network(network), kind)
    for network, kind in (
        ("2001::/23", "reserved"),  # Teredo, benchmarking, ORCHID
        ("2001:db8::/32", "documentation"),
        ("2002::/16", "6to4"),
        ("2620:4f:8000::/48", "reserved"),
        ("3fff::/20", "documentation"),
    )
)
_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")

_REFUSED_SUFFIXES = ("localhost", "local", "localdomain", "internal", "intranet", "home.arpa", "lan")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


class TargetRefused(Exception):
    """The target may not be called, now or later: a mistake in the subscription, not a failure of the receiver.

    The reason is shown to the tenant, so it never says what a private name resolves to or what answered there.
    """


@dataclass(frozen=True)
class Target:
    """A URL taken apart: what is asked for (``host`` goes into Host and SNI) and where. ``host`` is lower-case ASCII,
    IPv6 without brackets."""

    scheme: str
    host: str
    port: int
    path: str
    query: str


def parse_target(url: str, *, https_only: bool, allowed: Sequence[Network] = ()) -> Target:
    """Take a subscription's URL apart. Raises TargetRefused with a reason that names the part at fault.

    ``allowed`` are networks that an operator opened (tests, a receiver on the same host); then the address alone
    decides about names that would else be refused as local ones.
    """
    if len(url) > MAX_URL or not url.isprintable() or " " in url or "\\" in url:
        raise TargetRefused(
            f"the URL is longer than {MAX_URL} characters or holds spaces, backslashes or control characters"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname
    except ValueError:
        raise TargetRefused("the URL cannot be read: check its host and port") from None
    if parts.scheme not in ("http", "https"):
        raise TargetRefused("only http and https URLs are called")
    if https_only and parts.scheme != "https":
        raise TargetRefused("only https URLs are called here")
    if "@" in parts.netloc:
        raise TargetRefused("a URL with a user or password is not called")
    if not host or ("[" in parts.netloc and _literal(host) is None):
        raise TargetRefused("the URL has no host that can be called")
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    if port not in (80, 443) and port < 1024:
        raise TargetRefused(f"port {port} is not called: use 443, 80 or one from 1024")
    path = parts.path or "/"
    if not path.isascii() or not parts.query.isascii():
        raise TargetRefused("the path and query of the URL must be percent-encoded ASCII")
    return Target(parts.scheme, _checked_host(host, allowed), port, path, parts.query)


def _checked_host(host: str, allowed: Sequence[Network]) -> str:
    literal = _literal(host)
    if literal is not None:
        reason = refusal_of_address(literal, allowed)
        if reason is not None:
            raise TargetRefused(reason)
        return str(literal)
    if "%" in host:
        raise TargetRefused("the host is percent-encoded")
    try:
        # IDNA folds wide and other look-alike letters, so that what is judged is what would be looked up.
        name = (host if host.isascii() else host.encode("idna").decode()).lower().removesuffix(".")
    except UnicodeError:
        raise TargetRefused("the host is not a valid name") from None
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise TargetRefused("the host is not a valid name")
    if _NUMBER.fullmatch(labels[-1]):
        # 2130706433, 0x7f000001, 0177.0.0.1, 127.1 and 127.0.0.1. are names to a parser and addresses to a resolver.
        raise TargetRefused("the host is a number in a spelling that is not called: write a plain address or a name")
    if not allowed and (
        len(labels) == 1 or any(name == suffix or name.endswith("." + suffix) for suffix in _REFUSED_SUFFIXES)
    ):
        raise TargetRefused("the host is a local name")
    return name


def _literal(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a host spells in the canonical way, or None. Python refuses leading zeros, hex and short
    forms."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def refusal_of_address(address: str | IPv4Address | IPv6Address, allowed: Sequence[Network] = ()) -> str | None:
    """Why a socket may not be connected to ``address``, or None if it may. Text that is no address is refused."""
    try:
        found = ipaddress.ip_address(address) if isinstance(address, str) else address
    except ValueError:
        return "the address cannot be read"
    inner = _inner_v4(found)
    if any(
        candidate.version == network.version and candidate in network
        for candidate in (found, inner)
        for network in allowed
    ):
        return None
    kind = _kind_v4(inner) if isinstance(inner, IPv4Address) else _kind_v6(inner)
    return None if kind is None else f"the address is not public ({kind})"


def _inner_v4(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address inside a mapped (::ffff:a.b.c.d) or NAT64 (64:ff9b::a.b.c.d) one: it is the one that is
    reached."""
    if isinstance(address, IPv6Address) and (address in _MAPPED or address in _NAT64):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _kind_v4(address: IPv4Address) -> str | None:
    return next((kind for network, kind in _REFUSED_V4 if address in network), None)


def _kind_v6(address: IPv6Address) -> str | None:
    if address.scope_id is not None:
        return "link-local"
    if address not in _PUBLIC_V6:
        # Loopback, unspecified, unique local, link-local, multicast, v4-compatible, local NAT64, SRv6, and all that
        # is yet to be given out.
        return "not global unicast"
    return next((kind for network, kind in _REFUSED_V6 if address in network), None)
