"""Where a webhook may go: which URLs name a receiver, and which addresses are public."""

import ipaddress
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from charging import errors
from charging.destinations import destination, is_public

# What nobody's public host has, of each kind an example.
NOT_PUBLIC = [
    "0.0.0.0",  # noqa: S104 - nothing is bound to it
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.253",
    "169.254.169.254",
    "169.254.170.2",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",
    "192.0.0.9",
    "192.0.0.192",
    "192.0.2.1",
    "192.31.196.1",
    "192.52.193.1",
    "192.88.99.1",
    "192.168.0.1",
    "192.175.48.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::2",
    "::7f00:1",
    "::8.8.8.8",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "::ffff:0:127.0.0.1",
    "64:ff9b::1.1.1.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "100::1",
    "100:0:0:1::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:1::1",
    "2001:2::1",
    "2001:3::1",
    "2001:4:112::1",
    "2001:10::1",
    "2001:20::1",
    "2001:30::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:808:808::1",
    "2620:4f:8000::1",
    "3fff::1",
    "4000::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::23",
    "fd00:ec2::254",
    "fd20:ce::254",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "2600:1f18::1%eth0",
    "2600:1f18::5efe:10.0.0.1",
    "2600:1f18::200:5efe:10.0.0.1",
]
PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "9.255.255.255",
    "11.0.0.0",
    "100.63.255.255",
    "100.128.0.0",
    "126.255.255.255",
    "128.0.0.0",
    "172.15.255.255",
    "172.32.0.0",
    "192.0.1.0",
    "192.167.255.255",
    "192.169.0.0",
    "198.17.255.255",
    "198.20.0.0",
    "223.255.255.255",
    "2001:200::1",
    "2001:4860:4860::8888",
    "2003::1",
    "2400:cb00::1",
    "2600:1f18::1",
    "2606:4700::1111",
    "2a05:d018::1",
    "2c0f:fb50::1",
    "3ffe::1",
]

# Every form in which an IPv6 address carries an IPv4 address that somebody on the way may take out of it.
EMBEDDINGS: dict[str, Callable[[int], int]] = {
    "mapped": lambda inner: 0xFFFF << 32 | inner,
    "compatible": lambda inner: inner,
    "translated": lambda inner: 0xFFFF << 48 | inner,
    "NAT64": lambda inner: 0x0064_FF9B << 96 | inner,
    "NAT64, local use, /48": lambda inner: 0x0064_FF9B_0001 << 80 | inner >> 16 << 64 | (inner & 0xFFFF) << 40,
    "NAT64, local use, /96": lambda inner: 0x0064_FF9B_0001 << 80 | inner,
    "6to4": lambda inner: 0x2002 << 112 | inner << 80 | 1,
    "Teredo's client": lambda inner: 0x2001_0000 << 96 | 0x0808_0808 << 64 | inner ^ 0xFFFF_FFFF,
    "Teredo's server": lambda inner: 0x2001_0000 << 96 | inner << 64 | 0x0808_0808 ^ 0xFFFF_FFFF,
    "ISATAP": lambda inner: 0x2600_1F18 << 96 | 0x0000_5EFE << 32 | inner,
    "ISATAP, a unique address": lambda inner: 0x2600_1F18 << 96 | 0x0200_5EFE << 32 | inner,
}


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    """Loopback, private, link-local, shared, reserved, multicast, tunnelled, a cloud's metadata, and nobody's."""
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_admitted(address: str) -> None:
    """Also the neighbours of the blocks that are not."""
    assert is_public(ipaddress.ip_address(address))


@given(st.ip_addresses())
def test_nothing_is_public_that_the_standard_library_knows_better(address: IPv4Address | IPv6Address) -> None:
    """Ours is the stricter rule: whatever it admits is global, and none of the special kinds."""
    special = (
        address.is_private,
        address.is_loopback,
        address.is_link_local,
        address.is_multicast,
        address.is_reserved,
        address.is_unspecified,
        not address.is_global,
    )
    assert not (is_public(address) and any(special))


