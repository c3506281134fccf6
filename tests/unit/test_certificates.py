"""The roots of RDS: a file for each region, with what AWS has published for it and nothing else."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtensionOID, NameOID

from charging import certificates, errors

FILES = sorted(Path(certificates.__file__).parent.glob("*.pem"))
REGIONS = [file for file in FILES if file.stem != "proxy"]
INSTANCE, PROXY = "charges.abc.eu-central-1.rds.amazonaws.com", "charges.proxy-abc.eu-central-1.rds.amazonaws.com"


def roots(file: Path) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(file.read_bytes())


def name(root: x509.Certificate) -> str:
    return str(root.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def test_there_are_certificates() -> None:
    """The next tests have something to look at."""
    assert len(REGIONS) >= 30


@pytest.mark.parametrize("file", REGIONS, ids=lambda file: file.stem)
def test_a_region_has_its_own_three_roots(file: Path) -> None:
    """One for each authority that an instance there can be told to use, and none of another region's."""
    kinds = ("ECC384", "RSA2048", "RSA4096")
    assert sorted(map(name, roots(file))) == [f"Amazon RDS {file.stem} Root CA {kind} G1" for kind in kinds]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_root_has_signed_itself_and_outlives_this_release(file: Path) -> None:
    """It is an authority, its signature is its own, and it is good for another year."""
    for root in roots(file):
        root.verify_directly_issued_by(root)
        constraints = root.extensions.get_extension_for_oid(ExtensionOID.BASIC_CONSTRAINTS).value
        assert isinstance(constraints, x509.BasicConstraints)
        assert constraints.ca
        assert root.not_valid_after_utc > datetime.now(UTC) + timedelta(days=365)


def test_the_host_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy's certificate comes from another authority than an instance's."""
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    assert certificates.roots_for(INSTANCE).name == "eu-central-1.pem"
    assert certificates.roots_for(PROXY).name == "proxy.pem"


@pytest.mark.parametrize("region", ["mars-north-1", ""])
def test_no_server_is_trusted_without_a_root(monkeypatch: pytest.MonkeyPatch, region: str) -> None:
    """A region without a file is an error that names it, and not a connection that verifies nothing."""
    monkeypatch.setenv("AWS_REGION", region)
    with pytest.raises(errors.Misconfigured, match=f"region '{region}'"):
        certificates.roots_for(INSTANCE)
