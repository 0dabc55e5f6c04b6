"""Every kind of target that must not be called, and that the public ones still may."""

import ipaddress

import pytest

from consumers.outbound.addresses import TargetRefused, parse_target, refusal_of_address

REFUSED = """
127.0.0.1 127.254.254.254 0.0.0.0 0.1.2.3 ::1 ::
10.0.0.1 10.255.255.255 172.16.0.1 172.31.255.255 192.168.0.1 192.168.255.255 fc00::1 fdff::1
169.254.0.1 169.254.169.254 169.254.170.2 fe80::1 fe80::1%eth0 febf::1
fd00:ec2::254 fd20:ce::254 100.100.100.200 168.63.129.16
100.64.0.1 100.127.255.255 192.0.0.1 192.0.0.192 192.88.99.1 198.18.0.1 198.19.255.255 240.0.0.1 255.255.255.255
224.0.0.1 239.255.255.255 ff00::1 ff02::1
192.0.2.1 198.51.100.1 203.0.113.1 2001:db8::1 3fff::1
::ffff:127.0.0.1 ::ffff:7f00:1 ::ffff:169.254.169.254 ::127.0.0.1
64:ff9b::7f00:1 64:ff9b::10.0.0.1 64:ff9b:1::7f00:1 2002:7f00:1:: 2001::7f00:1
fec0::1 100::1 5f00::1 4000::1 2606:4700::1%1
127.1 2130706433 0x7f000001 0177.0.0.1 127.0.0.1. localhost
""".split()  # noqa: SIM905  a list to be read, not a column of quotes

ALLOWED = """
1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0 169.253.255.255 169.255.0.0
172.15.255.255 172.32.0.0 192.167.255.255 192.169.0.0 198.17.255.255 198.20.0.0 223.255.255.255
2606:4700:4700::1111 2001:4860:4860::8888 2a00:1450::1 ::ffff:8.8.8.8 64:ff9b::8.8.8.8
""".split()  # noqa: SIM905  a list to be read, not a column of quotes


PYTHON_SPECIAL = """
0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/29 192.0.0.170/31 192.0.2.0/24
192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4 255.255.255.255/32
::1/128 ::/128 100::/64 2001:db8::/32 2001:10::/28 fc00::/7 fe80::/10
""".split()  # noqa: SIM905


@pytest.mark.parametrize("address", REFUSED)
def test_address_is_refused(address):
    assert refusal_of_address(address) is not None


@pytest.mark.parametrize("address", ALLOWED)
def test_public_address_is_allowed(address):
    assert refusal_of_address(address) is None


def test_python_knows_of_no_special_network_that_we_allow():
    # The standard library's own list, as a second opinion: an address at each end of what it calls not global.
    for text in PYTHON_SPECIAL:
        network = ipaddress.ip_network(text)
        for address in (network[0], network[-1]):
            assert not address.is_global, address
            assert refusal_of_address(address) is not None, address


def test_an_allowed_network_opens_its_addresses_and_no_other():
    allowed = (ipaddress.ip_network("127.0.0.0/8"),)
    assert refusal_of_address("127.0.0.1", allowed) is None
    assert refusal_of_address("::ffff:127.0.0.1", allowed) is None
    assert refusal_of_address("10.0.0.1", allowed) is not None
    assert refusal_of_address("::1", allowed) is not None


@pytest.mark.parametrize(
    "host",
    [
        *(f"[{address}]" if ":" in address else address for address in REFUSED),
        "017700000001",
        "0x7f.1",
        "1.1.1.1.",
        "1.1",
        "0x",
        "ｌocalhost",
        "LOCALHOST",
        "localhost.",
        "a.localhost",
        "①②⑦.0.0.1",
        "127。0。0。1",
        "%31%32%37.0.0.1",
        "127.0.0.1%00.example.com",
        "metadata.google.internal",
        "printer.local",
        "x.home.arpa",
        "postgres",
        "kafka",
        "schema-registry",
        "",
        "exa mple.com",
        "example..com",
        "-a.example.com",
        "a" * 64 + ".com",
        "[::1",
        "[v1.x]",
    ],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_url_with_such_a_host_is_refused(scheme, host):
    with pytest.raises(TargetRefused):
        parse_target(f"{scheme}://{host}/hook", https_only=False)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.com/",
        "file:///etc/passwd",
        "gopher://example.com/",
        "//example.com/",
        "example.com",
        "http:example.com",
        "http:///x",
        "https://user:password@example.com/",
        "https://user@example.com/",
        "https://@example.com/",
        "https://example.com@127.0.0.1/",
        "https://example.com\\@127.0.0.1/",
        "https://example.com:22/",
        "https://example.com:0/",
        "https://example.com:65536/",
        "https://example.com:x/",
        "https://example.com/a b",
        "https://example.com/\r\nX-Injected: 1",
        "https://example.com/é",
        "https://example.com/?é",
        "https://example.com/" + "a" * 2048,
        "",
    ],
)
def test_url_is_refused(url):
    with pytest.raises(TargetRefused):
        parse_target(url, https_only=False)


def test_only_https_where_only_https_is_called():
    with pytest.raises(TargetRefused, match="only https"):
        parse_target("http://example.com/", https_only=True)
    assert parse_target("https://example.com/", https_only=True).port == 443


@pytest.mark.parametrize(
    ("url", "host", "port", "path", "query"),
    [
        ("https://Example.com", "example.com", 443, "/", ""),
        ("http://example.com./a?b=c#d", "example.com", 80, "/a", "b=c"),
        ("https://example.com:8443/a%2Fb", "example.com", 8443, "/a%2Fb", ""),
        ("https://bücher.example.com/", "xn--bcher-kva.example.com", 443, "/", ""),
        ("https://8.8.8.8/", "8.8.8.8", 443, "/", ""),
        ("https://[2606:4700:4700::1111]:8443/", "2606:4700:4700::1111", 8443, "/", ""),
    ],
)
def test_url_is_taken_apart(url, host, port, path, query):
    target = parse_target(url, https_only=False)
    assert (target.host, target.port, target.path, target.query) == (host, port, path, query)


def test_a_refusal_does_not_tell_what_a_private_name_leads_to():
    with pytest.raises(TargetRefused) as caught:
        parse_target("http://10.20.30.40/", https_only=False)
    assert "10.20.30.40" not in str(caught.value)


def test_an_allow_list_lets_the_address_decide_about_local_names():
    allowed = (ipaddress.ip_network("127.0.0.0/8"),)
    assert parse_target("http://localhost:9000/", https_only=False, allowed=allowed).host == "localhost"
    assert parse_target("http://127.0.0.1:9000/", https_only=False, allowed=allowed).port == 9000
    with pytest.raises(TargetRefused):
        parse_target("http://10.0.0.1/", https_only=False, allowed=allowed)