@pytest.mark.parametrize("embedding", EMBEDDINGS)
@given(st.ip_addresses(v=4))
@example(IPv4Address("127.0.0.1"))
@example(IPv4Address("169.254.169.254"))
@example(IPv4Address("8.8.8.8"))
def test_an_address_inside_another_is_refused(embedding: str, inner: IPv4Address) -> None:
    """In every form, and whatever the inner one is: what is refused as itself cannot come in disguise."""
    assert not is_public(IPv6Address(EMBEDDINGS[embedding](int(inner))))


@given(st.ip_addresses(v=4))
def test_a_host_is_the_address_that_it_spells(address: IPv4Address) -> None:
    """As one number, in hexadecimal, in octal, with parts left out: it is read as what it is, or refused as that."""
    number = int(address)
    head, rest = number >> 24, number & 0xFF_FFFF
    octets = address.packed
    spellings = [
        str(address),
        f"{address}.",
        str(number),
        hex(number),
        f"0{number:o}",
        f"{head}.{rest}",
        f"0x{head:X}.{rest}",
        ".".join(f"0{octet:o}" for octet in octets),
        ".".join(f"0x{octet:02x}" for octet in octets),
        "".join(f"%{ord(character):02x}" for character in str(address)),
        str(address).translate({ord("0") + digit: 0xFF10 + digit for digit in range(10)}),
        f"[::ffff:{address}]",
    ]
    for host in spellings:
        if is_public(address) and not host.startswith("["):
            assert destination(f"https://{host}/").address == address
        else:
            with pytest.raises(errors.UrlNotAllowed, match="public"):
                destination(f"https://{host}/")


