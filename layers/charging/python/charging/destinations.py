"""Where a webhook may go: the grammar of its URL, and the rule that its addresses keep."""

import ipaddress
import re
from collections.abc import Container
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from pydantic_core import Url, ValidationError

from charging import errors

type Address = IPv4Address | IPv6Address

# What servers and proxies take for granted that they can hold.
URL_CHARACTERS = 2048
# The one port that a webhook may be sent to, and the one that leads out of the stack's network. On others live mail,
# name and shell servers, databases and consoles, which no webhook should be made to knock at.
HTTPS_PORT = 443

# The parser would drop tabs and line ends, take a backslash for a slash, and overlook a third one.
_PLAIN = re.compile(r"https?://(?!/)[^\s\\\x00-\x20\x7f]+", re.IGNORECASE)
# Names as resolvers and certificates know them; the underscore is no host's by the book, and some have it.
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")

# Everything in IPv4 that is not somebody's public unicast address.
# Source: https://www.iana.org/assignments/iana-ipv4-special-registry, and the multicast and reserved blocks above it.
_SPECIAL_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # shared by a carrier's customers
            "127.0.0.0/8",  # loopback
            "169.254.0.0/16",  # link-local, and the clouds' metadata
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocol assignments
            "192.0.2.0/24",  # documentation
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # multicast tunnels
            "192.88.99.0/24",  # 6to4 relays
            "192.168.0.0/16",  # private
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)

# The only block of IPv6 that has public unicast addresses. Outside it are loopback, link-local, site-local and unique
# local addresses, multicast, and the forms that carry an IPv4 address: mapped, compatible, translated, NAT64.
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
# What is not public inside it. Source: https://www.iana.org/assignments/iana-ipv6-special-registry
_SPECIAL_V6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",  # documentation
        ),
    )
)
# The first half of an interface identifier whose second half is an IPv4 address (RFC 5214); one bit of it varies.
_ISATAP = 0x0000_5EFE
_ISATAP_MASK = 0xFDFF_FFFF


@dataclass(frozen=True, slots=True)
class Destination:
    """A URL that a webhook may be sent to, taken apart once.

    `host` is a name in ASCII or an address, IPv6 without its brackets; `target` is the path with the query; `url` is
    the one spelling of it all.
    """

    url: str
    scheme: str
    host: str
    port: int
    target: str

    @property
    def address(self) -> Address | None:
        """The host, where it is an address and no name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def authority(self) -> str:
        """The host with its port where that is not the scheme's own, as the Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if (self.scheme, self.port) == ("https", HTTPS_PORT) else f"{host}:{self.port}"


def destination(url: str, *, allows_loopback: bool = False, ports: Container[int] = (HTTPS_PORT,)) -> Destination:
    """Reads a URL as browsers do (WHATWG), so that every spelling of a host comes out as the same one.

    An international name comes out in its ASCII form, and an address that is written in octal, hexadecimal or as one
    number comes out as the address that it is. With `allows_loopback`, for development alone, loopback addresses
    pass, on any port and with plain http too. Raises UrlNotAllowed, whose message is for the one who gave the URL.
    """
    if not _PLAIN.fullmatch(url):
        raise errors.UrlNotAllowed("must be an absolute https URL without white space or backslashes")
    try:
        parsed = Url(url)
    except (ValidationError, UnicodeError):
        raise errors.UrlNotAllowed("must be a valid URL") from None
    if parsed.username is not None or parsed.password is not None:
        raise errors.UrlNotAllowed("must not carry a user name or a password")
    if parsed.fragment is not None:
        raise errors.UrlNotAllowed("must not have a fragment")
    host = (parsed.host or "").removeprefix("[").removesuffix("]")
    query = "" if parsed.query is None else f"?{parsed.query}"
    found = Destination(str(parsed), parsed.scheme, host, parsed.port or 0, f"{parsed.path or '/'}{query}")
    _check_host(found, allows_loopback=allows_loopback, ports=ports)
    if len(found.url) > URL_CHARACTERS:
        raise errors.UrlNotAllowed(f"must have at most {URL_CHARACTERS} characters, percent-encoded")
    return found


def _check_host(found: Destination, *, allows_loopback: bool, ports: Container[int]) -> None:
    address = found.address
    is_loopback = found.host == "localhost" if address is None else address.is_loopback
    if is_loopback and allows_loopback:
        return
    if found.scheme != "https":
        raise errors.UrlNotAllowed("must be an https URL")
    if found.port not in ports:
        raise errors.UrlNotAllowed(f"must have port {HTTPS_PORT}, which a URL without a port has")
    if address is None and not _NAME.fullmatch(found.host):
        raise errors.UrlNotAllowed("must name a host as DNS can")
    if address is not None and not is_public(address):
        raise errors.UrlNotAllowed("must not point at an address that is not public")


def is_public(address: Address) -> bool:
    """Tells whether an address is a public unicast one, of a host that anybody on the internet may speak to.

    The default is no: an address that carries another one inside it is none, whatever the inner one is.
    """
    if isinstance(address, IPv4Address):
        return not any(address in block for block in _SPECIAL_V4)
    if address.scope_id is not None or address not in _UNICAST_V6:
        return False
    is_isatap = int(address) >> 32 & _ISATAP_MASK == _ISATAP
    return not is_isatap and not any(address in block for block in _SPECIAL_V6)