@pytest.mark.parametrize(
    ("url", "host", "port", "target", "authority"),
    [
        ("https://receiver.example", "receiver.example", 443, "/", "receiver.example"),
        ("HTTPS://Receiver.EXAMPLE:443/Hook", "receiver.example", 443, "/Hook", "receiver.example"),
        ("https://receiver.example:443/a/../b?c=d&e", "receiver.example", 443, "/b?c=d&e", None),
        ("https://bücher.example/straße?ü=ß", "xn--bcher-kva.example", 443, "/stra%C3%9Fe?%C3%BC=%C3%9F", None),
        ("https://ⓡeceiver。example/?", "receiver.example", 443, "/?", "receiver.example"),
        ("https://under_score.example/%0d%0aX:", "under_score.example", 443, "/%0d%0aX:", "under_score.example"),
        ("https://1.1.1.1/", "1.1.1.1", 443, "/", "1.1.1.1"),
        ("https://[2606:4700:0::1111]/", "2606:4700::1111", 443, "/", "[2606:4700::1111]"),
    ],
)
def test_a_url_is_read_as_browsers_do(url: str, host: str, port: int, target: str, authority: str | None) -> None:
    """One spelling comes out: lower case, ASCII, no default port, no dots in the path; and it reads as itself."""
    found = destination(url)
    assert (found.host, found.port, found.target) == (host, port, target)
    assert found.authority == (authority or host)
    assert destination(found.url) == found


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("", "absolute"),
        ("receiver.example/hook", "absolute"),
        ("//receiver.example/hook", "absolute"),
        ("https:receiver.example", "absolute"),
        ("https:\\\\receiver.example\\", "absolute"),
        ("https://receiver.example\\@127.0.0.1/", "absolute"),
        (" https://receiver.example/", "absolute"),
        ("https://receiver.example/a b", "absolute"),
        ("https://receiver.example/\thook", "absolute"),
        ("https://receiver.example/\r\nX-Header: 1", "absolute"),
        ("https://receiver.example/\x00", "absolute"),
        ("https://receiver.example/\u2028", "absolute"),
        ("ftp://receiver.example/", "absolute"),
        ("file:///etc/passwd", "absolute"),
        ("gopher://receiver.example:6379/_FLUSHALL", "absolute"),
        ("http://receiver.example/", "https"),
        ("http://receiver.example:8080/", "https"),
        ("http://127.0.0.1:8080/", "https"),
        ("https://", "absolute"),
        ("https:///hook", "absolute"),
        ("https:///", "absolute"),
        ("https://?hook", "valid"),
        ("https://receiver.example:65536/", "valid"),
        ("https://receiver.example:-1/", "valid"),
        ("https://1.2.3.256/", "valid"),
        ("https://1.2.3.4.5/", "valid"),
        ("https://[fe80::1%eth0]/", "valid"),
        ("https://[fe80::1%25eth0]/", "valid"),
        ("https://[2606:4700::1111/", "valid"),
        ("https://xn--zzzz-/", "valid"),
        ("https://\ud800/", "valid"),
        ("https://user@receiver.example/", "user name"),
        ("https://:secret@receiver.example/", "password"),
        ("https://receiver.example/#", "fragment"),
        ("https://receiver.example/#part", "fragment"),
        ("https://receiver.example:0/", "port"),
        ("https://receiver.example:22/", "port"),
        ("https://receiver.example:80/", "port"),
        ("https://receiver.example:8443/", "port"),
        ("https://receiver.example:65535/", "port"),
        ("https://1.1.1.1:6379/", "port"),
        ("https://receiver..example/", "host"),
        ("https://receiver.example./", "host"),
        ("https://*.example/", "host"),
        ("https://exa$mple/", "host"),
        (f"https://{'a' * 64}.example/", "host"),
        (f"https://{'a.' * 130}example/", "host"),
        (f"https://receiver.example/{'a' * 2048}", "2048"),
        (f"https://receiver.example/{'ü' * 1000}", "2048"),
        ("https://localhost:8443/\x7f", "absolute"),
        ("https://[::1]/", "public"),
        ("https://[::ffff:169.254.169.254]/latest/meta-data/", "public"),
        ("https://0/", "public"),
    ],
)
def test_another_url_is_refused_with_what_it_must_be(url: str, wrong: str) -> None:
    """Whoever gave it learns how to correct it."""
    with pytest.raises(errors.UrlNotAllowed, match=wrong) as refused:
        destination(url)
    assert str(refused.value).startswith("must ")


@given(st.text(st.characters(exclude_categories=[])) | st.from_regex(r"https?://[^/]{1,40}(/.*)?", fullmatch=True))
def test_any_text_is_a_destination_or_refused(text: str) -> None:
    """Nothing else is raised, and what is admitted is a request that HTTP can carry."""
    try:
        found = destination(text)
    except errors.UrlNotAllowed:
        return
    assert found.scheme == "https"
    assert found.url.isascii()
    h11.Request(method="POST", target=found.target, headers=[("Host", found.authority)])
    assert destination(f"https://{found.authority}{found.target}") == found


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8080/hook",
        "http://[::1]:8080/",
        "http://localhost:8080/",
        "https://127.8.9.10:8443/",
        "http://localhost/hook",
    ],
)
def test_loopback_is_admitted_for_development_alone(url: str) -> None:
    """By an argument, and only then."""
    assert destination(url, allows_loopback=True).url == url
    if "localhost" not in url or url.startswith("http:"):
        with pytest.raises(errors.UrlNotAllowed):
            destination(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://receiver.example:8080/",
        "http://10.0.0.1:8080/",
        "https://10.0.0.1/",
        "http://[::ffff:10.0.0.1]:8080/",
        "https://receiver.example:8443/",
        "http://localhost.receiver.example:8080/",
    ],
)
def test_development_admits_loopback_alone(url: str) -> None:
    """No other address, and no plain http and no other port to anywhere else."""
    with pytest.raises(errors.UrlNotAllowed):
        destination(url, allows_loopback=True)
